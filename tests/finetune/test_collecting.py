"""The shipped trajectory builder, with gymdata's commands at the port."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gymdata.errors import RewardError
from gymdata.finetune.jobs import CollectingBuilder
from gymdata.finetune.port import CollectOrder
from gymdata.finetune.settings import CollectBuilder
from gymdata.progress import Progress
from tests.finetune.parts import Watched


class Collected:
    """A ports.Commands whose collect printed this summary."""

    def __init__(self, summary: Mapping[str, Any]) -> None:
        self.summary = summary

    def run(self, words: Sequence[str], log: Path, progress: Progress) -> Mapping[str, Any]:
        return self.summary


def test_rollouts_that_a_reward_failed_on_are_the_rewards_fault(tmp_path: Path) -> None:
    """The first reason of the function stands in the error, which is neither the environment's nor a defect."""
    part = {"failed": 8, "first_error": "f returned 1 value for 8 rollouts, expected one for each (r.py:1)"}
    told = {"reward_faults": 8, "parts": {"f": part, "g": {"failed": 0, "first_error": None}}}
    builder = CollectingBuilder(CollectBuilder(), Collected({**told, "tasks": 2, "rollouts": 8, "exit_code": 1}), {})
    order = CollectOrder("tasks.jsonl", tmp_path / "epoch-001" / "rollouts", None, 0, "run", 1)
    with pytest.raises(RewardError) as caught:
        builder.collect(order, Watched())
    assert caught.value.exit_code == 3
    assert caught.value.message.startswith("reward: 8 rollouts could not be scored; first: f returned 1 value")
