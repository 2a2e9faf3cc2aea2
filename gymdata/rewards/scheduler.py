"""How rollouts get rewards, while they are collected and afterwards.

Invariants: each named part is kept; a function that fails leaves its part null and says why, and never turns into
a number; the total is Σ weight·value over the parts that apply (a function that answers None says that it does not
apply), and null when none does or any failed. Functions score each rollout on its own: how they are batched must not
matter, because it depends on what finished when.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gymdata.errors import DataError, OutsideError, RewardError
from gymdata.rewards.port import RewardFunction, RewardPart, Value, View

_BATCH = 64


@dataclass(frozen=True, slots=True)
class Weighted:
    """A reward function and its weight in the total.

    ``choose`` gives the weight for each rollout instead, or None where the function is not called at all.
    """

    function: RewardFunction
    weight: float = 1.0
    choose: Callable[[View], float | None] | None = None

    def weight_for(self, view: View) -> float | None:
        return self.weight if self.choose is None else self.choose(view)


@dataclass(slots=True)
class Scored:
    """The parts of one rollout, and the functions that failed on it, by name. ``fatal``: why no value of one can be used."""

    parts: list[RewardPart] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    fatal: OutsideError | None = None

    def add(self, name: str, weight: float, value: Value) -> None:
        """What a function gave."""
        if isinstance(value, OutsideError):
            self.faults[name] = value.message
            self.parts.append(RewardPart(name, None, weight, value.message))
            self.fatal = value if value.fatal else self.fatal
        elif isinstance(value, tuple):
            scored = [step for step in value if step is not None]
            steps = ", ".join("none" if step is None else f"{step:g}" for step in value)
            sum_ = math.fsum(scored) if scored else None
            self.parts.append(RewardPart(name, sum_, weight, f"per turn: {steps}", value))
        else:
            self.parts.append(RewardPart(name, value, weight))


def total(parts: Sequence[RewardPart]) -> float | None:
    """Σ weight·value over the parts with a value; None without any, or when the sum is beyond float64."""
    values = [part.weight * part.value for part in parts if part.value is not None]
    result = sum(values) if values else None
    return result if result is not None and math.isfinite(result) else None


def step_rewards(parts: Sequence[RewardPart], turns: int) -> list[float | None]:
    """Each turn's Σ weight·step over the parts that score turns; None where none of them scores it."""
    totals: list[float | None] = [None] * turns
    for part in parts:
        for turn, step in enumerate(part.steps or ()):
            if step is not None:
                totals[turn] = (totals[turn] or 0.0) + part.weight * step
    return totals


def score_batch(rewards: Sequence[Weighted], views: Sequence[View]) -> list[Scored]:
    """Score finished rollouts."""
    result = [Scored() for _ in views]
    for reward in rewards:
        weights = [reward.weight_for(view) for view in views]
        chosen = [(row, weight) for row, weight in enumerate(weights) if weight is not None]
        values = reward.function([views[row] for row, _ in chosen]) if chosen else ()
        for (row, weight), value in zip(chosen, values, strict=True):
            result[row].add(reward.function.name, weight, value)
    return result


@dataclass(slots=True)
class RewardScheduler:
    """Scores rollouts as they finish. Quick functions run at once; the others in a thread, on whatever has gathered.

    A batch that takes longer than ``timeout_s`` fails for all of its members; its thread is left behind. Functions that
    end by themselves (``bounded``) are not cut off. ``in_thread`` runs a function elsewhere and awaits its result.
    """

    rewards: Sequence[Weighted]
    in_thread: Callable[..., Awaitable[Any]] = asyncio.to_thread
    timeout_s: float | None = 300.0
    _waiting: list[tuple[View, asyncio.Future[Scored]]] = field(default_factory=list)
    _busy: asyncio.Task[None] | None = None

    async def score(self, view: View | DataError) -> Scored:
        """``view``: of a rollout, or why it cannot be read: then all functions failed on it, with that as the reason."""
        if isinstance(view, DataError):
            return self._failed(view.message, [(reward, reward.weight) for reward in self.rewards])
        if all(reward.function.quick for reward in self.rewards):
            return score_batch(self.rewards, [view])[0]
        future: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
        self._waiting.append((view, future))
        if self._busy is None or self._busy.done():
            self._busy = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        bounded = all(reward.function.bounded for reward in self.rewards)
        limit = None if bounded else self.timeout_s
        # Of rollouts that are not dropped. In Python 3.11 a cancellation that comes with an answer does not end wait_for.
        while waiting := [(view, future) for view, future in self._waiting if not future.done()]:
            batch, self._waiting = waiting[:_BATCH], waiting[_BATCH:]
            views = [view for view, _ in batch]
            try:
                results = await asyncio.wait_for(self.in_thread(score_batch, self.rewards, views), limit)
            except TimeoutError:
                late = RewardError(f"no answer within {self.timeout_s:g} s").message
                results = [self._failed(late, [(r, r.weight_for(view)) for r in self.rewards]) for view in views]
            except BaseException as error:  # noqa: BLE001 - a defect or cancellation: waiting callers must get it
                for _, future in batch + self._waiting:
                    if not future.done():
                        future.set_exception(error)
                self._waiting.clear()
                return
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)

    def _failed(self, fault: str, weights: Sequence[tuple[Weighted, float | None]]) -> Scored:
        """Every function that a rollout was to be scored by failed on it."""
        named = [(reward.function.name, weight) for reward, weight in weights if weight is not None]
        parts = [RewardPart(name, None, weight, fault) for name, weight in named]
        return Scored(parts, {name: fault for name, _ in named})


@dataclass(slots=True)
class PartTally:
    """Counts of one reward function: rollouts with a value, those it does not apply to, and those it failed on."""

    name: str
    needs: str | None = None
    scored: int = 0
    does_not_apply: int = 0
    failed: int = 0
    first_error: str | None = None

    def add(self, value: float | None, fault: str | None) -> None:
        """Count one rollout's part; ``fault``: why it failed."""
        if fault is not None:
            self.failed += 1
            self.first_error = self.first_error or fault.removeprefix("reward: ")
        elif value is None:
            self.does_not_apply += 1
        else:
            self.scored += 1

    def lines(self) -> list[tuple[str, object]]:
        """Names and values for people; nothing where every rollout has a value."""
        rows: list[tuple[str, object]] = []
        if self.failed:
            rows.append((f"{self.name} failed", f"{self.failed:,}; first: {self.first_error}"))
        if self.does_not_apply:
            needs = f"; it needs {self.needs}" if self.needs else ""
            rows.append((f"{self.name} does not apply", f"{self.does_not_apply:,}{needs}"))
        return rows
