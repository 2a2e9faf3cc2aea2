"""User code works on copies: what it changes reaches no saved row, no sibling and no other reward."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.commands.collect.run import collect
from gymdata.rollouts.schema import SCORES
from gymdata.store import read_table
from tests.collect.fake_parts import FakeSampler, add_or_answer, parts
from tests.collect.saved_rows import rows_of

CODE = '''
def one(completion, lst):
    lst.append(1)
    if isinstance(completion, list):
        completion[-1]["content"] = "CHANGED"
    return 0.0

def batch(completions, lst, messages):
    for k in range(len(completions)):
        lst[k].append(1)
        messages[k][-1]["content"] = "CHANGED"
    return [float(len(values)) for values in lst]

def see(completion, messages, lst) -> float:
    return len(lst) + 1000.0 * ("CHANGED" in str([completion, messages]))

class Base:
    def reset(self, **task):
        self.shelf = task["lst"]
        self.shelf.append(7)

    def add(self, a: int, b: int) -> dict:
        """Add.

        Args:
            a: one
            b: other
        """
        return a + b

    def step_reward(self, message):
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"]["a"] = "CHANGED"
        message["content"] = "CHANGED"

    def get_reward(self):
        self.shelf.append(8)
        return float(len(self.shelf))

class Shop:
    def __init__(self):
        self.note = {"role": "user", "content": "again", "kept": [1]}
        self.calls = 0

    def respond(self, message):
        self.note["kept"].append(2)
        message["content"] = "CHANGED"
        self.calls += 1
        return self.note if self.calls < 3 else None
'''


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "code.py").write_text(CODE)
    return tmp_path / "code.py"


def test_a_reward_that_changes_its_arguments_changes_nothing_else(code: Path, tmp_path: Path) -> None:
    """Messages and the task are saved as they were, and the other functions and the siblings get them so, in score too."""
    rewards = [f"{code}:one", f"{code}:batch", f"{code}:see"]
    playing = parts(FakeSampler(add_or_answer), env=f"{code}:Base", rewards=rewards)
    collect(
        tasks=[{"task_id": "t", "prompt": "q", "lst": [1, 2]}], output=tmp_path / "run", num_rollouts=6, parts=playing
    )
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 6
    assert all("CHANGED" not in json.dumps(row["messages"]) for row in rows)
    assert {json.dumps(json.loads(row["task"])["lst"]) for row in rows} == {"[1, 2]"}
    assert [{part["name"]: part["value"] for part in row["rewards"]} for row in rows] == [
        {"one": 0.0, "batch": 3.0, "see": 2.0}
    ] * 6
    assert {row["turns"][-1]["reward"] for row in rows} == {4.0}  # [1, 2], 7 and 8: each rollout has its own shelf
    gymdata.score(tmp_path / "run", reward=rewards)
    scores = read_table(next((tmp_path / "run").glob("scores-*/scores.parquet")), SCORES).to_pylist()
    assert {(row["name"], row["value"]) for row in scores if row["name"] in ("one", "batch", "see")} == {
        ("one", 0.0),
        ("batch", 3.0),
        ("see", 2.0),
    }


def test_a_message_that_an_environment_keeps_is_saved_as_it_was(play: Callable[..., Any], code: Path) -> None:
    """What ``respond`` returned is saved as it was then, though the environment changes the same object later."""
    _, (row,) = play(1, env=f"{code}:Shop")
    notes = [json.loads(m["extra"])["kept"] for m in row["messages"] if m["content"] == "again"]
    assert notes == [[1, 2], [1, 2, 2]]
    assert "CHANGED" not in json.dumps(row["messages"])
