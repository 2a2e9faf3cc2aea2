"""``gymdata ls``: what lies below a folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.store import Run, StageOutput, write_run_json
from tests.rollout_files import rollout, two_turns, write_run
from tests.store.conftest import make_row


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run of two rollouts, and pairs made from it: in a folder of it, and in one beside it."""
    run = write_run(tmp_path / "runs" / "x", [rollout("t", k, float(k), two_turns(4, 20 + k)) for k in range(2)])
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "stage": "collect"}))
    gymdata.pairs(run)
    gymdata.pairs(run, output=tmp_path / "runs" / "best")
    return tmp_path / "runs"


def test_a_run_and_what_was_made_from_it_are_listed(runs: Path):
    """Each with its kind, rows and parents; a stage folder inside a run is its own."""
    found = {o.path: (o.kind, o.rows, o.parents, o.state) for o in gymdata.ls(runs).outputs}
    assert found == {
        "best": ("pairs", 1, ("x",), "complete"),
        "x": ("collect", 2, (), "complete"),
        "x/pairs-reward": ("pairs", 1, ("x",), "complete"),
    }


def test_every_byte_is_counted_once(runs: Path):
    """The sizes add up to those of all files that are there."""
    listed = sum(output.bytes for output in gymdata.ls(runs).outputs)
    assert listed == sum(file.stat().st_size for file in runs.rglob("*") if file.is_file())


def test_a_parent_that_is_gone_is_a_state(runs: Path):
    """The pairs outlive their run, and say so."""
    shutil.rmtree(runs / "x")
    assert [(o.path, o.state) for o in gymdata.ls(runs).outputs] == [("best", "parents missing")]


def test_a_damaged_run_json_is_listed_and_ends_with_1(runs: Path, capsys: pytest.CaptureFixture[str]):
    """Its files are still counted; the other outputs are listed as ever."""
    (runs / "x" / "pairs-reward" / "run.json").write_text("{")
    assert main(["ls", str(runs), "--json"]) == 1
    made = {output["path"]: output for output in json.loads(capsys.readouterr().out)["outputs"]}
    assert (made["x/pairs-reward"]["state"], made["x/pairs-reward"]["kind"]) == ("damaged", "unknown")
    assert made["x/pairs-reward"]["bytes"] > 1
    assert made["x"]["state"] == "complete"


@pytest.mark.parametrize("fault", ["removed", "empty", "cut", "folder", "link", "more"])
def test_a_run_whose_parts_are_not_its_own_is_damaged(tmp_path: Path, fault: str):
    """By what is there and its size: no data is read."""
    with Run.open(tmp_path / "run", identity={}, extent={}, operation={}) as run:
        run.append(make_row(0))
    (part,) = (tmp_path / "run" / "rollouts").glob("part-*.parquet")
    states = [output.state for output in gymdata.ls(tmp_path).outputs]
    content = part.read_bytes()
    if fault == "more":
        part.with_name("part-00007.jsonl").write_text("x\n")
    elif fault in ("empty", "cut"):
        part.write_bytes(content[:-1] if fault == "cut" else b"")
    else:
        part.unlink()
    if fault == "folder":
        part.mkdir()
    elif fault == "link":
        part.symlink_to(tmp_path / "gone.parquet")
    assert [*states, *(output.state for output in gymdata.ls(tmp_path).outputs)] == ["complete", "damaged"]


def test_what_is_no_regular_file_is_not_opened(runs: Path):
    """Pipes that are named as files of a run would block, and links may lead nowhere: such a run.json is damaged."""
    (runs / "pipe").mkdir()
    (runs / "link").mkdir()
    os.mkfifo(runs / "pipe" / "run.json")
    (runs / "link" / "run.json").symlink_to("nowhere")
    os.mkfifo(runs / "lock")
    os.mkfifo(runs / "x" / "rollouts" / "part-00002.jsonl")
    states = {o.path: (o.kind, o.rows, o.state) for o in gymdata.ls(runs).outputs}
    assert (states["pipe"], states["link"]) == (("unknown", None, "damaged"),) * 2
    assert states["x"] == ("collect", 2, "complete")


