"""Recipes of ``gymdata score --recipe``: a YAML mapping of a task's ``label`` to its rewards, each with its weight.

    math: {numeric: 1, "http://localhost:5000/get_reward": 0.5}
    chat: {runs/reward-model: 1, "rewards.py:politeness": 0.2}
    default: {exact_match: 1}

A reward is what ``--reward`` takes, or the folder of a reward model. ``default`` is for tasks with another label or none; a
rollout without either has no score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymdata.errors import UsageError
from gymdata.rollouts.messages import TaskRow
from gymdata.settings import read_yaml
from gymdata.urls import refuse_userinfo

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Label → reward → weight."""

    labels: Mapping[str, Mapping[str, float]]

    def label_of(self, task: TaskRow) -> str | None:
        """The label whose rewards a task's rollouts get."""
        label = str(task.get("label"))
        return label if label in self.labels else DEFAULT if DEFAULT in self.labels else None

    def weights(self) -> dict[str, float]:
        """Each reward once, in order of appearance, with the weight that it has last."""
        return {reward: weight for rewards in self.labels.values() for reward, weight in rewards.items()}

    def weight(self, reward: str, task: TaskRow) -> float | None:
        """How much a reward counts for a task; None when it is not called."""
        return self.labels.get(self.label_of(task) or "", {}).get(reward)


def read_recipe(file: Path) -> Recipe:
    """The recipe in a YAML file. Paths in it are looked for beside it first. Raises UsageError naming the place."""
    labels = {
        str(label): _rewards(rewards, f"{file}: {label}", file.parent) for label, rewards in read_yaml(file).items()
    }
    if not labels:
        raise UsageError.bad_value(str(file), {}, "one label or more, each with its rewards")
    return Recipe(labels)


def _rewards(rewards: Any, where: str, beside: Path) -> dict[str, float]:
    if not isinstance(rewards, Mapping) or not rewards:
        raise UsageError.bad_value(where, rewards, "rewards with their weights, such as {numeric: 1}")
    for reward, weight in rewards.items():
        refuse_userinfo(str(reward), where)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise UsageError.bad_value(f"{where}: {reward}", weight, "a finite number")
    return {_found(str(reward), beside): float(weight) for reward, weight in rewards.items()}


def _found(reward: str, beside: Path) -> str:
    """With the path of a function's file, or of a model's folder, that is beside the recipe."""
    file, suffix, _ = reward.partition(".py:")
    return str(beside / reward) if (beside / (f"{file}.py" if suffix else reward)).exists() else reward
