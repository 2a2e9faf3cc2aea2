"""Rollouts by number, read when they are looked at, also while their run is being collected."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import pytest

import gymdata
from gymdata.store import Run
from gymdata.view.evidence.faults import Faults
from gymdata.view.evidence.index import RolloutIndex
from gymdata.view.evidence.selection import Query, Selector, command_of
from tests.rollout_files import rollout, two_turns, write_run

ROWS = [rollout(f"t{k // 2}", k % 2, float(k % 2) if k < 6 else None, two_turns(20 + k, 40 + k)) for k in range(8)]


@pytest.fixture(params=["parquet", "jsonl"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", ROWS, request.param)


def test_every_row_is_the_row_on_disk(run: Path):
    """A rollout that is looked up by its id has all its columns, tokens too, from Parquet and from JSON lines."""
    index = RolloutIndex([run])
    snapshot = index.snapshot()
    assert len(snapshot) == 8
    for wanted in ROWS:
        number = snapshot.find(wanted["rollout_id"])
        assert number is not None
        row = index.row(snapshot, number)
        assert row["messages"][0]["content"] == f"question {wanted['task_id']}"
        assert [t["generation_token_ids"] for t in row["turns"]] == [
            list(t["generation_token_ids"]) for t in wanted["turns"]
        ]
    assert snapshot.find("nobody") is None


def test_several_rows_come_in_the_order_asked_for(run: Path):
    """``rows`` gives what was asked for, in that order, with those columns only."""
    index = RolloutIndex([run])
    table = index.rows(index.snapshot(), [5, 0, 3], ["rollout_id", "messages"])
    assert table["rollout_id"].to_pylist() == ["t2-1", "t0-0", "t1-1"]
    assert table.column_names == ["rollout_id", "messages"]


def test_a_growing_run_grows_in_the_index(tmp_path: Path):
    """Rows of an open journal appear once, in order, and stay when it is sealed; nothing else changes the version."""
    folder = tmp_path / "run"
    index = RolloutIndex([folder], fresh_s=0.0)
    with Run.open(folder, identity={"a": 1}, extent={}, operation={}) as writer:
        assert len(index.snapshot()) == 0
        for count, row in enumerate(ROWS, 1):
            writer.append(row)
            snapshot = index.snapshot()
            assert len(snapshot) == count
            assert snapshot.growing
            assert index.row(snapshot, count - 1)["rollout_id"] == row["rollout_id"]
            assert index.snapshot().version == snapshot.version
    sealed = index.snapshot()
    assert sealed.table["rollout_id"].to_pylist() == [row["rollout_id"] for row in ROWS]
    assert not sealed.growing


def test_a_damaged_file_is_a_problem_and_no_number(tmp_path: Path):
    """Of two runs the one whose file was cut off is named, and only the other's rollouts are there."""
    good, bad = write_run(tmp_path / "good", ROWS[:4]), write_run(tmp_path / "bad", ROWS[4:])
    part = next((bad / "rollouts").iterdir())
    part.write_bytes(part.read_bytes()[:-100])
    snapshot = RolloutIndex([good, bad]).snapshot()
    assert len(snapshot) == 4
    assert len(snapshot.problems) == 1
    assert str(part) in snapshot.problems[0]


def test_rollouts_that_are_there_twice_are_reported(tmp_path: Path):
    """What was filtered of a run lies beside it: the page says how many rollouts of it are counted twice."""
    kept, run = write_run(tmp_path / "kept", ROWS[:2]), write_run(tmp_path / "run", ROWS)
    twice = RolloutIndex([kept, run]).snapshot().repeated
    assert [line.partition(": ")[2] for line in twice] == [f"2 of its 2 rollouts are in {run}, too"]
    assert RolloutIndex([run]).snapshot().repeated == ()


def test_a_query_keeps_what_its_filter_command_keeps(run: Path):
    """Boxes and the condition together keep the rollouts that ``gymdata filter`` keeps, and the figures are theirs."""
    index = RolloutIndex([run])
    snapshot = index.snapshot()
    query = Query.of(
        {"where": "0 < mean_reward", "task": "t", "status": "completed", "min": "0", "sort": "reward", "down": "1"}
    )
    found = Selector().select(snapshot, query)
    report = gymdata.filter(run, write=False, where=query.conditions())
    assert len(found.rows) == report.rollouts_out == 6
    assert found.mean == 0.5
    assert found.mixed == 3
    assert [(bar.label, bar.count) for bar in found.bars] == [("0", 3), ("1", 3)]
    assert snapshot.table["reward"].take(found.rows).to_pylist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert command_of(snapshot, query, found).startswith(f"gymdata filter {run} --where 'contains(task_id, \"t\")'")


