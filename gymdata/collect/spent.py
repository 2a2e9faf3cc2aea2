"""Where the time of a run was spent, measured around every wait of its rollouts.

Invariants: times are summed over rollouts, so concurrent waits add up; nothing is reported for a run that is too short.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Literal

Cause = Literal["engine", "environment", "reward"]
#: What a run can be slow for besides the engine, as a message names it.
_SLOW: dict[Cause, str] = {"environment": "environment", "reward": "rewards"}
#: Shorter runs are mostly start and end.
SHORTEST_S = 5.0
#: Share of the waiting time from which on something counts as what slowed the run down.
_MOSTLY = 0.5
#: Below this share of the engine's capacity in flight, the engine was idle.
_FEW = 0.5


def crowded(facts: Mapping[str, Any], rollouts: int, per_task: int, prompt: int, max_tokens: int | None) -> str | None:
    """One line where the KV cache of an engine with these ``facts`` cannot hold the requests that it would run at once:
    ``rollouts`` are in flight, ``per_task`` of them share a prompt of ``prompt`` tokens, and each has up to ``max_tokens``.
    None where it can, or where one of them is not known."""
    room, at_once = facts.get("kv_cache_tokens"), min(rollouts, facts.get("max_num_seqs") or rollouts)
    if not room or not max_tokens:
        return None
    prompts = math.ceil(at_once / per_task) if facts.get("prefix_caching") else at_once
    if (needed := prompts * prompt + at_once * max_tokens) <= room:
        return None
    more = "VLLM_CPU_KVCACHE_SPACE (GiB)" if facts["device"] == "cpu" else "--set engine.gpu_memory_utilization"
    return (
        f"the KV cache holds {room:,} tokens, and {at_once:,} requests at once may need {needed:,}: some will wait "
        f"(raise {more}, or lower -c)"
    )


class _Wait:
    """One wait. Not a generator-based context manager, which takes four times as long: each rollout waits several
    times."""

    __slots__ = ("_began", "_cause", "_n", "_seconds")

    def __init__(self, seconds: dict[Cause, float], cause: Cause, n: int) -> None:
        self._seconds, self._cause, self._n = seconds, cause, n

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._cause] += self._n * (time.monotonic() - self._began)


class Spent:
    """Seconds that rollouts waited, by cause. A request for n members of a group counts n times."""

    def __init__(self) -> None:
        self.seconds: dict[Cause, float] = dict.fromkeys(("engine", "environment", "reward"), 0.0)

    def on(self, cause: Cause, n: int = 1) -> _Wait:
        """A context manager that counts the time spent inside, also when it raises."""
        return _Wait(self.seconds, cause, n)

    def slowed_by(self, wall: float, capacity: int, concurrency: int) -> str | None:
        """One line on what slowed a run of ``wall`` seconds down; None when it was too short, or the engine full.
        ``capacity``: requests that the engine takes at once; ``concurrency``: rollouts in flight."""
        total = sum(self.seconds.values())
        if wall < SHORTEST_S or not total:
            return None
        for cause, name in _SLOW.items():
            share = self.seconds[cause] / total
            if share >= _MOSTLY:
                return f"slow {name}: {share:.0%} of the time that rollouts waited"
        flying = self.seconds["engine"] / wall
        if concurrency >= capacity and flying >= _FEW * capacity:
            return None
        more = (
            f"raise -c above {concurrency:,}" if concurrency < capacity else "more tasks or rollouts per task fill it"
        )
        return f"few requests in flight: {flying:,.0f} on average, the engine takes {capacity:,}; {more}"
