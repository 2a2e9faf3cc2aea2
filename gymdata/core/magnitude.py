"""Arithmetic on numbers whose sums, squares or differences may be beyond float64.

What always holds: dividing by the unit and multiplying by it again changes no digit (it is a power of two), and for numbers
of ordinary size the unit is 1, so nothing changes at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
#: Squares of 10²⁰ numbers up to this still have a finite sum.
_PLAIN = 1e140


def unit_of(largest: npt.ArrayLike) -> Array:
    """What to divide numbers by whose absolute values go up to ``largest`` (any shape), so that sums of their squares are
    finite: 1 up to 1e140, beyond it a power of two that leaves them below 2."""
    size = np.asarray(largest, dtype=np.float64)
    return np.where(size > _PLAIN, np.ldexp(1.0, np.frexp(size)[1] - 1), 1.0)


def scaled_mean(values: Array) -> float:
    """The mean of finite ``values`` (at least one), whatever their size."""
    unit = float(unit_of(np.abs(values).max()))
    return float((values / unit).mean()) * unit
