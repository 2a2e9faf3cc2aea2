"""Reward functions from a user's Python file, with the signature that TRL's trainers call.

``f(prompts, completions, completion_ids, **columns) -> list[float | None]``: a column for each field of the tasks' rows.
Prompts and completions are lists of chat messages; they are strings when every task of the batch came with a string
``prompt`` and was answered by one message without tools. None, or NaN as TRL has it, means that the function does not
apply. The function may be ``async``. How rollouts are batched depends on what finished when, so it must score each on
its own.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gymdata.config.user_code import load_symbol
from gymdata.errors import OutsideError, UsageError

_RESERVED = frozenset({"prompt", "prompts", "completion", "completions", "completion_ids"})


class UserReward:
    """A ports.RewardFunction around a user's function."""

    quick = False

    def __init__(self, function: Callable[..., Any], source: str) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self.source = source
        self._function = function
        parameters = inspect.signature(function).parameters.values()
        self._open = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._takes = {p.name for p in parameters}

    @classmethod
    def load(cls, spec: str) -> UserReward:
        """From ``path.py:function``. Raises UsageError."""
        function, source = load_symbol(spec, "--reward")
        if not callable(function):
            raise UsageError.bad_value("--reward", spec, "a function")
        return cls(function, source)

    def __call__(self, rollouts: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """One value each. Raises OutsideError when the function raises or answers something else."""
        try:
            values = self._function(**self._arguments(rollouts))
            if inspect.isawaitable(values):
                values = asyncio.run(_awaited(values))
            values = list(values)
        except Exception as error:  # user code may raise anything
            raise OutsideError("environment", f"{self.name} raised {type(error).__name__}: {error}") from error
        if len(values) != len(rollouts):
            raise OutsideError("environment", f"{self.name} gave {len(values)} values for {len(rollouts)} rollouts")
        return [self._value(value) for value in values]

    def _value(self, value: Any) -> float | None:
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise OutsideError("environment", f"{self.name} gave {value!r}, expected a number or None") from error
        return None if math.isnan(number) else number

    def _arguments(self, rollouts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        rows = [r["task"] for r in rollouts]
        columns = {key: [row.get(key) for row in rows] for key in {k: None for row in rows for k in row}}
        plain = all(isinstance(r["task"].get("prompt"), str) and _one_answer(r) for r in rollouts)
        arguments = {
            **{key: values for key, values in columns.items() if key not in _RESERVED and key.isidentifier()},
            "prompts": [r["task"]["prompt"] if plain else r["prompt"] for r in rollouts],
            "completions": [r["text"] if plain else r["completion"] for r in rollouts],
            "completion_ids": [r["completion_ids"] for r in rollouts],
        }
        return arguments if self._open else {k: v for k, v in arguments.items() if k in self._takes}


def _one_answer(rollout: Mapping[str, Any]) -> bool:
    return len(rollout["completion"]) == 1 and not rollout["tools"]


async def _awaited(value: Any) -> Any:
    return await value
