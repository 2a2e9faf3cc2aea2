"""Tasks, rewards and environments that are objects of the program instead of files."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import gymdata
from gymdata.commands.collect.settings import CollectConfig
from gymdata.commands.collect.setup import Given, load_parts
from gymdata.commands.collect.tasks import TaskRows, task_rows
from gymdata.environments import given_environment
from gymdata.errors import DataError, UsageError
from gymdata.rewards import given_rewards
from gymdata.store import read_run_json
from tests.collect.fake_parts import parts
from tests.rollout_files import rollout, two_turns, write_run

TASKS = [{"task_id": "a", "prompt": "1+1?", "answer": "2"}, {"prompt": "2+2?", "answer": "4"}]


def long(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def above(bound: float, completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text) > bound) for text in completions]


class Adder:
    """Adds two numbers."""

    def __init__(self, start: int = 0) -> None:
        self.total = start

    def add(self, a: int) -> str:
        """Add a number.

        Args:
            a: What is added.
        """
        self.total += a
        return str(self.total)


def rows(values: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from values


@pytest.mark.parametrize(
    "given",
    [TASKS, tuple(TASKS), rows(TASKS), pl.DataFrame(TASKS), ["1+1?", "2+2?"]],
    ids=["list", "tuple", "generator", "frame", "texts"],
)
def test_tasks_are_any_iterable_of_rows(given: Any, tmp_path: Path) -> None:
    """A list, a tuple and a generator of dicts, a data frame and texts are collected; run.json says "in memory" and their
    hash."""
    summary = gymdata.collect(given, output=tmp_path / "run", seed=1, parts=parts())
    assert summary.rollouts == 2
    found = read_run_json(tmp_path / "run")
    assert found["config"]["tasks"] == "in memory"
    expected = given if isinstance(given, list) else TASKS
    assert found["tasks"]["files"] == [{"path": "in memory", "xxh3": TaskRows(rows=expected).facts()[0]["xxh3"]}]


def test_tasks_of_a_dataset(tmp_path: Path) -> None:
    """A datasets.Dataset gives the tasks that the same rows in a list give: columns that a row lacks are not there."""
    datasets = pytest.importorskip("datasets")
    mixed = [{"prompt": "1+1?", "answer": "2"}, {"prompt": "2+2?"}]
    data = datasets.Dataset.from_list(mixed)
    assert [t.content_hash for t in TaskRows(rows=data)] == [t.content_hash for t in TaskRows(rows=mixed)]
    assert TaskRows(rows=data).facts() == TaskRows(rows=mixed).facts()


def test_edited_tasks_in_memory_are_refused_like_edited_files(tmp_path: Path) -> None:
    """The content of rows is hashed: the same task_id with another prompt does not resume the run."""
    gymdata.collect(TASKS, output=tmp_path / "run", seed=1, parts=parts())
    edited = [{**TASKS[0], "prompt": "1+2?"}]
    with pytest.raises(gymdata.errors.StoreError, match="1 task was edited"):
        gymdata.collect(edited, output=tmp_path / "run", seed=1, num_rollouts=2, parts=parts())


def test_a_bad_row_in_memory_names_its_row(tmp_path: Path) -> None:
    """The row, the field and what was expected; values that no JSON can hold are faults of their row."""
    with pytest.raises(DataError, match="in memory, line 2, field 'prompt': got none"):
        gymdata.collect([TASKS[0], {"answer": 3}], output=tmp_path / "run", parts=parts())
    with pytest.raises(DataError, match="in memory, line 1: got a value that JSON has no form for"):
        gymdata.collect([{"prompt": "x", "lock": threading.Lock()}], output=tmp_path / "run", parts=parts())


def test_rewards_are_functions(tmp_path: Path) -> None:
    """score takes functions (here of 3 messages), weighted or not, beside names; run.json names them with a hash."""
    run = write_run(tmp_path / "run", [rollout("t", i, None, two_turns(1, 50 + i), text="x" * i) for i in range(3)])
    assert gymdata.score(run, reward=long).mean == 3.0
    summary = gymdata.score(run, reward=[(long, 2.0), "regex:x"], name="both")
    assert list(summary.parts) == ["long", "regex"]
    first, _ = read_run_json(run / "scores-both")["rewards"]
    assert first["name"] == "long"
    assert first["weight"] == 2.0
    assert first["source"].startswith("in memory:long@")


def test_the_hash_of_a_function_knows_what_it_holds() -> None:
    """The same function has one identity; another argument or closure is another."""

    def made(bound: int) -> Any:
        def reward(completions: list[str], **columns: Any) -> list[float]:
            return [float(len(text) > bound) for text in completions]

        return reward

    def source(function: Any) -> str:
        specs, functions = given_rewards(function)
        return functions[specs[0]][0].source

    assert source(made(1)) == source(made(1)) != source(made(2))
    named = [partial(above, bound) for bound in (1, 1, 2)]
    for function in named:
        function.__name__ = "above"  # type: ignore[attr-defined]  # a partial can have one
    assert source(named[0]) == source(named[1]) != source(named[2])


@pytest.mark.parametrize(
    ("what", "value", "says"),
    [
        *(("tasks", value, r"^gymdata.collect: got .*expected tasks") for value in (3, b"x", {"prompt": "x"}, [["x"]])),
        ("reward", Adder, "or a function"),  # a class makes an instance and no rewards
        ("reward", 3, "got 3, expected a name"),
        ("environment", 3, "env: got 3"),
    ],
)
def test_what_cannot_be_that_is_refused(what: str, value: Any, says: str, tmp_path: Path) -> None:
    """Numbers, bytes, one dict and a list of lists are no tasks; a number has no tools."""
    run = write_run(tmp_path / "run", [rollout("t", 0, None, two_turns(1, 50))])
    use = {
        "tasks": lambda: gymdata.collect(value, output=tmp_path / "other", parts=parts()),
        "reward": lambda: gymdata.score(run, reward=value),
        "environment": lambda: given_environment(value),
    }
    with pytest.raises(UsageError, match=says):
        use[what]()


def test_an_environment_is_a_class_or_an_instance(policy: str) -> None:
    """Both give their tools; the identity names the class, and an instance counts with what it holds."""
    config = CollectConfig(tasks="in memory", model="served", endpoint="http://127.0.0.1:9/v1", tokenizer=policy)
    by_class = load_parts(config, Given(environment=Adder)).environment
    assert [s["function"]["name"] for s in by_class.schemas] == ["add"]  # type: ignore[union-attr]  # there is an environment
    assert by_class.identity["spec"] == "in memory:Adder"  # type: ignore[union-attr]  # there is an environment
    two, three = (given_environment(Adder(start)).identity["file_hash"] for start in (2, 3))
    assert two != three
    assert two == given_environment(Adder(2)).identity["file_hash"]


def test_each_rollout_gets_a_copy_of_an_instance() -> None:
    """What one rollout does to its copy, another does not see."""
    shared = Adder(5)
    environment = given_environment(shared)
    one, other = (environment.factory() for _ in range(2))
    assert one.add(1) == "6"
    assert other.add(1) == "6"
    assert shared.total == 5


def test_tasks_of_data_frames_and_texts_are_those_of_a_list() -> None:
    """pandas, Polars, Arrow and plain questions give the tasks of the same rows; what is missing is not there."""
    rows = [{"prompt": "1+1?", "answer": 2}, {"prompt": "2+2?"}]
    wanted = [(task.row, task.content_hash) for task in TaskRows(rows=rows)]
    frame = pl.DataFrame(rows)
    for tasks in (frame, frame.lazy(), frame.to_arrow()):
        assert [(task.row, task.content_hash) for task in TaskRows(rows=task_rows(tasks))] == wanted
    pandas = pytest.importorskip("pandas")
    given = pandas.DataFrame({"prompt": ["1+1?", "2+2?"], "answer": ["2", None]})
    assert [task.row for task in TaskRows(rows=task_rows(given))] == [
        {"prompt": "1+1?", "answer": "2"},
        {"prompt": "2+2?"},
    ]
    questions = [task.content_hash for task in TaskRows(rows=["1+1?", "2+2?"])]
    assert questions == [task.content_hash for task in TaskRows(rows=[{"prompt": "1+1?"}, {"prompt": "2+2?"}])]


def test_lambdas_are_rewards(tmp_path: Path) -> None:
    """Each has a column; their identity is the source of the lambda, not of the rest of its line."""
    run = write_run(tmp_path / "run", [rollout("t", i, None, two_turns(1, 50 + i), text="x" * i) for i in range(3)])
    summary = gymdata.score(run, reward=[lambda completion: 1.0, lambda completion: 2.0], name="two")
    assert (list(summary.parts), summary.mean) == (["lambda", "lambda_2"], 3.0)

    def source(function: Any, _more: int = 0) -> str:
        specs, functions = given_rewards(function)
        return functions[specs[0]][0].source

    assert source(lambda completion: 1.0) == source(lambda completion: 1.0, 3) != source(lambda completion: 2.0)


def test_the_reasons_of_failures_are_shown(tmp_path: Path) -> None:
    """A function that fails on every rollout says why in the result and its repr."""

    def broken(completion: str) -> float:
        raise ValueError("no verdict")

    run = write_run(tmp_path / "run", [rollout("t", 0, None, two_turns(1, 50))])
    summary = gymdata.score(run, reward=broken)
    assert summary.failures["broken"].startswith("broken raised ValueError: no verdict (")
    assert "no verdict" in repr(summary)