@pytest.mark.parametrize(
    ("where", "word"),
    [
        ("task_id == 't1'", "\"task_id == 't1'\""),
        ('task_id == "t1"', "'task_id == \"t1\"'"),
        ("contains(text, '$HOME')", "'contains(text, '\"'\"'$HOME'\"'\"')'"),
    ],
)
def test_the_command_of_a_selection_is_read_by_a_shell_as_it_was_meant(run: Path, where: str, word: str):
    """A condition with single quotes is in double ones, unless a shell would change what is between them."""
    index, query = RolloutIndex([run]), Query(where=where)
    snapshot = index.snapshot()
    command = command_of(snapshot, query, Selector().select(snapshot, query))
    assert command == f"gymdata filter {run} --where {word} -o kept"
    assert shlex.split(command)[4] == where


def test_rollouts_without_a_reward_come_last_either_way(run: Path):
    """A missing reward is neither the best nor the worst, and has a bar of its own."""
    index = RolloutIndex([run])
    snapshot, selector = index.snapshot(), Selector()
    for down in (True, False):
        found = selector.select(snapshot, Query(sort="reward", down=down))
        assert snapshot.table["reward"].take(found.rows).to_pylist()[-2:] == [None, None]
    assert selector.select(snapshot, Query()).bars[-1].where == "reward is null"
    assert len(selector.select(snapshot, Query(where="reward is null")).rows) == 2


def test_a_wrong_condition_is_said_and_shows_nothing(run: Path):
    """An unknown column names the nearest one."""
    index = RolloutIndex([run])
    found = Selector().select(index.snapshot(), Query(where="rewrd > 1"))
    assert len(found.rows) == 0
    assert found.error is not None
    assert "did you mean 'reward'?" in found.error


def test_two_runs_are_compared_on_the_tasks_that_both_have(tmp_path: Path):
    """The difference of the second run to the first is paired by task, with the interval of ``paired_difference_ci``."""
    from gymdata.stats import paired_difference_ci

    before = [rollout(f"t{k}", 0, float(k % 2), two_turns(20 + k, 40), run_id="one") for k in range(6)]
    after = [
        rollout(f"t{k}", 0, 1.0, two_turns(20 + k, 40), run_id="two", rollout_id=f"later-{k}", group_id=f"later-{k}")
        for k in range(2, 8)
    ]
    index = RolloutIndex([write_run(tmp_path / "a", before), write_run(tmp_path / "b", after)])
    first, second = Selector().runs(index.snapshot(), Query())
    assert (first.run_id, first.rollouts, first.mean, first.difference) == ("one", 6, 0.5, None)
    assert (first.groups, first.mixed, first.breaks) == (6, 0, 0)
    assert (second.run_id, second.rollouts, second.mean, second.shared) == ("two", 6, 1.0, 4)
    assert second.difference == paired_difference_ci([0.0, 1.0, 0.0, 1.0], [1.0] * 4)
    assert Selector().runs(index.snapshot(), Query(run="one")) == []


def test_a_run_is_compared_with_the_first_that_has_its_tasks(tmp_path: Path):
    """A folder of runs has held-out tasks and others: each after is compared with its own before."""
    runs = [("train", "t", 0.0), ("before", "h", 0.0), ("after", "h", 1.0)]
    paths = [
        write_run(
            tmp_path / name,
            [
                rollout(f"{kind}{k}", 0, reward, two_turns(20, 40), run_id=name, rollout_id=f"{name}-{k}")
                for k in range(2)
            ],
        )
        for name, kind, reward in runs
    ]
    found = {run.run_id: run for run in Selector().runs(RolloutIndex(paths).snapshot(), Query())}
    assert [(name, run.against, run.shared) for name, run in found.items()] == [
        ("train", None, 0), ("before", None, 0), ("after", "before", 2),
    ]  # fmt: skip


def test_an_interval_needs_two_tasks(tmp_path: Path):
    """Of runs with one task in common the difference has no interval."""
    rows = [[rollout("t", 0, reward, two_turns(20, 40), run_id=f"run-{reward:g}")] for reward in (0.0, 1.0)]
    index = RolloutIndex([write_run(tmp_path / str(n), one) for n, one in enumerate(rows)])
    second = Selector().runs(index.snapshot(), Query())[1]
    assert second.difference is not None
    assert second.difference[0] == 1.0
    assert math.isnan(second.difference[1])


