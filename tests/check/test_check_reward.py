"""A reward is tried on saved rollouts before it is used: values, parts, faults with file and line, times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.rewards.remote import RemoteReward
from tests.rollout_files import rollout, write_run

REWARDS = """
def right(completion, answer) -> float:
    if completion == "crash":
        raise ValueError("no verdict")
    return float(completion == answer)

def turns(completions):
    return [[0.25] for _ in completions]
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.py").write_text(REWARDS)
    texts = ["7", "8", "crash"]
    rows = [
        rollout("t", index, None, [([1, 3], [20 + index, 2])], text=text) | {"task": '{"prompt": "q", "answer": "7"}'}
        for index, text in enumerate(texts)
    ]
    write_run(tmp_path / "run", rows)
    return tmp_path / "run"


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["check", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_values_parts_and_faults_of_every_rollout(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each rollout has its parts and its weighted sum; where a function fails, file and line, and exit code 1."""
    code, found = checked(capsys, "--reward", "r.py:right", "--reward", "r.py:turns=2", "--data", str(run))
    assert code == 1
    assert (found["tried"], found["scored"], found["failed"]) == (3, 2, 1)
    assert (found["lowest"], found["highest"], found["mean"]) == (0.5, 1.5, 1.0)
    by_index = {one["rollout_index"]: one for one in found["rollouts"]}
    assert [by_index[k]["reward"] for k in range(3)] == [1.5, 0.5, None]
    assert [by_index[k]["parts"] for k in range(3)] == [
        {"right": 1.0, "turns": 0.25},
        {"right": 0.0, "turns": 0.25},
        {"right": None, "turns": 0.25},
    ]
    assert by_index[0]["turns"] == {"turns": [0.25]}
    assert by_index[2]["faults"] == {"right": "right raised ValueError: no verdict (r.py:4, in right)"}
    assert all(one["seconds"] > 0 for one in found["rollouts"])
    assert found["seconds_mean"] <= found["seconds_max"]


def test_a_reward_that_applies_to_no_rollout_is_no_success(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A function that gives None everywhere leaves nothing to train on: exit code 1, and a line that says so."""
    (run.parent / "r.py").write_text("def never(completion):\n    return None\n")
    assert main(["check", "--reward", "r.py:never", "--data", str(run)]) == 1
    assert "0: the reward applies to none of them" in capsys.readouterr().out


def test_people_see_a_line_per_rollout_and_the_fault_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table of rollouts, then each different fault with how often, then the summary with the time."""
    assert main(["check", "--reward", "r.py:right", "--data", str(run)]) == 1
    shown = capsys.readouterr().out
    assert "failed on 1: right raised ValueError: no verdict (r.py:4, in right)" in shown
    assert shown.count("no verdict") == 1
    assert shown.split()[0] == "task"
    assert "time per rollout" in shown
    assert [line.split()[2] for line in shown.splitlines() if line.split()[:1] == ["t"]] == ["1", "0", "failed"]


def test_a_function_that_always_fails_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table in which every row is the same failure says nothing."""
    (run.parent / "always.py").write_text("def always(completion) -> float:\n    return 1 / 0\n")
    assert main(["check", "--reward", "always.py:always", "--data", str(run)]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines[0] == "failed on 3: always raised ZeroDivisionError: division by zero (always.py:2, in always)"
    assert lines[1] == "check"


def test_rewards_that_are_all_equal_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is learned from a reward that does not differ; the summary says so, and it is no fault."""
    assert main(["check", "--reward", "r.py:turns", "--data", str(run)]) == 0
    assert "all are equal, nothing to learn from" in capsys.readouterr().out


def test_columns_of_tasks_are_named_as_for_collect(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message about a file without a prompt names ``--map``, which this command takes, too."""
    Path("odd.csv").write_text("The Question;Right Answer\n2+5?;7\n3+5?;8\n")
    asked = ("--reward", "r.py:right", "--data", "odd.csv")
    assert main(["check", *asked]) == 2
    assert "--map 'prompt=The Question' --map 'answer=Right Answer'" in capsys.readouterr().err
    code, found = checked(capsys, *asked, "--map", "prompt=The Question", "--map", "answer=Right Answer")
    assert (code, found["answers"]) == (0, {"reference": 1.0, "empty": 0.0, "wrong": 0.0})


def test_only_the_first_are_tried_and_nothing_is_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``-n`` bounds what a slow judge costs, and the run stays as it was."""
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    code, found = checked(capsys, "--reward", "r.py:right", "--data", str(run), "-n", "2")
    assert (code, found["tried"]) == (0, 2)
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*")} == before


def test_a_function_given_as_an_object_is_tried(run: Path) -> None:
    """From Python a function needs no file; the report has the same rows."""

    def length(completion: Any) -> float:
        return float(len(completion))

    report = gymdata.check_reward(run, length, limit=2)
    assert report.ok
    assert [one.reward for one in report.rollouts] == [1.0, 1.0]
    assert dict(report.rows())["rollouts"] == 2


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--reward", "numeric"], 2, "give both --reward and --data"),
        (["--data", "run"], 2, "give both --reward and --data"),
        (["--reward", "numeric", "--data", "run", "-m", "policy"], 2, "--reward is checked by itself"),
        (["--reward", "numric", "--data", "run"], 2, "did you mean 'numeric'"),
        (["--reward", "r.py:right", "--data", "nowhere"], 2, "nowhere"),
        (["--reward", "http://127.0.0.1:9/reward", "--data", "run"], 3, "127.0.0.1:9"),
    ],
)
def test_what_cannot_be_checked_is_named(
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    code: int,
    said: str,
) -> None:
    """Too little, too much, a typo, no rollouts, and a server that is not there end with their exit codes."""
    defaults = RemoteReward.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "pause_s", 0.0)
    assert main(["check", *words]) == code
    assert said in capsys.readouterr().err


def test_a_reward_is_tried_on_tasks_before_anything_is_collected(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a CSV of tasks the reference answers must score above empty and wrong ones, or it is a problem."""
    (run.parent / "tasks.csv").write_text("prompt,answer\n1+1?,2\n2+2?,4\n")
    code, found = checked(capsys, "--reward", "exact_match", "--data", "tasks.csv")
    assert (code, found["tried"], found["answers"]) == (0, 6, {"reference": 1.0, "empty": 0.0, "wrong": 0.0})
    (run.parent / "r.py").write_text("def zero(completion, answer) -> float:\n    return 0.0\n")
    assert main(["check", "--reward", "r.py:zero", "--data", "tasks.csv"]) == 1
    assert "the reference answers do not score above the others" in capsys.readouterr().out