def test_the_table_has_a_line_per_output(runs: Path, capsys: pytest.CaptureFixture[str]):
    """Path, kind, rows, size, last change, state and parents."""
    assert main(["ls", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(re.search(r" [1-9][\d.,]* (bytes|kB) ", line) for line in lines if "complete" in line)
    assert [line.split()[:3] for line in lines if "complete" in line] == [
        ["best", "pairs", "1"], ["x", "collect", "2"], ["x/pairs-reward", "pairs", "1"],
    ]  # fmt: skip


def test_an_empty_folder_has_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """One line in place of a table without rows."""
    assert main(["ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs below {tmp_path}\n"


def test_no_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A path that is not there names itself, and nothing is listed."""
    assert main(["ls", str(tmp_path / "none")]) != 0
    assert "no such file or folder (expected a folder)" in capsys.readouterr().err


def killed(folder: Path, rows: int, **facts: Any) -> Path:
    """What a SIGKILL leaves of a run with so many rows in its journal: a copy from before its end."""
    live = folder.with_name(f"{folder.name}-live")
    asked = {"num_rollouts": 4, "tasks": 2}
    with Run.open(
        live, identity={"policy": "tiny"}, extent=asked, operation={}, run_id=folder.name, facts=facts
    ) as run:
        for index in range(rows):
            run.append(make_row(index))
        shutil.copytree(live, folder)
    shutil.rmtree(live)
    return folder


def states(folder: Path) -> dict[str, str]:
    return {output.path: output.state for output in gymdata.ls(folder).outputs}


def test_a_run_whose_writer_was_killed_is_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It is being written until then, complete once the same command has ended, and ls says what to do."""
    killed(tmp_path / "some", 3, stage="collect")
    killed(tmp_path / "none", 0, stage="import")
    assert states(tmp_path) == {"some": "interrupted", "none": "interrupted"}
    assert main(["ls", str(tmp_path)]) == 0
    assert capsys.readouterr().err == "interrupted: rows may be missing; rerun the same command to resume\n"
    again: Any = {"identity": {"policy": "tiny"}, "extent": {}, "operation": {}}
    with Run.open(tmp_path / "some", **again):
        assert states(tmp_path)["some"] == "being written"
    assert states(tmp_path)["some"] == "complete"
    with pytest.raises(ZeroDivisionError), Run.open(tmp_path / "some", **again):
        raise ZeroDivisionError
    assert states(tmp_path)["some"] == "interrupted"


def test_a_training_or_loop_that_was_stopped_is_interrupted(tmp_path: Path):
    """Their run.json has a status: only one that is completed is complete."""
    for name, status in (("killed", "running"), ("stopped", "failed"), ("done", "completed")):
        (tmp_path / name).mkdir()
        write_run_json(tmp_path / name, {"stage": "finetune", "status": status})
    assert states(tmp_path) == {"done": "complete", "killed": "interrupted", "stopped": "interrupted"}


def test_a_collection_that_ended_early_has_rollouts_pending(tmp_path: Path):
    """Unless it was to end so; a run.json that tells nothing of its writer counts as complete."""
    for name, operation in (("stopped", {}), ("gave-up", {"give_up": True})):
        with Run.open(tmp_path / name, identity={}, extent={}, operation=operation) as run:
            run.note(counts={"pending": 2})
    write_run(tmp_path / "older", [rollout("t", 0, 1.0, two_turns(4, 20))])
    assert states(tmp_path) == {"gave-up": "complete", "older": "complete", "stopped": "rollouts pending"}


def test_an_interrupted_run_without_rows_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """SQL finds its tables, with no rows and all columns; validate says why there are none."""
    run = killed(tmp_path / "none", 0, stage="import")
    assert gymdata.query("SELECT count(*) AS n FROM rollouts", run).to_pylist() == [{"n": 0}]
    assert "prompt_token_ids" in gymdata.query("SELECT * FROM turns", run).column_names
    assert gymdata.validate(run).state == "interrupted"
    assert main(["validate", str(run)]) == 1
    assert "none: interrupted: rows may be missing; rerun the same command to resume" in capsys.readouterr().err


def test_a_narrow_terminal_shows_whole_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On 80 columns no path and no state is folded: what matters least is left out, and named."""
    for name in ("a", "b"):
        run = write_run(
            tmp_path / "experiments" / f"a-name-of-some-length-{name}", [rollout("t", 0, 1.0, two_turns(4, 20))]
        )
        gymdata.filter(run, tmp_path / f"kept-{name}", where="reward > 0")
    assert main(["ls", str(tmp_path)]) == 0
    assert "parents" in capsys.readouterr().out
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    assert main(["ls", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "experiments/a-name-of-some-length-b" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80
    assert "left out on this terminal: changed (UTC), parents" in shown.err


def test_rejected_lines_are_no_rows(tmp_path: Path) -> None:
    """An import of pairs with a rejected line counts its pairs."""
    row = {"prompt": "6?", "chosen_response": "six", "rejected_response": "five"}
    (tmp_path / "dpo.jsonl").write_text(
        json.dumps(row) + "\n" + json.dumps({**row, "prompt": "7?"}) + '\n{"prompt": 1}\n'
    )
    gymdata.import_rollouts([tmp_path / "dpo.jsonl"], output=tmp_path / "pairs", format="nat-dpo")
    assert [output.rows for output in gymdata.ls(tmp_path).outputs] == [2]


def test_what_is_being_made_has_no_place_yet(runs: Path) -> None:
    """Nor has what a killed command left of it: it is listed once it is complete. One that is being replaced is written."""
    with StageOutput(runs / "kept", "filter") as out:
        out.part("rollouts.parquet").path.write_bytes(b"half")
        shutil.copytree(out.new, runs / ".killed.tmp")
        assert set(states(runs)) == {"best", "x", "x/pairs-reward"}
    with StageOutput(runs / "best", "pairs"):
        assert states(runs)["best"] == "being written"
    gymdata.filter(runs / "x", runs / "killed", where="reward > 0")
    assert set(states(runs).items()) - {("killed", "complete")} == {
        (n, "complete") for n in ("best", "x", "x/pairs-reward")
    }


def test_an_experiment_and_tags_find_outputs(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They stand in run.json of what a command writes, by flag or by variable, and ``ls`` lists what has them all."""
    out = runs / "tagged"
    words = ["filter", str(runs / "x"), "--where", "reward > 0", "-o", str(out), "--experiment", "first", "--tag", "a"]
    assert main([*words, "--tag", "b"]) == 0
    facts = json.loads((out / "run.json").read_text())
    assert (facts["experiment"], facts["tags"]) == ("first", ["a", "b"])
    assert [o.path for o in gymdata.ls(runs, experiment="first", tags=["b"]).outputs] == ["tagged"]
    assert gymdata.ls(runs, experiment="first", tags=["c"]).outputs == ()
    assert gymdata.ls(runs, experiment="second").outputs == ()
    # The flags are of one command.
    gymdata.pairs(runs / "x", output=tmp_path / "plain")
    assert "experiment" not in json.loads((tmp_path / "plain" / "run.json").read_text())
    monkeypatch.setenv("GYMDATA_EXPERIMENT", "second")
    gymdata.pairs(runs / "x", output=runs / "other")
    assert [o.path for o in gymdata.ls(runs, experiment="second").outputs] == ["other"]
