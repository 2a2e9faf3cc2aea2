"""Rollouts by number, read when they are looked at, also while their run is being collected."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.commands.view.evidence.facets import task_fields
from gymdata.commands.view.evidence.rollout import Tokens
from gymdata.commands.view.evidence.selection import Query, command_of, compare_runs, select
from gymdata.commands.view.evidence.tables import Snapshot, Tables
from gymdata.stats import paired_difference_ci
from gymdata.store import Run
from tests.rollout_files import rollout, two_turns, write_run

ROWS = [rollout(f"t{k // 2}", k % 2, float(k % 2) if k < 6 else None, two_turns(20 + k, 40 + k)) for k in range(8)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", ROWS)


@pytest.fixture
def snapshot(run: Path) -> Snapshot:
    return Tables([run]).snapshot()


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_every_row_is_the_row_on_disk(tmp_path: Path, suffix: str):
    """A rollout that is looked up by its id has all its columns, tokens too, and several come in the order asked for, with
    those columns only."""
    snapshot = Tables([write_run(tmp_path / "run", ROWS, suffix)]).snapshot()
    assert len(snapshot) == 8
    for wanted in ROWS:
        number = snapshot.find(wanted["rollout_id"])
        assert number is not None
        row = snapshot.row(number)
        assert row["messages"][0]["content"] == f"question {wanted['task_id']}"
        assert [t["generation_token_ids"] for t in row["turns"]] == [
            list(t["generation_token_ids"]) for t in wanted["turns"]
        ]
    assert snapshot.find("nobody") is None
    table = snapshot.read([5, 0, 3], ["rollout_id", "messages"])
    assert table["rollout_id"].to_pylist() == ["t2-1", "t0-0", "t1-1"]
    assert table.column_names == ["rollout_id", "messages"]


def test_a_growing_run_grows_in_the_index(tmp_path: Path):
    """Rows of an open journal appear once, in order, and stay when it is sealed; nothing else changes the version."""
    folder = tmp_path / "run"
    index = Tables([folder], fresh_s=0.0)
    with Run.open(folder, identity={"a": 1}, extent={}, operation={}) as writer:
        assert len(index.snapshot()) == 0
        for count, row in enumerate(ROWS, 1):
            writer.append(row)
            snapshot = index.snapshot()
            assert len(snapshot) == count
            assert snapshot.growing
            assert snapshot.row(count - 1)["rollout_id"] == row["rollout_id"]
            assert index.snapshot().version == snapshot.version
    sealed = index.snapshot()
    assert sealed.table["rollout_id"].to_pylist() == [row["rollout_id"] for row in ROWS]
    assert not sealed.growing


def test_a_run_that_is_written_again_and_again_shows_the_rows_of_its_newest_files(tmp_path: Path):
    """A row that was kept of one file is not shown for another, whatever became of the first."""
    index, shown = Tables([tmp_path / "run"], fresh_s=0), []
    for answer in range(100, 120):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        write_run(tmp_path / "run", [rollout("t", 0, float(answer), two_turns(20, answer))])
        row = index.snapshot().row(0)
        shown.append((row["turns"][1]["generation_token_ids"], row["reward"]))
    assert shown == [([answer, 2], float(answer)) for answer in range(100, 120)]


def test_a_journal_of_another_run_is_read_from_its_beginning(tmp_path: Path):
    """Also where it has the name and the inode of the earlier one, and is longer."""
    journals = []
    for name, rows in (("run", ROWS[:2]), ("other", ROWS[2:6])):
        with contextlib.suppress(KeyError), Run.open(tmp_path / name, identity={}, extent={}, operation={}) as writer:
            for row in rows:
                writer.append(row)
            raise KeyError
        journals += (tmp_path / name).glob("rollouts/part-*.jsonl")
    index = Tables([tmp_path / "run"], fresh_s=0)
    assert len(index.snapshot()) == 2
    journals[0].write_bytes(journals[1].read_bytes())
    assert index.snapshot().table["rollout_id"].to_pylist() == [row["rollout_id"] for row in ROWS[2:6]]


@pytest.mark.parametrize(("abandoned", "masks"), [("keep", [[1, 1], [1, 1]]), ("drop", [None, [1, 1]])])
def test_a_retry_with_the_same_tokens_is_shown_with_its_own_sequence(tmp_path: Path, abandoned: str, masks: list[Any]):
    """Of two sequences of the same ids both are trained, or the one that the file has."""
    run = write_run(tmp_path / "run", [rollout("t", k, float(k), [([1, 5], [10, 2])] * 2) for k in range(2)])
    gymdata.experience(run, abandoned=abandoned)
    tables = Tables([run])
    tokens = Tokens(tables.snapshot().row(0), tables)
    assert [None if mask is None else mask.tolist() for mask in tokens.mask] == masks


def test_tasks_of_two_runs_with_the_same_id_have_fields_of_their_own(tmp_path: Path):
    """Tasks that are numbered in each of two files are not the same: as many rollouts have a value as its filter keeps."""

    def run(name: str, *levels: str) -> Path:
        rows = [
            rollout(f"{k}", 0, 1.0, two_turns(20, 40), rollout_id=f"{name}-{k}", run_id=name)
            | {"task": json.dumps({"level": level})}
            for k, level in enumerate(levels)
        ]
        return write_run(tmp_path / name, rows)

    snapshot = Tables([run("a", "easy", "hard"), run("b", "hard", "hard")]).snapshot()
    (level,) = (column for column in task_fields(snapshot) if column.name == "task.level")
    hard = select(snapshot, Query(where="task.level == 'hard'")).rows
    assert [level.of(row) for row in range(4)] == ["easy", "hard", "hard", "hard"]
    assert hard.tolist() == [1, 2, 3]


def test_a_damaged_file_is_a_problem_and_no_number(tmp_path: Path):
    """Of two runs the one whose file was cut off is named, and only the other's rollouts are there."""
    good, bad = write_run(tmp_path / "good", ROWS[:4]), write_run(tmp_path / "bad", ROWS[4:])
    part = next((bad / "rollouts").iterdir())
    part.write_bytes(part.read_bytes()[:-100])
    snapshot = Tables([good, bad]).snapshot()
    assert len(snapshot) == 4
    assert len(snapshot.problems) == 1
    assert str(part) in snapshot.problems[0]


