"""push and pull: an output as a data set on the Hub or in a folder, and back, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

import gymdata
from gymdata.cli.main import main
from gymdata.errors import DataError, OutsideError, RefusedError, StoreError, UsageError
from gymdata.publish.card import MARK
from gymdata.store.run_json import describe_file, write_run_json
from tests.objects.conftest import ROWS, Hub
from tests.rollout_files import rollout, write_run

REPO = "hf:org/new"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return described(tmp_path / "run", ROWS)


def described(folder: Path, rows: Sequence[dict[str, Any]], **more: Any) -> Path:
    """A run whose run.json has the size and the hash of its part, as collect writes it."""
    part = write_run(folder, rows) / "rollouts" / "part-00000.parquet"
    facts = json.loads((folder / "run.json").read_text())
    write_run_json(folder, {**facts, "files": [describe_file(part, len(rows), path=f"rollouts/{part.name}")], **more})
    return folder


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_what_was_pushed_is_pulled_byte_for_byte(hub: Hub, run: Path, tmp_path: Path) -> None:
    """The parts are those of the run; the copy validates and is read as the run is; it is private unless that is said."""
    report = gymdata.push(run, REPO)
    assert (report.n_rows, report.private, report.sent) == (6, True, True)
    pulled = gymdata.pull(REPO, tmp_path / "copy")
    assert (pulled.n_rows, pulled.revision) == (6, report.revision)
    parts = {name: body for name, body in files_below(run).items() if name.endswith(".parquet")}
    assert parts.items() <= files_below(tmp_path / "copy").items()
    assert gymdata.validate(tmp_path / "copy").to_dict()["errors"] == 0
    assert gymdata.load_rollouts(tmp_path / "copy").equals(gymdata.load_rollouts(run))
    assert not list(tmp_path.glob(".copy*"))


def test_pairs_in_one_file_become_a_folder(hub: Hub, run: Path, tmp_path: Path) -> None:
    """Its file has the table's name there, so that every command finds it after the pull."""
    gymdata.pairs(run, output=tmp_path / "mine.parquet")
    gymdata.push(tmp_path / "mine.parquet", REPO)
    gymdata.pull(REPO, tmp_path / "copy")
    assert (tmp_path / "copy" / "pairs.parquet").read_bytes() == (tmp_path / "mine.parquet").read_bytes()
    assert gymdata.validate(tmp_path / "copy").to_dict()["errors"] == 0


def test_the_card_names_files_columns_and_figures(hub: Hub, run: Path) -> None:
    """Its header is YAML whose files exist; the preview has prompt, answer and reward as plain columns."""
    gymdata.push(run, REPO)
    there = hub.files("org/new")
    header, text = there["README.md"].decode().removeprefix("---\n").split("\n---\n", 1)
    configs = {config["config_name"]: config for config in yaml.safe_load(header)["configs"]}
    named = [path for config in configs.values() for split in config["data_files"] for path in split["path"]]
    assert set(configs) == {"preview", "rollouts"}
    assert configs["preview"]["default"]
    assert set(named) <= set(there)
    assert set(there) == {*named, "README.md", "run.json"}
    assert "6 rows" in text
    assert "`turns`" in text
    assert "gymdata pull hf:org/new" in text
    preview = pq.read_table(hub.open("org/new", "preview/train.parquet")).to_pylist()
    assert {row["answer"] for row in preview} == {"q=1", "q=2"}
    assert {row["reward"] for row in preview} == {0.0, 1.0}


def test_a_second_push_sends_what_is_new(hub: Hub, run: Path) -> None:
    """Files that are there are not sent again, and those that the output no longer has are removed in the same commit."""
    gymdata.push(run, REPO)
    sent, commits = len(hub.uploads), len(hub.commits)
    again = gymdata.push(run, REPO)
    assert (len(hub.uploads), len(hub.commits), again.removed) == (sent, commits, [])
    gymdata.pairs(run, output=run.parent / "pairs")
    report = gymdata.push(run.parent / "pairs", REPO)
    assert report.removed == ["rollouts/part-00000.parquet"]
    assert sorted(hub.files("org/new")) == ["README.md", "pairs.parquet", "preview/train.parquet", "run.json"]


def test_a_card_that_a_person_wrote_stays(hub: Hub, run: Path) -> None:
    """One without the line of push is kept, and the report says so; one with it is written again."""
    gymdata.push(run, REPO)
    hub.change("org/new", {"README.md": b"# Mine\n"})
    assert gymdata.push(run, REPO).card_kept
    assert hub.files("org/new")["README.md"] == b"# Mine\n"
    hub.change("org/new", {"README.md": f"{MARK}\nold".encode()})
    assert not gymdata.push(run, REPO).card_kept
    assert b"old" not in hub.files("org/new")["README.md"]


