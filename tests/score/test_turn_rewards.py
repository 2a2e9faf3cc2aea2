"""Rewards per turn and the environment's stdout, from collecting to what is saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.collect.run import collect
from gymdata.commands.score.run import score
from gymdata.rollouts.schema import ROLLOUTS, SCORES
from gymdata.store import read_table
from tests.collect.conftest import tasks  # noqa: F401 - a fixture
from tests.collect.fake_parts import FakeSampler, add_or_answer, parts

ENVIRONMENT = '''
class Adder:
    def reset(self, **task):
        self.stdout = ""

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one number
            b: the other
        """
        self.stdout += f"{a}+{b};"
        return a + b

    def get_reward(self):
        return 10.0
'''
REWARDS = """
def steps(completion):
    turns = [m for m in completion if m["role"] == "assistant"]
    return [float(bool(m.get("tool_calls"))) for m in turns]

def sums(stdout):
    return float(stdout.count(";"))
"""


@pytest.fixture
def run(tasks: Callable[..., Path], tmp_path: Path) -> Path:
    (tmp_path / "adder.py").write_text(ENVIRONMENT)
    (tmp_path / "r.py").write_text(REWARDS)
    rewards = [f"{tmp_path}/r.py:steps=0.5", f"{tmp_path}/r.py:sums"]
    made = parts(FakeSampler(add_or_answer), env=f"{tmp_path}/adder.py:Adder", rewards=rewards)
    collect(tasks=str(tasks(3)), output=tmp_path / "run", seed=1, parts=made)
    return tmp_path / "run"


def rows(run: Path) -> list[dict[str, Any]]:
    return read_table(run, ROLLOUTS).to_pylist()


def test_a_list_per_rollout_becomes_the_rewards_of_its_turns(run: Path) -> None:
    """Two calls and an answer: each turn has weight times its number, beside the environment's 10; the part is their sum."""
    for row in rows(run):
        assert [turn["reward"] for turn in row["turns"]] == [0.5, 0.5, 10.0]
        assert {part["name"]: part["value"] for part in row["rewards"]} == {"steps": 2.0, "sums": 2.0}
        assert row["reward"] == 0.5 * 2.0 + 2.0


def test_scoring_again_gives_the_same_and_says_the_turns(run: Path, tmp_path: Path) -> None:
    """Rollouts are not touched: the sum is a score, the numbers are its detail, and stdout comes from the saved rollout."""
    before = rows(run)
    summary = score(run, reward=[f"{tmp_path}/r.py:steps", f"{tmp_path}/r.py:sums"], name="again")
    assert (summary.scored, summary.failed) == (3, 0)
    scores = read_table(run / "scores-again" / "scores.parquet", SCORES).to_pylist()
    assert {(s["name"], s["value"], s["detail"]) for s in scores} == {
        ("steps", 2.0, "per turn: 1, 1, 0"),
        ("sums", 2.0, None),
        ("again", 4.0, None),
    }
    assert rows(run) == before
