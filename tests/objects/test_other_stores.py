"""Google Cloud Storage and Azure: what differs from S3 in how they list and compare objects changes nothing for a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import OutsideError, StoreError
from gymdata.store import Run
from gymdata.store.paths import placed_output
from tests.objects.appending import append
from tests.objects.conftest import plain
from tests.objects.stores import Objects, objects
from tests.store.conftest import make_row

pytestmark = pytest.mark.store
IDS = [f"{index:032x}" for index in range(5)]
ENVIRONMENT = {
    "gs": {"GOOGLE_BEARER_TOKEN": "hidden-secret"},
    "az": {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_ACCOUNT_KEY": "aGlkZGVuLXNlY3JldA=="},
}
ADDRESS = {"gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ENDPOINT"}


@pytest.fixture(params=["gs", "az"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def held(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    """An empty bucket of that kind, and the environment that leads there."""
    with objects(azure=scheme == "az") as (made, url):
        for name, value in {
            **ENVIRONMENT[scheme],
            ADDRESS[scheme]: url,
            "GYMDATA_SPOOL": str(tmp_path / "here"),
        }.items():
            monkeypatch.setenv(name, value)
        yield made


def test_a_run_is_continued_on_another_machine(
    scheme: str, held: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One machine begins a run, another that has only listed it continues it: every row is there once, and readable."""
    url = f"{scheme}://bucket/runs/new"
    append(url, tmp_path / "a", 0, 2)
    monkeypatch.setenv("GYMDATA_SPOOL", str(tmp_path / "b"))
    assert main(["validate", url]) == 0
    append(url, tmp_path / "b", 0, 5)
    assert plain(held.held) == [f"runs/new/rollouts/part-0000{n}.parquet" for n in range(3)] + ["runs/new/run.json"]
    monkeypatch.setenv("GYMDATA_SPOOL", str(tmp_path / "c"))
    assert sorted(gymdata.load_rollouts(url, ["rollout_id"])["rollout_id"].to_pylist()) == IDS


def test_a_run_that_was_read_before_is_not_read_twice(scheme: str, held: Objects, tmp_path: Path) -> None:
    """An object that this machine wrote or read is known again in a list: its tag is one text everywhere."""
    url = f"{scheme}://bucket/pairs"
    append(f"{scheme}://bucket/run", tmp_path / "here", 0, 5)
    for _ in range(2):
        assert main(["filter", f"{scheme}://bucket/run", "-o", url, "--where", "true", "--overwrite"]) == 0
        assert main(["validate", url]) == 0


def test_a_second_writer_is_refused(
    scheme: str, held: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run.json that another machine replaced meanwhile is not written over."""
    url = f"{scheme}://bucket/run"
    append(url, tmp_path / "a", 0, 2)
    append(url, tmp_path / "b", 0, 4)
    other = placed_output(url, tmp_path / "a")
    with Run.open(other, identity={"policy": "tiny"}, extent={}, operation={}, run_id="run") as run:
        append(url, tmp_path / "b", 0, 5, "take-over")
        run.append(make_row(7))
        with pytest.raises(StoreError, match="another machine took over"):
            run.close()
    monkeypatch.setenv("GYMDATA_SPOOL", str(tmp_path / "c"))
    assert sorted(gymdata.load_rollouts(url, ["rollout_id"])["rollout_id"].to_pylist()) == IDS


def test_a_missing_bucket_is_named(scheme: str, held: Objects) -> None:
    """A bucket or a container that is not there is an error that says just that."""
    with pytest.raises(OutsideError, match=rf"{scheme}://other: there is no such bucket"):
        gymdata.load_rollouts(f"{scheme}://other/run")