def test_another_push_in_between_is_not_overwritten(hub: Hub, run: Path) -> None:
    """The commit is made on condition that the branch is as this push saw it."""
    gymdata.push(run, REPO)
    hub.before_commit = lambda: hub.change("org/new", {"run.json": b"{}"})
    with pytest.raises(StoreError, match="has changed since this push began"):
        gymdata.push(described(run.parent / "b", ROWS[:2]), REPO)


def test_a_data_set_of_something_else_is_refused(hub: Hub, run: Path, tmp_path: Path) -> None:
    """Neither does a push add to it, unless that is asked for, nor is it pulled as an output."""
    hub.change("org/new", {"data.csv": b"a,b\n"})
    with pytest.raises(StoreError, match=r"did not push: data\.csv"):
        gymdata.push(run, REPO)
    with pytest.raises(RefusedError, match=r"has no run\.json"):
        gymdata.pull(REPO, tmp_path / "copy")
    gymdata.push(run, REPO, overwrite=True)
    assert {"data.csv", "run.json"} <= set(hub.files("org/new"))


def test_a_finding_is_not_published(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is sent; a redacted copy is; the user's folders in run.json and the card are not shown."""
    row = rollout("t", 0, 1.0, [([1], [2])], text="write to jane.doe@corp-mail.org")
    run = described(tmp_path / "run", [row])
    assert main(["push", str(run), REPO]) == 1
    assert "e-mail" in capsys.readouterr().err
    assert not hub.files("org/new")
    assert gymdata.push(run, REPO, allow_findings=True).findings
    noted = described(tmp_path / "noted", ROWS, notes=[f"from {Path.home()}/place", "to jane.doe@corp-mail.org"])
    gymdata.push(noted, tmp_path / "folder")
    published = (tmp_path / "folder" / "run.json").read_text()
    assert "from ~/place" in published
    assert "jane.doe" not in published


def test_a_changed_or_unfinished_output_is_not_published(hub: Hub, run: Path, tmp_path: Path) -> None:
    """What differs from run.json is refused, and so are a model and a run that was interrupted."""
    part = run / "rollouts" / "part-00000.parquet"
    body = part.read_bytes()
    part.write_bytes(body[:-1] + b"x")
    with pytest.raises(DataError, match="differs from what"):
        gymdata.push(run, REPO)
    part.write_bytes(body)
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(facts | {"attempts": [{"host": "h", "ended_at": None}]}))
    with pytest.raises(StoreError, match="was interrupted"):
        gymdata.push(run, REPO)


def test_a_folder_is_a_target_and_a_source(run: Path, tmp_path: Path) -> None:
    """It appears whole, once; the same push finds it there; a folder of something else is refused."""
    gymdata.push(run, tmp_path / "public")
    gymdata.push(run, tmp_path / "public")
    assert not list(tmp_path.glob(".public-*"))
    assert gymdata.pull(tmp_path / "public", tmp_path / "copy").n_rows == 6
    assert not gymdata.pull(tmp_path / "public", tmp_path / "copy").fetched
    with pytest.raises(StoreError, match="exists"):
        gymdata.push(run, run)
    with pytest.raises(StoreError, match="holds something else"):
        gymdata.pull(tmp_path / "public", described(tmp_path / "other", ROWS[:2]))


def test_a_damaged_download_does_not_appear(hub: Hub, run: Path, tmp_path: Path) -> None:
    """A file that is not as its run.json says is an error, and the output is not there."""
    gymdata.push(run, REPO)
    hub.change("org/new", {"rollouts/part-00000.parquet": b"PAR1"})
    with pytest.raises(DataError, match="differs from what"):
        gymdata.pull(REPO, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("target", ["hf:new", "hf:a/b/c", "hf://models/org/new", "s3://bucket/x", "hf:org/new@"])
def test_a_target_that_is_none_is_named(run: Path, target: str) -> None:
    """What was got and what was expected."""
    with pytest.raises(UsageError, match="expected hf:ORG/NAME"):
        gymdata.push(run, target)


def test_a_refused_token_is_an_error_of_the_store(hub: Hub, run: Path) -> None:
    """403 says that a token is needed, and is not retried."""
    hub.status = 403
    with pytest.raises(OutsideError, match="answered 403") as caught:
        gymdata.push(run, REPO)
    assert caught.value.final
    assert "HF_TOKEN" in str(caught.value.hint)


def test_a_push_that_was_cut_off_goes_on(hub: Hub, run: Path) -> None:
    """A failed upload leaves nothing visible; the same command sends the rest."""
    hub.fail_uploads = 1
    with pytest.raises(OutsideError, match="object store"):
        gymdata.push(run, REPO)
    assert not hub.files("org/new")
    gymdata.push(run, REPO)
    assert "run.json" in hub.files("org/new")