@pytest.mark.parametrize("value", ["abc", "nan", "1e999", "0x1"])
def test_a_reward_that_is_no_number_is_an_error_of_its_box(run: Path, value: str):
    """The message names the box and its value; nothing is selected, compared or made into a command."""
    index, query = RolloutIndex([run]), Query(min=value)
    found = Selector().select(index.snapshot(), query)
    assert found.error == f"the least reward: got '{value}', expected a number such as 0.5"
    assert len(found.rows) == 0
    assert Selector().runs(index.snapshot(), query) == []
    assert command_of(index.snapshot(), query, found) == ""


@pytest.mark.parametrize(
    ("query", "names"),
    [
        (Query(task="t", run="r", where='task.level == "hard" and policy_version > 1'), []),
        (Query(min="0", mixed="1"), ["reward", "min_reward", "max_reward"]),
        (Query(where="n_turns > 2 and task_id != 'a'", fault="T206"), ["faults", "n_turns"]),
        (Query(where="n_turns >"), []),
    ],
)
def test_what_a_query_knows_only_after_sampling(query: Query, names: list[str]):
    """A choice by task, run or policy leaves runs comparable; one by rewards, turns or faults does not."""
    assert query.outcomes() == names


def test_a_condition_is_added_once():
    """A link that adds a condition changes nothing where it was added already."""
    once = Query(where="reward == 1").also("n_turns > 2")
    assert once == "(reward == 1) and n_turns > 2"
    assert Query(where=once).also("n_turns > 2") == once
    assert Query().also("n_turns > 2") == Query(where="n_turns > 2").also("n_turns > 2") == "n_turns > 2"


def test_faults_are_those_of_validate(tmp_path: Path):
    """Each rollout has the codes of the errors that ``gymdata validate`` finds in it, from Parquet and from JSON lines, and
    those alone are kept when a code is chosen."""
    samples = Path(__file__).parents[2] / "sample_data" / "rollouts"
    paths = [samples / "broken.jsonl", samples / "clean.jsonl", write_run(tmp_path / "run", ROWS)]
    index, faults = RolloutIndex(paths), Faults(lambda _: None)
    snapshot = index.snapshot()
    found = faults.found(snapshot)
    assert found.unchecked == 0
    wanted: dict[str, set[str]] = {}
    for path in paths:
        for one in gymdata.validate(path).violations:
            if one.severity == "error":
                wanted.setdefault(str(one.rollout_id), set()).add(one.code)
    ids = snapshot.table["rollout_id"].to_pylist()
    assert {ids[n]: set(codes) for n in range(len(ids)) if (codes := found.of(n))} == wanted
    assert {"T206", "L301", "L302", "L303", "M404", "R502", "S102"} <= found.rows.keys()
    chosen = Selector().select(snapshot, Query(fault="L302"), found)
    assert [ids[n] for n in chosen.rows] == [one for one, codes in wanted.items() if "L302" in codes]
    assert "abfb07f8d28859abe4758eadd7c7a87c" in command_of(snapshot, Query(fault="L302"), chosen)
    assert len(Selector().select(snapshot, Query(fault="any"), found).rows) == len(wanted)
    faults.close()


def test_faults_of_a_growing_run_are_of_its_rows(tmp_path: Path):
    """What was checked is not checked again, and rows that come later have their own faults at their own places."""
    bad = rollout("bad", 0, 1.0, [([1, 20], [10, -5, 2])])
    index, faults = RolloutIndex([tmp_path / "run"], fresh_s=0.0), Faults(lambda _: None)
    with Run.open(tmp_path / "run", identity={"a": 1}, extent={}, operation={}) as writer:
        for row in (ROWS[0], bad, ROWS[1]):
            writer.append(row)
            found = faults.found(index.snapshot())
        # The tool messages of the two others answer no call.
        assert {code: rows.tolist() for code, rows in found.rows.items()} == {"M403": [0, 2], "T206": [1]}
    faults.close()


def test_many_rollouts_are_checked_when_somebody_wants_to_know(tmp_path: Path):
    """Until then they are counted as unchecked, and nothing runs; what was wanted once stays wanted."""
    run = write_run(tmp_path / "run", ROWS)
    snapshot, faults = RolloutIndex([run]).snapshot(), Faults(lambda _: None, unasked=7)
    found = faults.found(snapshot)
    assert (found.unchecked, found.running, dict(found.rows)) == (8, False, {})
    assert faults.found(snapshot, wanted=True).rows["M403"].tolist() == list(range(8))
    assert faults.found(snapshot).unchecked == 0
    faults.close()
