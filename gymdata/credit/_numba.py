"""The recursions as compiled loops. Imports numba, so it is imported only where they are run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def _compiled(function: _Loop) -> _Loop:
    return cast(_Loop, numba.njit(cache=True, nogil=True)(function))


@_compiled
def gae(
    rewards: Any,
    values: Any,
    valid: Any,
    offsets: Any,
    steps: Any,
    stride: int,
    lam: float,
    after: Any,
    advantages: Any,
    returns: Any,
) -> None:  # pragma: no cover  compiled
    """Rows from end to start, stepping over what is not valid; float64 carried, whatever the arrays hold. The step of
    token t is ``steps[t · stride]``."""
    for row in range(len(offsets) - 1):
        following, advantage = after[row], 0.0
        for t in range(offsets[row + 1] - 1, offsets[row] - 1, -1):
            if valid[t]:
                value, step = float(values[t]), steps[t * stride]
                advantage = rewards[t] + step * following - value + step * lam * advantage
                following = value
                advantages[t] = advantage
                returns[t] = advantage + value


@_compiled
def sums(
    values: Any, valid: Any, offsets: Any, steps: Any, stride: int, out: Any
) -> None:  # pragma: no cover  compiled
    """x_t = b_t + s_t · x_{t+1} in each row, as ``gae``."""
    for row in range(len(offsets) - 1):
        total = 0.0
        for t in range(offsets[row + 1] - 1, offsets[row] - 1, -1):
            if valid[t]:
                total = values[t] + steps[t * stride] * total
                out[t] = total
