"""Which rollouts a batch of rewards scores."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from gymdata.rewards.scheduler import RewardScheduler, Weighted
from tests.seeded_loop import seeded


class Slow:
    """Keeps whom it scored."""

    name, source, quick, bounded, needs = "slow", "slow", False, False, None

    def __init__(self) -> None:
        self.scored: list[str] = []

    def __call__(self, rollouts: Sequence[Any]) -> list[float]:
        self.scored += [view["text"] for view in rollouts]
        return [1.0 for _ in rollouts]


def test_a_rollout_that_was_dropped_is_not_scored() -> None:
    """Nobody waits for it. A second Ctrl-C that came together with the answer of one batch waited for the next one, of
    rollouts that were dropped already."""
    slow = Slow()

    async def main() -> None:
        scheduler = RewardScheduler([Weighted(slow)])

        def begun(name: str) -> asyncio.Task[Any]:
            return asyncio.create_task(scheduler.score({"text": name}))  # type: ignore[typeddict-item]

        a = begun("a")
        await asyncio.sleep(1e-9)
        b, c = begun("b"), begun("c")
        await asyncio.sleep(1e-9)
        b.cancel()
        assert [(await task).parts[0].value for task in (a, c)] == [1.0, 1.0]

    with seeded(0) as loop:
        loop.play(main())
    assert slow.scored == ["a", "c"]