def test_rollouts_that_are_there_twice_are_reported(tmp_path: Path):
    """What was filtered of a run lies beside it: the page says how many rollouts of it are counted twice."""
    kept, run = write_run(tmp_path / "kept", ROWS[:2]), write_run(tmp_path / "run", ROWS)
    twice = Tables([kept, run]).snapshot().repeated
    assert [line.partition(": ")[2] for line in twice] == [f"2 of its 2 rollouts are in {run}, too"]
    assert Tables([run]).snapshot().repeated == ()


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_query_keeps_what_its_filter_command_keeps(tmp_path: Path, suffix: str):
    """Boxes and the condition together keep the rollouts that ``gymdata filter`` keeps, and the figures are theirs."""
    run = write_run(tmp_path / "run", ROWS, suffix)
    snapshot = Tables([run]).snapshot()
    query = Query.of(
        {"where": "0 < mean_reward", "task": "t", "status": "completed", "min": "0", "sort": "reward", "down": "1"}
    )
    found = select(snapshot, query)
    report = gymdata.filter(run, write=False, where=query.conditions())
    assert len(found.rows) == report.rollouts_out == 6
    assert found.mean == 0.5
    assert found.mixed == 3
    assert [(bar.label, bar.count) for bar in found.bars] == [("0", 3), ("1", 3)]
    assert snapshot.table["reward"].take(found.rows).to_pylist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert command_of(snapshot, query, found).startswith(f"gymdata filter {run} --where \"contains(task_id, 't')\"")


@pytest.mark.parametrize(
    ("where", "word"),
    [
        ("task_id == 't1'", "\"task_id == 't1'\""),
        ('"task_id" > chr(65)', "'\"task_id\" > chr(65)'"),
        ("contains(text, '$HOME')", "'contains(text, '\"'\"'$HOME'\"'\"')'"),
    ],
)
def test_the_command_of_a_selection_is_read_by_a_shell_as_it_was_meant(
    run: Path, snapshot: Snapshot, where: str, word: str
):
    """A condition with single quotes is in double ones, unless a shell would change what is between them."""
    query = Query(where=where)
    command = command_of(snapshot, query, select(snapshot, query))
    assert command == f"gymdata filter {run} --where {word} -o kept"
    assert shlex.split(command)[4] == where


def test_a_box_takes_any_text(tmp_path: Path):
    """A quote or a backslash in a task is part of it in the condition, too."""
    tasks = ["plain", 'a"b', "a'b", "a\\b"]
    run = write_run(tmp_path / "run", [rollout(task, 0, 1.0, two_turns(20, 40)) for task in tasks])
    for task in tasks:
        assert gymdata.filter(run, write=False, where=Query(task=task).conditions()).rollouts_out == 1


