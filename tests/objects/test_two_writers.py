"""Two machines write one output: the later one takes over, and nothing that the first still sends changes what it wrote."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import StoreError
from gymdata.store import Run
from gymdata.store.paths import placed_output
from tests.objects.appending import append
from tests.objects.stores import FaultyStore
from tests.store.conftest import make_row

URL = "s3://bucket/runs/new"
IDS = [f"{index:032x}" for index in range(5)]


def test_an_upload_that_ends_after_the_run_was_taken_over_changes_nothing(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hangs in the upload of part 1, in several requests; B takes over and finishes; A's upload completes, A ends: every
    reader sees exactly B's rows, validate and pairs succeed, and ls calls the run complete."""
    monkeypatch.setattr("gymdata.remote.client.WHOLE", 1000)
    hangs, back = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        assert back.wait(60)

    store.fail("stop", "PUT", "part-00001", act=hang)
    first = Run.open(
        placed_output(URL, tmp_path / "a"), identity={"policy": "tiny"}, extent={"rows": 5}, operation={}, run_id="run",
        rows_per_file=2,
    )  # fmt: skip
    for index in (0, 1, 2, 7):
        first.append(make_row(index))
    assert hangs.wait(60)
    append(URL, tmp_path / "b", 0, 5, "take-over")
    before = {key: store.get(f"bucket/{key}") for key in store.names()}
    back.set()
    with pytest.raises(StoreError, match="another machine took over"):
        first.close()
    assert {key: store.get(f"bucket/{key}") for key in before} == before
    assert sorted(gymdata.load_rollouts(URL, ["rollout_id"])["rollout_id"].to_pylist()) == IDS
    ids = gymdata.query("select rollout_id from rollouts order by 1", f"{URL}/rollouts/*.parquet")["rollout_id"]
    assert ids.to_pylist() == IDS
    assert main(["validate", URL]) == 0
    assert main(["pairs", URL, "-o", str(tmp_path / "pairs"), "--strategy", "all"]) in (0, 1)
    assert "differs from" not in capsys.readouterr().err
    assert [each.state for each in gymdata.ls("s3://bucket/runs").outputs] == ["complete"]
