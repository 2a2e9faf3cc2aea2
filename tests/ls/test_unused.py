"""``gymdata ls --unused``: what no trained model was made from."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import DataError, StoreError
from gymdata.store import StageOutput
from gymdata.store.lineage import parent_of
from gymdata.store.lock import Lock
from tests.rollout_files import rollout, two_turns, write_run


def write_model(folder: Path, source: Path) -> Path:
    """A trained model as train-dpo leaves it."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    facts = {"stage": "train-dpo", "parents": [parent_of(source)], "files": [{"path": "model.safetensors"}]}
    (folder / "run.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs x and y with pairs each, and a model that was trained on the pairs of x."""
    top = tmp_path / "runs"
    for name in ("x", "y"):
        run = write_run(top / name, [rollout("t", k, float(k), two_turns(4, 20 + k)) for k in range(2)])
        facts = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**facts, "stage": "collect", "run_id": name}))
        gymdata.pairs(run)
    gymdata.filter(top / "y", top / "good", where="reward > 0.5")
    write_model(top / "model", top / "x" / "pairs-reward")
    return top


def unused(top: Path) -> set[str]:
    return {output.path for output in gymdata.ls(top, unused=True).outputs}


def test_what_the_model_was_made_from_is_needed_and_the_rest_is_listed(runs: Path) -> None:
    """With the sizes that ``ls`` has, and nothing changes on disk."""
    before = sorted(runs.rglob("*"))
    sizes = {output.path: output.bytes for output in gymdata.ls(runs).outputs}
    listed = {output.path: output.bytes for output in gymdata.ls(runs, unused=True).outputs}
    assert listed == {path: sizes[path] for path in ("good", "y", "y/pairs-reward")}
    assert sorted(runs.rglob("*")) == before


def test_the_printed_line_removes_what_is_listed_and_only_that(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copied into a shell, also for a folder with a space; afterwards nothing is unused and the lineage is complete."""
    runs = runs.rename(runs.with_name("my runs"))
    monkeypatch.chdir(runs.parent)
    assert main(["ls", "--unused", "my runs"]) == 0
    said = capsys.readouterr()
    line = said.out.splitlines()[-1]
    assert "the rm line removes it" in said.err
    assert line == "rm -r 'my runs/good' 'my runs/y'"
    subprocess.run(line, shell=True, check=True)
    assert {output.path for output in gymdata.ls("my runs").outputs} == {"model", "x", "x/pairs-reward"}
    assert main(["ls", "--unused", "my runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": "my runs", "outputs": [], "removal": None}


def test_a_run_behind_a_linked_folder_of_rollouts_is_needed(runs: Path) -> None:
    """The folder that holds the link may go: removing a link leaves what it leads to."""
    (runs / "linked").mkdir()
    facts = json.loads((runs / "y" / "run.json").read_text())
    (runs / "linked" / "run.json").write_text(json.dumps({**facts, "run_id": "z"}))
    (runs / "linked" / "rollouts").symlink_to("../y/rollouts")
    assert unused(runs) == {"linked", "good", "y/pairs-reward"}
    size = next(output.bytes for output in gymdata.ls(runs, unused=True).outputs if output.path == "linked")
    assert size < (runs / "y" / "rollouts" / "part-00000.parquet").stat().st_size


def test_nothing_reached_through_a_link_is_listed(runs: Path, tmp_path: Path) -> None:
    """A link to a run elsewhere, to a file of another run, and one back up."""
    shutil.copytree(runs / "y", tmp_path / "far")
    (runs / "near").symlink_to(tmp_path / "far")
    (runs / "up").symlink_to(tmp_path)
    (runs / "good-link").symlink_to("good")
    assert unused(runs) == {"y/pairs-reward"}


def test_a_model_behind_a_link_needs_its_lineage(runs: Path, tmp_path: Path) -> None:
    """Links in what a link leads to are followed, and a circle of them ends."""
    write_model(tmp_path / "far" / "model", runs / "y" / "pairs-reward")
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "far").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "back").symlink_to(tmp_path / "near")
    (runs / "near").symlink_to(tmp_path / "near")
    assert unused(runs) == {"good"}


def test_in_a_copied_tree_the_copies_are_needed(runs: Path, tmp_path: Path) -> None:
    """Though the original is where the model names it, and has the recorded hash."""
    shutil.copytree(runs, tmp_path / "backup")
    assert unused(tmp_path / "backup") == {"good", "y", "y/pairs-reward"}


def test_what_was_moved_is_found_by_its_id(runs: Path) -> None:
    """Also where another run has taken its path, which then is needed, too."""
    (runs / "x").rename(runs / "old")
    assert unused(runs) == {"good", "y", "y/pairs-reward"}
    (runs / "y").rename(runs / "x")
    assert unused(runs) == {"good"}


def test_a_folder_that_contains_what_is_needed_is_needed(runs: Path) -> None:
    """A model in the folder of a run it was not made from."""
    (runs / "model").rename(runs / "y" / "model")
    assert unused(runs) == {"good", "y/pairs-reward"}


def test_a_finetuning_run_needs_all_that_is_in_it(runs: Path) -> None:
    """What lies in it may be needed to resume."""
    shutil.rmtree(runs / "model")
    (runs / "ft" / "epoch-0").mkdir(parents=True)
    facts: dict[str, Any] = {"stage": "finetune", "parents": [], "files": []}
    (runs / "ft" / "run.json").write_text(json.dumps(facts))
    shutil.move(runs / "y", runs / "ft" / "epoch-0" / "rollouts")
    assert unused(runs) == {"good", "x", "x/pairs-reward"}


def test_a_run_that_is_being_written_is_needed(runs: Path) -> None:
    """It is not listed while its writer is at work."""
    lock = Lock(runs / "y")
    assert unused(runs) == {"good", "y/pairs-reward"}
    lock.remove()
    assert "y" in unused(runs)


def test_where_what_is_needed_is_not_known_nothing_is_listed(runs: Path) -> None:
    """A damaged run.json, a training and a command that have not recorded their inputs yet."""
    with (
        StageOutput(runs / "new", "filter"),
        pytest.raises(StoreError, match="new: is not finished"),
    ):
        unused(runs)
    (runs / "next" / "job").mkdir(parents=True)
    (runs / "next" / "job" / "job.json").write_text("{}")
    with pytest.raises(StoreError, match="next: is not finished"):
        unused(runs)
    shutil.rmtree(runs / "next")
    (runs / "model" / "run.json").write_text("{")
    with pytest.raises(DataError, match=r"model/run\.json: cannot be read: what it was made from"):
        unused(runs)
