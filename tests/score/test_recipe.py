"""Recipes: the first rule that fits decides which rewards a rollout gets, and what they count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gymdata.errors import UsageError
from gymdata.rewards.recipe import read_recipe
from gymdata.rollouts.schema import SCORES
from gymdata.score.run import score
from gymdata.store import read_run_json, read_table
from tests.rollout_files import rollout, two_turns, write_run
from tests.score.reward_server import Behaviour, app_of, reward_of
from tests.servers import serving

TASKS: list[dict[str, Any]] = [
    {"category": "math", "answer": "7", "meta": {"level": 1}},
    {"category": "math", "answer": "8", "meta": {"level": 2}},
    {"category": "chat", "answer": None, "long": True},
    {"category": "chat", "answer": None, "long": 1},
    {"answer": "7"},
    {"category": "code"},
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


def test_the_first_rule_that_fits_decides(run: Path, tmp_path: Path) -> None:
    """Parts and weights are those of the rule; other rewards are not asked; where no rule fits there is no score."""
    (tmp_path / "mine.py").write_text("def polite(completions, **_):\n    return [0.25] * len(completions)\n")
    file = recipe(
        tmp_path,
        """
rules:
  - when: {category: math, meta.level: [2, 3]}
    rewards: [{name: numeric, weight: 3}]
  - when: {category: math}
    rewards:
      - numeric
      - {name: regex, argument: "^it", label: style, weight: 0.5}
  - when: {category: chat, long: true}
    rewards: [{python: "mine.py:polite", weight: 2}]
  - when: {category: null}
    rewards: [exact_match]
""",
    )
    summary = score(path=str(run), recipe=file)
    rows = read_table(run / "scores-mix", SCORES).to_pylist()
    assert {(r["rollout_id"], r["name"]): r["value"] for r in rows} == {
        ("t0-0", "numeric"): 1.0, ("t0-0", "style"): 1.0, ("t0-0", "mix"): 1.5,
        ("t1-0", "numeric"): 0.0, ("t1-0", "mix"): 0.0,
        ("t2-0", "polite"): 0.25, ("t2-0", "mix"): 0.5,
        ("t3-0", "mix"): None,
        ("t4-0", "exact_match"): 0.0, ("t4-0", "mix"): 0.0,
        ("t5-0", "mix"): None,
    }  # fmt: skip
    assert list(summary.rules.values()) == [1, 1, 1, 1, 2]
    assert summary.rules["no rule fits"] == 2
    assert (summary.scored, summary.failed, summary.exit_code) == (4, 0, 0)
    facts = read_run_json(run / "scores-mix")
    assert facts["recipe"]["rules"] == summary.rules
    assert facts["recipe"]["xxh3"]


def test_a_rule_can_ask_a_server_beside_a_function(run: Path, tmp_path: Path) -> None:
    """Only the rollouts of the rule are sent; when the server fails, their total is missing, and the others have one."""
    behaviour = Behaviour()
    with serving(app_of(behaviour)) as base:
        file = recipe(
            tmp_path,
            f"""
rules:
  - when: {{category: math}}
    rewards:
      - {{name: numeric, weight: 1}}
      - {{url: "{base}/get_reward", weight: 0.5}}
  - default: [numeric]
""",
        )
        score(path=str(run), recipe=file)
        (body,) = behaviour.requests
        totals = {
            r["rollout_id"]: r["value"]
            for r in read_table(run / "scores-mix", SCORES).to_pylist()
            if r["name"] == "mix"
        }
        assert len(body["queries"]) == 2
        assert totals["t0-0"] == 1 + 0.5 * reward_of(body["queries"][0])
        assert totals["t4-0"] == 1.0
        behaviour.always = "500"
        summary = score(path=str(run), recipe=file, retries=0, overwrite=True)
    assert (summary.failed, summary.scored, summary.exit_code) == (2, 1, 1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rulse: []", "did you mean 'rules'"),
        ("rules: []", "one rule or more"),
        ("rules: [{wen: {a: 1}, rewards: [numeric]}]", r"rules\[0\].*'wen'(.|\n)*did you mean 'when'"),
        ("rules: [{when: {a: 1}, reward: [numeric]}]", "did you mean 'rewards'"),
        ("rules: [{when: {a: 1}, rewards: [{nam: numeric}]}]", r"rules\[0\].rewards\[0\].*(.|\n)*did you mean 'name'"),
        ("rules: [{when: {a: 1}, rewards: [{name: numerc}]}]", "did you mean 'numeric'"),
        ("rules: [{when: {a: 1}, rewards: [{name: numeric, url: 'http://x'}]}]", "exactly one of"),
        ("rules: [{when: {a: 1}, rewards: [{weight: 1}]}]", "exactly one of"),
        ("rules: [{when: {a: 1}, rewards: [{name: numeric, weight: high}]}]", "weight"),
        ("rules: [{when: {a: 1}, rewards: [{name: numeric, weight: .nan}]}]", "weight"),
        ("rules: [{when: {a: 1}, rewards: [numeric, {name: numeric, weight: 2}]}]", "there twice"),
        ("rules: [{when: {}, rewards: [numeric]}]", "names no field"),
        ("rules: [{rewards: [numeric]}]", "either when and rewards, or default"),
        ("rules: [{default: [numeric], when: {a: 1}}]", "either when and rewards, or default"),
        ("rules: [{default: [numeric]}, {when: {a: 1}, rewards: [numeric]}]", "never be reached"),
        ("rules: [numeric]", "mapping"),
        ("rules: [{default: [{url: 'http://a'}, {url: 'http://b'}]}]", "two rewards are named 'remote'"),
        ("rules: [{default: [{url: 'http://a', argument: x}]}]", "only a named reward"),
        ("rules: [{default: [{name: numeric, label: mix}]}]", "both named 'mix'"),
    ],
)
def test_a_faulty_recipe_is_told_where(run: Path, tmp_path: Path, text: str, told: str) -> None:
    """Unknown keys name the nearest, and every fault names its place."""
    with pytest.raises(UsageError, match=told):
        score(path=str(run), recipe=recipe(tmp_path, text))


def test_a_recipe_stands_alone(run: Path, tmp_path: Path) -> None:
    """A recipe beside another reward, or no reward at all, is refused."""
    file = recipe(tmp_path, "rules: [{default: [numeric]}]")
    for settings in ({"recipe": file, "reward": ["numeric"]}, {}):
        with pytest.raises(UsageError, match=r"reward=|a recipe alone"):
            score(path=str(run), **settings)


def test_one_reward_of_several_rules_is_one_function(tmp_path: Path) -> None:
    """A reward that several rules name with different weights is loaded once."""
    file = recipe(
        tmp_path,
        "rules: [{when: {a: 1}, rewards: [{name: numeric, weight: 2}]}, {default: [{name: numeric, weight: 5}]}]",
    )
    made = read_recipe(file)
    (source,) = made.sources()
    assert [made.weight(source, task) for task in ({"a": 1}, {"a": 1.0}, {"a": True}, {})] == [2, 2, 5, 5]
