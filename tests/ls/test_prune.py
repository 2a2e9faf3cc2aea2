"""``gymdata prune``: what no trained model was made from."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import DataError, StoreError, UsageError
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
    gymdata.filter(top / "y", top / "good.parquet", where="reward > 0.5")
    write_model(top / "model", top / "x" / "pairs-reward")
    return top


def contents(top: Path) -> dict[str, bytes]:
    return {str(file.relative_to(top)): file.read_bytes() for file in top.rglob("*") if file.is_file()}


def test_nothing_changes_without_delete(runs: Path) -> None:
    """What the model was made from is needed by it, and as large as ``ls`` has it; the rest is listed with its size."""
    (runs / "model" / "curve.png").write_bytes(b"a picture")
    before = contents(runs)
    report = gymdata.prune(runs)
    assert {o.path: o.needed_by for o in report.outputs} == {
        "good.parquet": None, "model": "model", "x": "model", "x/pairs-reward": "model", "y": None, "y/pairs-reward": None,
    }  # fmt: skip
    sizes = {o.path: o.bytes for o in report.outputs}
    ours = [size for name, size in ((n, len(b)) for n, b in before.items()) if name.startswith("y/pairs-reward/")]
    assert sizes["y/pairs-reward"] == sum(ours)
    listed = {o.path: o.bytes for o in gymdata.ls(runs).outputs}
    assert {name: sizes[name] for name in ("model", "x")} == {name: listed[name] for name in ("model", "x")}
    assert contents(runs) == before


def test_delete_removes_what_is_not_needed_and_only_that(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run y, its pairs and the filtered file are gone, folders too; x and the model are as they were, and a second time
    there is nothing to do."""
    before = contents(runs)
    assert main(["prune", str(runs), "--delete", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["deleted"] is True
    assert contents(runs) == {name: data for name, data in before.items() if name.startswith(("x/", "model/"))}
    assert not (runs / "y").exists()
    assert gymdata.prune(runs, delete=True).idle == []


def test_files_that_gymdata_did_not_write_stay(runs: Path) -> None:
    """Notes in a run folder, a link and what lies outside of every run; they are counted."""
    (runs / "y" / "notes.txt").write_text("mine")
    (runs / "y" / "rollouts" / "part-00009.parquet").symlink_to(runs / "x" / "rollouts" / "part-00000.parquet")
    (runs / "data.parquet").write_bytes(b"not described")
    report = gymdata.prune(runs, delete=True)
    (y,) = (output for output in report.outputs if output.path == "y")
    assert [Path(name).name for name in y.left] == ["notes.txt", "part-00009.parquet"]
    assert (runs / "y" / "notes.txt").read_text() == "mine"
    assert (runs / "data.parquet").exists()
    assert (runs / "y" / "rollouts" / "part-00009.parquet").is_symlink()
    assert (runs / "x" / "rollouts" / "part-00000.parquet").exists()


def test_names_in_run_json_that_lead_elsewhere_delete_nothing_there(runs: Path) -> None:
    """A run.json is data: a path in it that leaves its folder is not followed."""
    facts = json.loads((runs / "y" / "run.json").read_text())
    facts["files"] += [
        {"path": "../x/run.json", "rows": 1},
        {"path": str(runs / "model" / "model.safetensors"), "rows": 1},
    ]
    (runs / "y" / "run.json").write_text(json.dumps(facts))
    gymdata.prune(runs, delete=True)
    assert (runs / "x" / "run.json").is_file()
    assert (runs / "model" / "model.safetensors").is_file()


def test_what_was_moved_is_found_by_its_id(runs: Path) -> None:
    """Renamed after the training, the run and its pairs are still what the model was made from."""
    (runs / "x").rename(runs / "renamed")
    needed = {o.path for o in gymdata.prune(runs).outputs if o.needed_by}
    assert needed == {"model", "renamed", "renamed/pairs-reward"}


def test_what_was_moved_is_found_where_another_run_took_its_place(runs: Path) -> None:
    """The path that the model names leads to a run that it was not made from: both stay."""
    (runs / "x").rename(runs / "old")
    (runs / "y").rename(runs / "x")
    needed = {o.path for o in gymdata.prune(runs).outputs if o.needed_by}
    assert needed == {"model", "old", "old/pairs-reward", "x", "x/pairs-reward"}


def test_a_copy_of_what_is_needed_is_not(runs: Path) -> None:
    """The path that the model names leads to what it was made from."""
    shutil.copytree(runs / "x", runs / "copy")
    needed = {o.path for o in gymdata.prune(runs).outputs if o.needed_by}
    assert needed == {"model", "x", "x/pairs-reward"}


def test_a_model_behind_a_link_is_seen(runs: Path, tmp_path: Path) -> None:
    """Links to folders are followed, also from there, and a link back is no circle; what they lead to is not pruned."""
    write_model(tmp_path / "far" / "model", runs / "y" / "pairs-reward")
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "far").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "back").symlink_to(tmp_path / "near")
    (runs / "near").symlink_to(tmp_path / "near")
    (runs / "up").symlink_to(tmp_path)
    report = gymdata.prune(runs, delete=True)
    assert [o.path for o in report.idle] == ["good.parquet"]
    assert (tmp_path / "far" / "model" / "model.safetensors").is_file()
    assert (runs / "y" / "run.json").is_file()


