"""Reward functions from a user's Python file, with the signature that TRL's trainers call.

``f(prompts, completions, completion_ids, **columns) -> list[float | None]``: a column for each field of the tasks' rows.
A rollout's prompt and completion are strings when its task has a string ``prompt`` and there are no tools (so that the
answer is one message); otherwise both are lists of chat messages. That depends on the task and the environment alone,
never on what else is in the batch, so it is the same while collecting and while scoring again. None, or NaN as TRL has
it, means that the function does not apply. The function may be ``async``. How rollouts are batched depends on what
finished when, so it must score each on its own.
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
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise OutsideError("environment", f"{self.name} raised {type(error).__name__}: {error}") from error
        if len(values) != len(rollouts):
            raise OutsideError("environment", f"{self.name} gave {len(values)} values for {len(rollouts)} rollouts")
        return [self._value(value) for value in values]

    def _value(self, value: Any) -> float | None:
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise OutsideError("environment", f"{self.name} gave {value!r}, expected a number or None") from error
        return None if math.isnan(number) else number

    def _arguments(self, rollouts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        rows = [r["task"] for r in rollouts]
        columns = {key: [row.get(key) for row in rows] for key in {k: None for row in rows for k in row}}
        arguments = {
            **{key: values for key, values in columns.items() if key not in _RESERVED and key.isidentifier()},
            "prompts": [r["task"]["prompt"] if _plain(r) else r["prompt"] for r in rollouts],
            "completions": [r["text"] if _plain(r) else r["completion"] for r in rollouts],
            "completion_ids": [r["completion_ids"] for r in rollouts],
        }
        return arguments if self._open else {k: v for k, v in arguments.items() if k in self._takes}


def _plain(rollout: Mapping[str, Any]) -> bool:
    # Without tools there is one answer, or none when the time ran out; only foreign conversations have more.
    return isinstance(rollout["task"].get("prompt"), str) and not rollout["tools"] and len(rollout["completion"]) <= 1


async def _awaited(value: Any) -> Any:
    return await value
