"""Tasks are paired by their id and their content: given messages, tools, and what their check needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.commands.report.compare import Paired, Side
from gymdata.commands.sweep.compare import results_of
from gymdata.commands.sweep.settings import SweepConfig
from gymdata.errors import DataError, GymdataError
from tests.rollout_files import rollout, two_turns, write_run

TOOLS = '[{"type": "function", "function": {"name": "add"}}]'


def asked(question: str, index: int = 0, answer: str = "4", **columns: Any) -> dict[str, Any]:
    """A rollout of task t0 with a question and its reference answer."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "4", "turn": 0}]
    row = rollout("t0", index, 1.0, two_turns(5, 40), messages=messages)
    task = {"task_id": "t0", "prompt": "2+2?", "answer": answer, "level": 1}
    return {**row, "task": json.dumps(task), **columns}


def paired(folder: Path, first: list[dict[str, Any]], second: list[dict[str, Any]]) -> Paired:
    runs = [write_run(folder / name, rows) for name, rows in (("a", first), ("b", second))]
    return Paired.of(*(Side.read(run, None) for run in runs))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ([asked("2+2? Begin alike")], "messages or tools of t0"),
        ([asked("2+2?", tools=TOOLS)], "messages or tools of t0"),
        ([asked("2+2?", answer="5")], "answer of t0"),
        ([asked("2+2?"), asked("3+3?", 1)], "messages or tools of t0"),
    ],
)
def test_another_content_under_the_same_id_is_refused(other: list[dict[str, Any]], why: str, tmp_path: Path) -> None:
    """By what differs, where no task is the same."""
    with pytest.raises(DataError, match=f"1 task has other content under the same id \\({why}\\)"):
        paired(tmp_path, [asked("2+2?")], other)


def test_the_same_task_is_the_same_in_other_bytes(tmp_path: Path) -> None:
    """The spaces of its tools, a null for an empty text, several rollouts, and a field that one row lacks."""
    spaced = json.dumps(json.loads(TOOLS), indent=1)
    other = asked("2+2?", tools=spaced, task='{"answer": "4", "more": 1}')
    other["messages"][0]["name"] = ""
    made = paired(tmp_path, [asked("2+2?", tools=TOOLS), asked("2+2?", 1, tools=TOOLS)], [other])
    assert (made.ways, made.others) == ({"t0": "same"}, {})


def test_another_system_prompt_of_the_run_makes_no_other_task(tmp_path: Path) -> None:
    """`collect --system` is a setting that two runs are compared by; in a row it belongs to the task."""
    system = {"role": "system", "content": "Answer in one word."}
    here, there = asked("2+2?"), asked("2+2?")
    there["messages"] = [system, *there["messages"]]
    assert paired(tmp_path / "setting", [here], [there]).others == {}
    task = {"task_id": "t0", "messages": [system, {"role": "user", "content": "2+2?"}]}
    other = {**task, "messages": task["messages"][1:]}
    with pytest.raises(DataError, match="messages of t0"):
        paired(tmp_path / "row", [{**here, "task": json.dumps(task)}], [{**there, "task": json.dumps(other)}])


def test_tasks_of_other_content_are_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How many and the first ids, on the terminal, on the page and in the figures; of several runs with the run's name."""
    rows = [rollout(f"t{n}", 0, 0.0, two_turns(5 + n, 40)) for n in range(6)]
    better = [{**row, "reward": 1.0} for row in rows]
    for row in better[:4]:
        row["messages"] = [{"role": "user", "content": "another question"}, *row["messages"][1:]]
    runs = [write_run(tmp_path / "a", rows), write_run(tmp_path / "b", better)]
    said = "4 tasks have other content under the same id (messages or tools of t0; messages or tools of t1; "
    figures = gymdata.report(*runs, write=False).figures
    assert figures["difference"]["n"] == 2
    assert figures["difference"]["other_content"].startswith(said)
    assert main(["report", *map(str, runs), "-o", str(tmp_path / "page.html")]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    assert said in (tmp_path / "page.html").read_text()
    several = gymdata.report(runs[0], runs[0], runs[1], write=False).figures
    assert f"{tmp_path / 'b'} (3): {said}" in several["headline"]


def test_a_sweep_and_a_baseline_refuse_other_content(tmp_path: Path) -> None:
    """Under equal ids; cells are named."""
    config = SweepConfig(steps=["filter {a} -o {output}"], grid={"a": ["x", "y"]}, result="{output}")
    cells = config.cells(tmp_path)
    for cell, question in zip(cells, ("2+2?", "3+3?"), strict=True):
        write_run(cell.result, [asked(question, temperature=0.0)])
    with pytest.raises(DataError, match=r"a-y: 1 task has other content .* than in a-x"):
        results_of(cells)
    with pytest.raises(GymdataError, match="other content under the same id"):
        gymdata.experience(cells[0].result, estimator="remax", baseline=str(cells[1].result), output=tmp_path / "e")