def test_rollouts_without_a_reward_come_last_either_way(snapshot: Snapshot):
    """A missing reward is neither the best nor the worst, and has a bar of its own."""
    for down in (True, False):
        rows = select(snapshot, Query(sort="reward", down=down)).rows
        assert snapshot.table["reward"].take(rows).to_pylist()[-2:] == [None, None]
    assert select(snapshot, Query()).bars[-1].where == "reward is null"
    assert len(select(snapshot, Query(where="reward is null")).rows) == 2


@pytest.mark.parametrize(
    ("query", "error"),
    [
        (Query(where="rewrd > 1"), 'Candidate bindings: "reward"'),
        *(
            (Query(min=value), f"the least reward: got '{value}', expected a number such as 0.5")
            for value in ("abc", "nan", "1e999", "0x1")
        ),
    ],
    ids=lambda value: value.where or value.min if isinstance(value, Query) else "",
)
def test_a_faulty_query_is_an_error_and_shows_nothing(snapshot: Snapshot, query: Query, error: str):
    """The message names the nearest column, or the box and its value; nothing is selected or made into a command."""
    selection = select(snapshot, query)
    assert error in str(selection.error)
    assert len(selection.rows) == 0
    assert command_of(snapshot, query, selection) == ""


def rewarded(folder: Path, rewards: dict[str, float]) -> Path:
    """A run of the folder's name: a rollout of each task with its reward."""
    rows = []
    for task, reward in rewards.items():
        ids = dict.fromkeys(("rollout_id", "group_id"), f"{folder.name}-{task}")
        rows.append(rollout(task, 0, reward, two_turns(20, 40), run_id=folder.name, **ids))
    return write_run(folder, rows)


def test_two_runs_are_compared_on_the_tasks_that_both_have(tmp_path: Path):
    """The difference of the second run to the first is paired by task, with the interval of ``paired_difference_ci``."""
    before = rewarded(tmp_path / "one", {f"t{k}": float(k % 2) for k in range(6)})
    after = rewarded(tmp_path / "two", {f"t{k}": 1.0 for k in range(2, 8)})
    snapshot = Tables([before, after]).snapshot()
    first, second = compare_runs(snapshot, select(snapshot, Query()).rows)
    assert (first.run_id, first.rollouts, first.mean, first.difference) == ("one", 6, 0.5, None)
    assert (first.groups, first.mixed, first.breaks) == (6, 0, 0)
    assert (second.run_id, second.rollouts, second.mean, second.shared) == ("two", 6, 1.0, 4)
    assert second.difference == paired_difference_ci([0.0, 1.0, 0.0, 1.0], [1.0] * 4)
    assert compare_runs(snapshot, select(snapshot, Query(run="one")).rows) == []


def test_a_run_is_compared_with_the_first_that_has_its_tasks(tmp_path: Path):
    """A folder of runs has held-out tasks and others: each after is compared with its own before; an interval needs two
    tasks."""
    runs = {"train": {"t0": 0.0, "t1": 0.0}, "before": {"h0": 0.0, "h1": 0.0}, "after": {"h0": 1.0, "h1": 1.0},
            "again": {"t1": 1.0}}  # fmt: skip
    snapshot = Tables([rewarded(tmp_path / name, rewards) for name, rewards in runs.items()]).snapshot()
    compared = compare_runs(snapshot, select(snapshot, Query()).rows)
    assert [(run.run_id, run.against, run.shared) for run in compared] == [
        ("train", None, 0), ("before", None, 0), ("after", "before", 2), ("again", "train", 1),
    ]  # fmt: skip
    assert compared[-1].difference is not None
    assert compared[-1].difference[0] == 1.0
    assert math.isnan(compared[-1].difference[1])


@pytest.mark.parametrize(
    ("query", "names"),
    [
        (Query(task="t", run="r", where="task.level == 'hard' and policy_version > 1"), []),
        (Query(min="0", mixed="1"), ["reward", "min_reward", "max_reward"]),
        (Query(where="n_turns > 2 and task_id != 'a'"), ["n_turns"]),
        (Query(where="n_turns >"), []),
    ],
)
def test_what_a_query_knows_only_after_sampling(query: Query, names: list[str]):
    """A choice by task, run or policy leaves runs comparable; one by rewards or turns does not."""
    assert query.outcomes() == names


def test_a_condition_is_added_once():
    """A link that adds a condition changes nothing where it was added already."""
    once = Query(where="reward == 1").also("n_turns > 2")
    assert once == "(reward == 1) and n_turns > 2"
    assert Query(where=once).also("n_turns > 2") == once
    assert Query().also("n_turns > 2") == Query(where="n_turns > 2").also("n_turns > 2") == "n_turns > 2"
