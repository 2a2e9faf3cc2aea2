"""``filter`` of several runs: one output of all, that leads back to each."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import DataError, RefusedError, StoreError, UsageError
from gymdata.store import read_run_json, read_table, write_run_json
from tests.rollout_files import rollout, two_turns, write_run


def run_of(folder: Path, name: str, first: int) -> Path:
    """A run of two rollouts of task ``name``."""
    run = write_run(folder / name, [rollout(name, k, 1.0, two_turns(4, first + k)) for k in range(2)])
    write_run_json(run, read_run_json(run) | {"run_id": name})
    return run


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [run_of(tmp_path, name, 10 * n) for n, name in enumerate(("run-a", "run-b", "run-c"), 2)]


def test_several_inputs_need_no_condition(runs: list[Path], tmp_path: Path) -> None:
    """The rows are those of the runs, in their order; run.json leads back to each. One input alone is refused."""
    report = gymdata.filter(runs, tmp_path / "all")
    assert (report.rollouts_in, report.rollouts_out, report.groups_out, report.steps) == (6, 6, 3, [])
    assert read_table(tmp_path / "all").to_pylist() == [row for run in runs for row in read_table(run).to_pylist()]
    facts = read_run_json(tmp_path / "all")
    assert (facts["stage"], [Path(parent["path"]) for parent in facts["parents"]]) == ("filter", runs)
    with pytest.raises(UsageError, match="nothing to filter by"):
        gymdata.filter(runs[:1], tmp_path / "alone")
    assert not (tmp_path / "alone").exists()


def test_a_pattern_names_its_runs(runs: list[Path], tmp_path: Path) -> None:
    """A glob that the shell did not expand is every run that it matches, in order; one that matches none is an error, and
    one that matches a single run is a single input."""
    gymdata.filter(tmp_path / "run-*", tmp_path / "all")
    assert [Path(parent["path"]) for parent in read_run_json(tmp_path / "all")["parents"]] == runs
    with pytest.raises(DataError, match="a glob that matches something"):
        gymdata.filter(tmp_path / "x*", tmp_path / "none")
    with pytest.raises(UsageError, match="nothing to filter by"):
        gymdata.filter(tmp_path / "run-a*", tmp_path / "none")


def test_a_rollout_of_two_runs_is_refused_by_name(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has an ID and the files that hold it, whatever else is in their rows; nothing is written."""
    copy = write_run(tmp_path / "copy", [rollout("run-a", 1, 0.0, two_turns(4, 90))])
    words = ["filter", str(runs[1]), str(runs[0]), str(copy), "-o", str(tmp_path / "out")]
    assert main(words) == 1
    shown = capsys.readouterr().err.replace("\n", "")
    files = [next((folder / "rollouts").glob("*.parquet")) for folder in (runs[0], copy)]
    assert f"D701: 1 rollout is there more than once, such as run-a-1 in {files[0]} and {files[1]}" in shown
    shutil.copytree(runs[0], tmp_path / "whole")
    with pytest.raises(RefusedError, match=r"2 rollouts are there more than once, such as run-a-0 in .*run-a.*whole"):
        gymdata.filter([runs[0], tmp_path / "whole"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_same_path_twice_is_named(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However it is spelt."""
    assert main(["filter", str(runs[0]), str(runs[1]), f"{runs[0]}/", "-o", str(tmp_path / "out")]) == 1
    assert "is given twice: give each file once" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_other_runs_do_not_replace_what_is_there(runs: list[Path], tmp_path: Path) -> None:
    """The same runs again are the same output; others need --overwrite."""
    a, b, c = runs
    for _ in range(2):
        gymdata.filter([a, b], tmp_path / "two")
    with pytest.raises(StoreError, match=r"holds rollouts that were filtered from run run-a .*run run-b"):
        gymdata.filter([a, c], tmp_path / "two")
    assert gymdata.filter([a, c], tmp_path / "two", overwrite=True).rollouts_out == 4
    assert {row["task_id"] for row in read_table(tmp_path / "two").to_pylist()} == {"run-a", "run-c"}


def test_imports_of_different_files_become_one(tmp_path: Path) -> None:
    """Two imports that were made alike become one file of rollouts."""
    lines = (Path(__file__).parents[2] / "sample_data/rollouts/nemo_gym.jsonl").read_text().splitlines(keepends=True)
    for name, some in (("a", lines[:10]), ("b", lines[10:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(some))
        gymdata.import_rollouts([tmp_path / f"{name}.jsonl"], output=tmp_path / name)
    gymdata.filter([tmp_path / "a", tmp_path / "b"], output=tmp_path / "both")
    assert gymdata.load_rollouts(tmp_path / "both").num_rows == len(lines)
