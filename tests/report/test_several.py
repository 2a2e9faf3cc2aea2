"""Reports of several runs or trainings: each against the first, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import DataError
from gymdata.report.compare import sampling_that_differs
from tests.rollout_files import rollout, two_turns, write_run


def run_of(folder: Path, *rewards: float) -> Path:
    return write_run(folder, [rollout(f"t{n}", 0, reward, two_turns(5 + n, 40)) for n, reward in enumerate(rewards)])


def training_of(folder: Path, loss: float, rate: float) -> Path:
    folder.mkdir(parents=True)
    rows = [{"step": step, "loss": loss / step} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"learning_rate": rate, "output": str(folder), "seed": 1}
    facts = {"stage": "train-dpo", "status": "completed", "steps": 3, "config": config, "files": []}
    (folder / "run.json").write_text(json.dumps(facts))
    return folder


def test_each_run_is_compared_with_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of four tasks: +1 of 4, then −1 of 4 by another task."""
    paths = [
        run_of(tmp_path / "base", 0, 0, 1, 0),
        run_of(tmp_path / "up", 1, 0, 1, 0),
        run_of(tmp_path / "down", 0, 0, 0, 0),
    ]
    figures = gymdata.report(*paths, write=False).figures
    first, up, down = figures["compared"]
    assert [row["name"] for row in figures["compared"]] == ["base", "up", "down"]
    assert (first["mean"], "difference" in first) == (0.25, False)
    assert (up["difference"]["rate"], up["flips"]) == (0.25, {"up": 1, "down": 0, "same": 3})
    assert (down["difference"]["rate"], down["flips"]) == (-0.25, {"up": 0, "down": 1, "same": 3})
    assert figures["headline"].startswith("3 runs; best up, 50.0 %: +25 points")
    assert main(["report", *map(str, paths), "-o", str(tmp_path / "page.html")]) == 0
    assert "best up" in capsys.readouterr().out
    page = (tmp_path / "page.html").read_text()
    assert "Mean reward" in page
    assert page.count("<tr>") >= 4


def test_trainings_are_compared_by_their_curves_and_settings(tmp_path: Path) -> None:
    """One chart has a line for each; what only their folders differ in is left out."""
    paths = [training_of(tmp_path / name, loss, rate) for name, loss, rate in (("a", 1.0, 1e-5), ("b", 2.0, 5e-5))]
    figures = gymdata.report(*paths, output=tmp_path / "page.html").figures
    assert (figures["settings"], figures["names"]) == ({"learning_rate": [1e-5, 5e-5]}, ["a", "b"])
    assert figures["headline"] == "2 trainings of train-dpo"
    page = (tmp_path / "page.html").read_text()
    assert "<title>loss</title>" in page
    assert "<title>a, 1: 1</title>" in page
    assert "<title>b, 1: 2</title>" in page
    last = page.partition("Last values")[2]
    assert last.index("0.3333") < last.index("0.6667")


def test_names_are_as_long_as_tells_them_apart(tmp_path: Path) -> None:
    """Of folders with the same name, with the one above."""
    paths = [run_of(tmp_path / name / "eval", 0, 1) for name in ("x", "y", "z")]
    assert gymdata.report(*paths, write=False).figures["names"] == ["x/eval", "y/eval", "z/eval"]


def test_runs_and_trainings_are_not_mixed(tmp_path: Path) -> None:
    """The path that has no rollouts is named."""
    paths = [run_of(tmp_path / "a", 0, 1), run_of(tmp_path / "b", 0, 1), training_of(tmp_path / "c", 1.0, 1e-5)]
    with pytest.raises(DataError, match="/c"):
        gymdata.report(*paths, write=False)


def test_another_version_of_the_environment_is_another_sampling(tmp_path: Path) -> None:
    """Named once, by its spec, with the hash of its file where that alone differs; weights and seeds are no sampling."""
    calculator = {"name": "python_tools", "spec": "calculator.py:Calculator", "file_hash": "a1"}
    places = {"none": {"name": "single_turn"}, "a": calculator, "b": calculator | {"file_hash": "b2"}}
    for seed, (name, place) in enumerate(places.items()):
        (tmp_path / name).mkdir()
        identity = {"environment": place, "temperature": 1.0, "seed": seed, "policy_hash": name}
        facts = {"stage": "collect", "run_id": name, "identity": identity, "config": {"num_rollouts": 4}}
        (tmp_path / name / "run.json").write_text(json.dumps(facts))
    assert sampling_that_differs(tmp_path / "none", tmp_path / "a") == {
        "env": ["single_turn", "calculator.py:Calculator"]
    }
    versions = sampling_that_differs(tmp_path / "a", tmp_path / "b")["env"]
    assert ["a1" in versions[0], "b2" in versions[1]] == [True, True]
    assert sampling_that_differs(tmp_path / "a", tmp_path / "a") == {}
