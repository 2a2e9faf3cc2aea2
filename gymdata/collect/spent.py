"""Where the time of a run went, measured around every wait of its rollouts.

Invariants: times are those that rollouts waited, so several at once add up; a run that is too short to tell says nothing.
"""

from __future__ import annotations

import time
from typing import Literal

What = Literal["engine", "environment", "reward"]
#: Shorter runs are mostly start and end.
_SHORTEST_S = 5.0
#: The part of all waiting that makes something the one that slowed the run down.
_MOSTLY = 0.5
#: Fewer requests in flight than this part of what the engine takes at once leave it idle.
_FEW = 0.5


class _Wait:
    """One wait. A plain class, because each rollout has several: a generator takes four times as long."""

    __slots__ = ("_began", "_n", "_seconds", "_what")

    def __init__(self, seconds: dict[What, float], what: What, n: int) -> None:
        self._seconds, self._what, self._n = seconds, what, n

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._what] += self._n * (time.monotonic() - self._began)


class Spent:
    """Seconds that rollouts waited, by what for. A request for n members of a group counts n times."""

    def __init__(self) -> None:
        self.seconds: dict[What, float] = dict.fromkeys(("engine", "environment", "reward"), 0.0)

    def on(self, what: What, n: int = 1) -> _Wait:
        """What is awaited inside is counted, however it ends."""
        return _Wait(self.seconds, what, n)

    def slowed_by(self, wall: float, capacity: int, concurrency: int) -> str | None:
        """What slowed a run of ``wall`` seconds down, in a line; None when it was too short. ``capacity``: requests that
        the engine takes at once; ``concurrency``: rollouts in flight."""
        total = sum(self.seconds.values())
        if wall < _SHORTEST_S or not total:
            return None
        for what, name in (("environment", "environment"), ("reward", "rewards")):
            if self.seconds[what] >= _MOSTLY * total:  # type: ignore[index]  # its own keys
                share = self.seconds[what] / total  # type: ignore[index]  # its own keys
                return f"slow {name}: {share:.0%} of the time that rollouts waited"
        flying = self.seconds["engine"] / wall
        if flying < _FEW * capacity:
            more = f"raise -c above {concurrency:,}" if concurrency < capacity else (
                "more tasks or rollouts per task fill it"
            )  # fmt: skip
            return f"few requests in flight: {flying:,.0f} on average, the engine takes {capacity:,}; {more}"
        return f"engine busy: {flying:,.0f} requests in flight on average, it takes {capacity:,} at once"
