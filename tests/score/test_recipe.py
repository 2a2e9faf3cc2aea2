"""Recipes: the label of a task decides which rewards a rollout gets, and what they count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.score.run import score
from gymdata.errors import UsageError
from gymdata.rewards.recipe import read_recipe
from gymdata.rollouts.schema import SCORES
from gymdata.store import read_run_json, read_table
from tests.rollout_files import rollout, two_turns, write_run
from tests.score.reward_server import Behaviour, app_of, reward_of
from tests.servers import serving

TASKS: list[dict[str, Any]] = [
    {"label": "math", "answer": "7"},
    {"label": "math", "answer": "8"},
    {"label": "chat"},
    {"label": 3, "answer": "7"},
    {"answer": "7"},
    {"label": "code", "answer": "8"},
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """One rollout a task; each answers "it is 7"."""
    rows = [
        rollout(f"t{k}", 0, None, two_turns(k, 20), text="it is 7") | {"task": json.dumps({"task_id": f"t{k}"} | task)}
        for k, task in enumerate(TASKS)
    ]
    return write_run(tmp_path / "run", rows)


def recipe(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "mix.yaml"
    file.write_text(text)
    return file


def test_the_label_decides(run: Path, tmp_path: Path) -> None:
    """Parts and weights are those of the label; other rewards are not asked; where none fits there is no score."""
    (tmp_path / "mine.py").write_text("def polite(completions, **_):\n    return [0.25] * len(completions)\n")
    file = recipe(
        tmp_path,
        """
math: {numeric: 3, "regex:^it": 0.5}
chat: {"mine.py:polite": 2}
3: {exact_match: 1, "regex:^it": 2}
""",
    )
    summary = score(path=str(run), recipe=file)
    rows = read_table(run / "scores-mix", SCORES).to_pylist()
    assert {(r["rollout_id"], r["name"]): r["value"] for r in rows} == {
        ("t0-0", "numeric"): 1.0, ("t0-0", "regex"): 1.0, ("t0-0", "mix"): 3.5,
        ("t1-0", "numeric"): 0.0, ("t1-0", "regex"): 1.0, ("t1-0", "mix"): 0.5,
        ("t2-0", "polite"): 0.25, ("t2-0", "mix"): 0.5,
        ("t3-0", "exact_match"): 0.0, ("t3-0", "regex"): 1.0, ("t3-0", "mix"): 2.0,
        ("t4-0", "mix"): None,
        ("t5-0", "mix"): None,
    }  # fmt: skip
    assert summary.labels == {"math": 2, "chat": 1, "3": 1, "none fits": 2}
    assert (summary.scored, summary.failed, summary.exit_code) == (4, 0, 0)
    facts = read_run_json(run / "scores-mix")
    assert facts["recipe"]["labels"] == summary.labels
    assert facts["recipe"]["xxh3"]


def test_a_label_can_ask_servers_beside_a_function(run: Path, tmp_path: Path) -> None:
    """Only the rollouts of the label are sent; when a server fails, their total is missing, and the others have one."""
    behaviour = Behaviour()
    with serving(app_of(behaviour)) as base:
        url = f"{base}/get_reward"
        file = recipe(tmp_path, f'math: {{numeric: 1, "{url}": 0.5, "{url}?second=1": 2}}\ndefault: {{numeric: 1}}\n')
        score(path=str(run), recipe=file)
        rows = read_table(run / "scores-mix", SCORES).to_pylist()
        totals = {row["rollout_id"]: row["value"] for row in rows if row["name"] == "mix"}
        assert {row["name"] for row in rows} == {"mix", "numeric", "remote", "remote_2"}
        assert [len(body["queries"]) for body in behaviour.requests] == [2, 2]
        assert totals["t0-0"] == 1 + 2.5 * reward_of(behaviour.requests[0]["queries"][0])
        assert totals["t4-0"] == 1.0
        behaviour.broken = True
        summary = score(path=str(run), recipe=file, retries=0, overwrite=True)
    assert (summary.failed, summary.scored, summary.exit_code) == (2, 3, 1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "one label or more"),
        ("[numeric]", "an object of settings"),
        ("math: numeric", "mix.yaml: math: got 'numeric', expected rewards with their weights"),
        ("math: {}", "mix.yaml: math: got {}, expected rewards with their weights"),
        ("math: {numerc: 1}", "did you mean 'numeric'"),
        ("math: {numeric: high}", "mix.yaml: math: numeric: got 'high', expected a finite number"),
        ("math: {numeric: .nan}", "mix.yaml: math: numeric: got nan, expected a finite number"),
        ("math: {numeric: true}", "mix.yaml: math: numeric: got True, expected a finite number"),
        ("math: {numeric=2=: 1}", "the weight is not a number"),
        ("math: {'http://me:you@h/x': 1}", "a user name or password"),
        ("math: {'regex:a': 1, 'regex:b': 1}", "two rewards are named 'regex'"),
    ],
)
def test_a_faulty_recipe_is_told_where(run: Path, tmp_path: Path, text: str, told: str) -> None:
    """Every fault names its place, and an unknown reward the nearest."""
    with pytest.raises(UsageError, match=told):
        score(path=str(run), recipe=recipe(tmp_path, text))


def test_a_recipe_is_not_named_as_one_of_its_rewards(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def mix(completion) -> float:\n    return 1.0\n")
    with pytest.raises(UsageError, match="both named 'mix'"):
        score(path=str(run), recipe=recipe(tmp_path, "default: {'mine.py:mix': 1}"))


def test_a_recipe_stands_alone(run: Path, tmp_path: Path) -> None:
    """A recipe beside another reward, or no reward at all, is refused."""
    file = recipe(tmp_path, "default: {numeric: 1}")
    for settings in ({"recipe": file, "reward": ["numeric"]}, {}):
        with pytest.raises(UsageError, match=r"reward=|a recipe alone"):
            score(path=str(run), **settings)


def test_one_reward_of_several_labels_is_one_function(tmp_path: Path) -> None:
    """A reward that several labels name with different weights is loaded once."""
    made = read_recipe(recipe(tmp_path, "a: {numeric: 2}\ndefault: {numeric: 5}"))
    assert list(made.weights()) == ["numeric"]
    assert [made.weight("numeric", task) for task in ({"label": "a"}, {"label": "b"}, {})] == [2, 5, 5]