def test_a_folder_that_cannot_be_read_stops_everything(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model may be in it; `ls` lists the others and names it."""
    real = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).name == "model":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match="model: cannot be read"):
        gymdata.prune(runs, keep=runs / "y", delete=True)
    assert (runs / "x" / "run.json").is_file()
    assert main(["ls", str(runs)]) == 0
    shown = capsys.readouterr()
    assert "good.parquet" in shown.out
    assert "model: cannot be read: Permission denied" in shown.err


@pytest.mark.parametrize("place", ["x/pairs-reward", "other"])
def test_where_a_parent_may_be_is_not_known_all_stay(runs: Path, place: str) -> None:
    """A damaged run.json of a model, or of what one was made from, may have named any of the others."""
    write_model(runs / "other", runs / "y" / "pairs-reward")
    (runs / place / "run.json").write_text("{")
    report = gymdata.prune(runs, delete=True)
    assert report.idle == []
    why = {o.path: o.needed_by for o in report.outputs}
    assert why["good.parquet"] == f"not known: {place}/run.json is damaged"
    assert (runs / "good.parquet").is_file()


def test_keep_names_more(runs: Path) -> None:
    """With all that it was made from: the filtered file keeps run y, whose pairs are still idle."""
    idle = {o.path for o in gymdata.prune(runs, keep=runs / "good.parquet").idle}
    assert idle == {"y/pairs-reward"}


def test_a_model_elsewhere_is_named_by_keep(runs: Path, tmp_path: Path) -> None:
    """Its lineage leads back below the folder."""
    write_model(tmp_path / "elsewhere" / "model", runs / "good.parquet")
    idle = {o.path for o in gymdata.prune(runs, keep=tmp_path / "elsewhere").idle}
    assert idle == {"y/pairs-reward"}


def test_without_a_model_nothing_is_idle(runs: Path) -> None:
    """A folder of runs alone is not emptied."""
    shutil.rmtree(runs / "model")
    with pytest.raises(UsageError, match="no trained model is below it"):
        gymdata.prune(runs, delete=True)
    assert (runs / "y" / "run.json").is_file()


@pytest.mark.parametrize("place", ["x", "y", "y/pairs-reward", "model"])
def test_a_lock_that_is_held_stops_everything(runs: Path, place: str) -> None:
    """Whoever writes below the folder may be about to need what is there."""
    before = contents(runs)
    lock = Lock(runs / place)
    with pytest.raises(StoreError, match="another process writes"):
        gymdata.prune(runs, delete=True)
    lock.remove()
    assert contents(runs) == before


def test_a_training_that_is_not_finished_stops_everything(runs: Path) -> None:
    """What it was begun with is not recorded yet."""
    (runs / "next" / "job").mkdir(parents=True)
    (runs / "next" / "job" / "job.json").write_text("{}")
    with pytest.raises(StoreError, match="a training that is not finished"):
        gymdata.prune(runs)


def test_a_damaged_output_is_left(runs: Path) -> None:
    """What it was made for is not known."""
    (runs / "y" / "run.json").write_text("{")
    report = gymdata.prune(runs, delete=True)
    (y,) = (output for output in report.outputs if output.path == "y")
    assert y.needed_by == "not known: its run.json is damaged"
    assert (runs / "y" / "rollouts" / "part-00000.parquet").exists()


def test_a_finetuning_run_stays_whole(runs: Path) -> None:
    """What lies in it may be needed to resume."""
    shutil.rmtree(runs / "model")
    made: dict[str, Any] = {"stage": "finetune", "parents": [], "files": []}
    (runs / "ft" / "epoch-0").mkdir(parents=True)
    (runs / "ft" / "run.json").write_text(json.dumps(made))
    shutil.move(runs / "y", runs / "ft" / "epoch-0" / "rollouts")
    assert {o.path for o in gymdata.prune(runs).idle} == {"good.parquet", "x", "x/pairs-reward"}


def test_a_log_of_gymdata_goes_with_its_folder(runs: Path) -> None:
    """It is none of the user's files: nothing is left of the run."""
    (runs / "y" / "gymdata.log").write_text("started\n")
    (runs / "y" / "gymdata.log.1").write_text("started\n")
    report = gymdata.prune(runs, delete=True)
    assert [output.left for output in report.outputs if output.path == "y"] == [()]
    assert not (runs / "y").exists()


def test_a_spool_is_left_alone(runs: Path) -> None:
    """Rows on their way to an object store are no output that nothing needs: a spool is not looked into, and not pruned."""
    spool = runs / "spool"
    run = write_run(spool / "files" / "s3@127.0.0.1_9000" / "bucket" / "run", [rollout("t", 0, 1.0, two_turns(4, 20))])
    (spool / "state").mkdir()
    before = contents(spool)
    assert not any(
        output.path.startswith("spool") for output in [*gymdata.ls(runs).outputs, *gymdata.prune(runs).outputs]
    )
    gymdata.prune(runs, delete=True)
    assert contents(spool) == before
    with pytest.raises(UsageError, match="is a spool"):
        gymdata.prune(run, keep=runs / "x")


def begun(folder: Path, live: Path) -> Path:
    """What SIGKILL leaves of a filter to ``folder``: a copy from before its end."""
    with StageOutput(live / "run.json", "filter", ["rollouts.parquet"]) as out:
        out.part("rollouts.parquet").path.write_bytes(b"half")
        shutil.copytree(live, folder, dirs_exist_ok=True)
    return folder


def test_what_a_kill_left_goes_with_delete_alone(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An output that was interrupted is listed as such; deleting it leaves what is not gymdata's, and --keep keeps it."""
    kept = begun(runs / "kept", tmp_path / "live")
    (begun(runs / "mine", tmp_path / "live") / ".notes.tmp").write_text("mine")
    before = contents(runs)
    assert main(["prune", str(runs), "--keep", str(kept)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert "nothing (interrupted, not whole)" in lines["mine"]
    assert "--keep" in lines["kept"]
    assert contents(runs) == before
    report = gymdata.prune(runs, keep=kept, delete=True)
    (mine,) = (output for output in report.outputs if output.path == "mine")
    assert (mine.kind, mine.state, mine.left) == ("filter", "interrupted", (str(runs / "mine" / ".notes.tmp"),))
    assert sorted(contents(runs / "mine")) == [".notes.tmp"]
    assert sorted(contents(kept)) == [".rollouts.parquet.tmp", "lock"]
    gymdata.prune(runs, delete=True)
    assert not kept.exists()


def test_an_output_that_is_being_written_stops_everything(runs: Path) -> None:
    """Also one that has no run.json yet, and is a file."""
    with (
        StageOutput(runs / "new.parquet.run.json", "filter", ["new.parquet"]),
        pytest.raises(StoreError, match="another process writes"),
    ):
        gymdata.prune(runs, delete=True)
