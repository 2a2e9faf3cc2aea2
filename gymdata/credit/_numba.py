"""The recursions as compiled loops. Imports numba, so it is imported only where they are run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def _compiled(function: _Loop) -> _Loop:
    return cast(_Loop, numba.njit(cache=True, nogil=True)(function))


def _inlined(function: _Loop) -> _Loop:
    return cast(_Loop, numba.njit(inline="always")(function))


@_compiled
def gae(
    rewards: Any, values: Any, mask: Any, gamma: float, lam: float, advantages: Any, returns: Any
) -> None:  # pragma: no cover  compiled
    """Rows (B, A) from end to start; float64 carried, whatever the arrays hold."""
    rows, width = rewards.shape
    for row in range(rows):
        after, advantage = 0.0, 0.0
        for t in range(width - 1, -1, -1):
            if mask[row, t]:
                value = float(values[row, t])
                advantage = rewards[row, t] + gamma * after - value + gamma * lam * advantage
                after = value
                advantages[row, t] = advantage
                returns[row, t] = advantage + value
            else:
                advantages[row, t] = 0.0
                returns[row, t] = 0.0


@_inlined
def _step(
    rewards: Any, mask: Any, gamma: float, out: Any, row: int, t: int, after: float
) -> float:  # pragma: no cover  compiled
    if mask[row, t]:
        total: float = rewards[row, t] + gamma * after
        out[row, t] = total
        return total
    out[row, t] = 0.0
    return after


@_compiled
def returns(rewards: Any, mask: Any, gamma: float, out: Any) -> None:  # pragma: no cover  compiled
    """Rows (B, A) from end to start. Four rows at a time, because each sum depends on the previous one: independent
    rows keep the processor busy."""
    rows, width = rewards.shape
    whole = rows - rows % 4
    for row in range(0, whole, 4):
        a, b, c, d = 0.0, 0.0, 0.0, 0.0
        for t in range(width - 1, -1, -1):
            a = _step(rewards, mask, gamma, out, row, t, a)
            b = _step(rewards, mask, gamma, out, row + 1, t, b)
            c = _step(rewards, mask, gamma, out, row + 2, t, c)
            d = _step(rewards, mask, gamma, out, row + 3, t, d)
    for row in range(whole, rows):
        a = 0.0
        for t in range(width - 1, -1, -1):
            a = _step(rewards, mask, gamma, out, row, t, a)


@_compiled
def sums(values: Any, offsets: Any, steps: Any) -> Any:  # pragma: no cover  compiled
    """Ragged rows: x_t = b_t + s_t · x_{t+1}."""
    out = np.empty(len(values), np.float64)
    for row in range(len(offsets) - 1):
        total = 0.0
        for t in range(offsets[row + 1] - 1, offsets[row] - 1, -1):
            total = values[t] + steps[t] * total
            out[t] = total
    return out
