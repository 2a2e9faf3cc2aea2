"""``gymdata ls``: what lies below a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import gymdata
from gymdata.cli.main import main
from tests.rollout_files import rollout, two_turns, write_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run of two rollouts, and pairs made from it: in a folder of it, and as a file."""
    run = write_run(tmp_path / "runs" / "x", [rollout("t", k, float(k), two_turns(4, 20 + k)) for k in range(2)])
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "stage": "collect"}))
    gymdata.pairs(run)
    gymdata.pairs(run, output=tmp_path / "runs" / "best.parquet")
    return tmp_path / "runs"


def test_a_run_and_what_was_made_from_it_are_listed(runs: Path):
    """Each with its kind, rows and parents; a stage folder inside a run is its own."""
    found = {o.path: (o.kind, o.rows, o.parents, o.state) for o in gymdata.ls(runs).outputs}
    assert found == {
        "best.parquet": ("pairs", 1, ("x",), "complete"),
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
    assert [(o.path, o.state) for o in gymdata.ls(runs).outputs] == [("best.parquet", "parents missing")]


def test_a_damaged_run_json_is_listed_and_ends_with_1(runs: Path, capsys: pytest.CaptureFixture[str]):
    """Its files are still counted; the other outputs are listed as ever."""
    (runs / "x" / "pairs-reward" / "run.json").write_text("{")
    assert main(["ls", str(runs), "--json"]) == 1
    made = {output["path"]: output for output in json.loads(capsys.readouterr().out)["outputs"]}
    assert (made["x/pairs-reward"]["state"], made["x/pairs-reward"]["kind"]) == ("damaged", "unknown")
    assert made["x/pairs-reward"]["bytes"] > 1
    assert made["x"]["state"] == "complete"


def test_the_table_has_a_line_per_output(runs: Path, capsys: pytest.CaptureFixture[str]):
    """Path, kind, rows, size, last change, state and parents."""
    assert main(["ls", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines if "complete" in line] == [
        ["best.parquet", "pairs", "1"], ["x", "collect", "2"], ["x/pairs-reward", "pairs", "1"],
    ]  # fmt: skip


def test_no_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A path that is not there names itself, and nothing is listed."""
    assert main(["ls", str(tmp_path / "none")]) != 0
    assert "no such file or folder (expected a folder)" in capsys.readouterr().err
