"""How rollouts get rewards, while they are collected and afterwards.

What always holds: each named part is kept; a function that fails leaves its part null and says why, and never turns into
a number; the total is Σ weight·value over the parts that apply (a function that answers None says that it does not
apply), and null when none does or any failed. Functions score each rollout on its own: how they are batched must not
matter, because it depends on what finished when.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gymdata.errors import OutsideError
from gymdata.ports import RewardFunction, RewardPart

View = Mapping[str, Any]
_BATCH = 64
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Weighted:
    """A reward function and its weight in the total."""

    function: RewardFunction
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Scored:
    """The parts of one rollout, and the functions that failed on it, by name."""

    parts: list[RewardPart]
    faults: dict[str, str]


def total(parts: Sequence[RewardPart]) -> float | None:
    """Σ weight·value over the parts with a value; None when there is none."""
    values = [part.weight * part.value for part in parts if part.value is not None]
    return sum(values) if values else None


def score_batch(rewards: Sequence[Weighted], views: Sequence[View]) -> list[Scored]:
    """Score finished rollouts. A batch that makes a function fail is scored one by one, three tries each."""
    columns = [_values(reward.function, views) for reward in rewards]
    result = []
    for row in range(len(views)):
        parts, faults = [], {}
        for reward, column in zip(rewards, columns, strict=True):
            value = column[row]
            name = reward.function.name
            if isinstance(value, OutsideError):
                faults[name] = value.message
                parts.append(RewardPart(name, None, reward.weight, value.message))
            else:
                parts.append(RewardPart(name, value, reward.weight))
        result.append(Scored(parts, faults))
    return result


def _values(function: RewardFunction, views: Sequence[View]) -> list[float | OutsideError | None]:
    try:
        return list(function(views))
    except OutsideError as error:
        if len(views) > 1:
            return [value for view in views for value in _values(function, [view])]
        last = error
    for _ in range(_TRIES - 1):
        try:
            return list(function(views))
        except OutsideError as error:
            last = error
    return [last]


def view_of(
    *,
    messages: Sequence[Mapping[str, Any]],
    produced_by: Sequence[int | None],
    task: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None,
    turns: Sequence[Mapping[str, Any]],
    status: str,
) -> dict[str, Any]:
    """What a reward function sees of a rollout.

    ``prompt``: messages before the first generated one; ``completion``: that one and all after it; ``text``: content of
    the last generated message; ``completion_ids``: every id after the first prompt, in order.
    """
    first = next((i for i, turn in enumerate(produced_by) if turn is not None), len(messages))
    generated = [m for m, turn in zip(messages, produced_by, strict=True) if turn is not None]
    return {
        "messages": list(messages),
        "prompt": list(messages[:first]),
        "completion": list(messages[first:]),
        "text": (generated[-1].get("content") or "") if generated else "",
        "completion_ids": _after_first_prompt(turns),
        "task": task,
        "tools": tools,
        "status": status,
    }


def _after_first_prompt(turns: Sequence[Mapping[str, Any]]) -> list[int]:
    ids: list[int] = []
    for k, turn in enumerate(turns):
        if k:
            ids.extend(int(i) for i in turn["prompt_delta_ids"])
        generated = turn["generation_token_ids"]
        ids.extend(generated.tolist() if hasattr(generated, "tolist") else generated)
    return ids


@dataclass(slots=True)
class RewardDesk:
    """Scores rollouts as they finish. Quick functions run at once; the others in a thread, on whatever has gathered.

    A batch that takes longer than ``timeout_s`` fails for all of its members; its thread is left behind. ``in_thread``
    runs a function elsewhere and awaits its result.
    """

    rewards: Sequence[Weighted]
    in_thread: Callable[..., Awaitable[Any]] = asyncio.to_thread
    timeout_s: float | None = 300.0
    _waiting: list[tuple[View, asyncio.Future[Scored]]] = field(default_factory=list)
    _busy: asyncio.Task[None] | None = None

    async def score(self, view: View) -> Scored:
        if all(getattr(reward.function, "quick", False) for reward in self.rewards):
            return score_batch(self.rewards, [view])[0]
        future: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
        self._waiting.append((view, future))
        if self._busy is None or self._busy.done():
            self._busy = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
            views = [view for view, _ in batch]
            try:
                results = await asyncio.wait_for(self.in_thread(score_batch, self.rewards, views), self.timeout_s)
            except TimeoutError:
                fault = f"no answer within {self.timeout_s:g} s"
                names = [reward.function.name for reward in self.rewards]
                parts = [RewardPart(name, None, detail=fault) for name in names]
                results = [Scored(parts, dict.fromkeys(names, fault)) for _ in batch]
            except BaseException as error:
                # A defect, or cancellation: those who wait must hear of it.
                for _, future in batch + self._waiting:
                    if not future.done():
                        future.set_exception(error)
                self._waiting.clear()
                return
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)
