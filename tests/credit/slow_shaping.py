"""Shaping, token by token, as slowly as it is defined."""

from __future__ import annotations

import math
import statistics

NAN, INF = math.nan, math.inf
#: The estimators that are defined here.
SLOW = ("grpo", "rloo", "cpgd", "dr-grpo", "reinforce-baseline", "reinforce", "gae", "reinforce++", "remax")


def slow_shape(group: list[float], kind: str) -> list[float]:
    """One group, one reward at a time, straight from the definitions."""
    known = [r for r in group if math.isfinite(r)]
    flat = len(known) < 2 or statistics.pstdev(known) <= 1e-9 * max(map(abs, known))
    result = []
    for r in group:
        if not math.isfinite(r):
            result.append(NAN)
        elif kind in ("reinforce", "gae", "reinforce++", "remax"):
            result.append(r)
        elif flat:
            result.append(0.0)
        elif kind == "rloo":
            result.append(r - (sum(known) - r) / (len(known) - 1))
        else:
            mean = sum(known) / len(known)
            scale = {"grpo": statistics.stdev(known) + 1e-9, "cpgd": statistics.pstdev(known) + 1e-6}.get(kind, 1.0)
            result.append((r - mean) / scale)
    return result
