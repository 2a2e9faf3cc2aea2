"""Returns and generalised advantage estimates: recursions from a row's end to its start that step over masked tokens.

Beyond a row's last valid token reward and value are 0 (or the bootstrap value). With numba (the ``train`` extra) a compiled
loop runs, without it numpy, a position of all rows at a time; both give the same numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from gymdata.credit.masked import Array, Mask, as_floats, as_mask
from gymdata.errors import DataError, UsageError

Ints = npt.NDArray[np.int64]


def gae(
    rewards: npt.ArrayLike, values: npt.ArrayLike, mask: npt.ArrayLike, gamma: float, lam: float
) -> tuple[Array, Array]:
    """(advantages, returns), both (B, A): δ_t = r_t + γ·V_{t+1} − V_t, A_t = δ_t + γ·λ·A_{t+1}, returns = A + V.

    V beyond the last valid token is 0. Source: Schulman et al. 2016, "High-Dimensional Continuous Control Using GAE".
    """
    (r, v), dtype = as_floats(rewards, values)
    _same_shape(r, v)
    valid = as_mask(mask, r.shape)
    _check_discount(gamma, lam)
    bounds = _row_bounds(r)
    after = np.zeros(len(bounds) - 1)
    flat = _gae(r.ravel(), v.ravel(), valid.ravel(), bounds, _steps(gamma, r.size), lam, after, dtype)
    advantages, returns = (result.reshape(r.shape) for result in flat)
    return advantages, returns


def cumulative_returns(rewards: npt.ArrayLike, mask: npt.ArrayLike, gamma: float) -> Array:
    """Discounted sums of the rewards to come, (B, A): G_t = r_t + γ·G_{t+1}."""
    (r,), dtype = as_floats(rewards)
    valid = as_mask(mask, r.shape)
    _check_discount(gamma, 1.0)
    return _sums(r.ravel(), valid.ravel(), _row_bounds(r), _steps(gamma, r.size), dtype).reshape(r.shape)


def gae_ragged(
    rewards: npt.ArrayLike,
    values: npt.ArrayLike,
    offsets: npt.ArrayLike,
    gamma: float | npt.ArrayLike,
    lam: float,
    bootstrap: npt.ArrayLike | None = None,
) -> tuple[Array, Array]:
    """``gae`` of ragged rows; flat arrays in and out. ``bootstrap`` (rows,): the value after each row's last token.

    ``gamma`` may be one number per token: the discount between it and the next one.
    """
    (r, v), dtype = as_floats(rewards, values)
    _same_shape(r, v)
    bounds = _bounds(offsets, len(r))
    steps = _steps(gamma, len(r))
    _check_discount(1.0, lam)
    after = np.zeros(len(bounds) - 1) if bootstrap is None else np.asarray(bootstrap, dtype=np.float64)
    return _gae(r, v, np.ones(len(r), np.bool_), bounds, steps, lam, after, dtype)


def cumulative_returns_ragged(rewards: npt.ArrayLike, offsets: npt.ArrayLike, gamma: float | npt.ArrayLike) -> Array:
    """``cumulative_returns`` of ragged rows; ``gamma`` may be one number per token, as in ``gae_ragged``."""
    (r,), dtype = as_floats(rewards)
    return _sums(r, np.ones(len(r), np.bool_), _bounds(offsets, len(r)), _steps(gamma, len(r)), dtype)


def discounted_sums(values: npt.ArrayLike, offsets: npt.ArrayLike, step: float | npt.ArrayLike) -> Array:
    """x_t = b_t + s_t · x_{t+1} in each ragged row, float64; ``step`` is s, one number or one per token."""
    flat, steps = np.asarray(values, dtype=np.float64), np.asarray(step, dtype=np.float64)
    return _sums(flat, np.ones(len(flat), np.bool_), _bounds(offsets, len(flat)), steps, np.dtype(np.float64))


@lru_cache(maxsize=1)
def kernels() -> Any:
    """The compiled loops, or None without numba."""
    try:
        from gymdata.credit import _numba as compiled
    except ImportError:
        return None
    return compiled


def _gae(
    r: Array, v: Array, valid: Mask, bounds: Ints, steps: Array, lam: float, after: Array, dtype: np.dtype[Any]
) -> tuple[Array, Array]:
    """(advantages, returns) of flat rows, 0 where not ``valid``; ``after``: the value after each row's last token."""
    advantages, returns = np.zeros(len(r), dtype), np.zeros(len(r), dtype)
    if (compiled := kernels()) is not None:
        compiled.gae(r, v, valid, bounds, np.atleast_1d(steps), steps.ndim, float(lam), after, advantages, returns)
        return advantages, returns
    r, v, bounds, steps = _valid_only(r, v, valid=valid, bounds=bounds, steps=steps)
    following = np.zeros(len(v))
    following[:-1] = v[1:]
    filled = np.diff(bounds) > 0
    following[bounds[1:][filled] - 1] = after[filled]
    delta = r.astype(np.float64) + steps * following - v
    advantage = _sums_of_rows(delta, bounds, steps * lam)
    advantages[valid], returns[valid] = advantage, advantage + v
    return advantages, returns


def _sums(values: Array, valid: Mask, bounds: Ints, steps: Array, dtype: np.dtype[Any]) -> Array:
    """Discounted sums of flat rows, 0 where not ``valid``."""
    result = np.zeros(len(values), dtype)
    if (compiled := kernels()) is not None:
        compiled.sums(values, valid, bounds, np.atleast_1d(steps), steps.ndim, result)
        return result
    values, bounds, steps = _valid_only(values, valid=valid, bounds=bounds, steps=steps)
    result[valid] = _sums_of_rows(values, bounds, steps)
    return result


def _row_bounds(padded: Array) -> Ints:
    """The offsets of the rows of a padded array."""
    width = padded.shape[-1] if padded.ndim else 0
    return np.arange(padded.size // max(width, 1) + 1, dtype=np.int64) * width


def _valid_only(*arrays: Array, valid: Mask, bounds: Ints, steps: Array) -> list[Array]:
    """The ``arrays`` without masked tokens, and the bounds and steps of what is left."""
    if valid.all():
        return [*arrays, bounds, steps]
    before = np.concatenate(([0], np.cumsum(valid)))
    return [*(array[valid] for array in arrays), before[bounds], steps[valid] if steps.ndim else steps]


def _sums_of_rows(flat: Array, offsets: Ints, steps: Array) -> Array:
    """One numpy operation for one position of all rows, from their ends on, the longest rows first."""
    lengths = np.diff(offsets)
    order = np.argsort(-lengths, kind="stable")
    ends, rising = offsets[1:][order] - 1, lengths[order][::-1]
    result, carried = np.array(flat, np.float64), np.zeros(len(order))
    for back in range(int(lengths.max(initial=0))):
        n = len(order) - int(np.searchsorted(rising, back, side="right"))  # rows that are longer
        positions = ends[:n] - back
        carried[:n] = result[positions] + (steps[positions] if steps.ndim else steps) * carried[:n]
        result[positions] = carried[:n]
    return result


def _steps(gamma: float | npt.ArrayLike, n: int) -> Array:
    steps = np.asarray(gamma, dtype=np.float64)
    if steps.ndim and steps.shape != (n,):
        raise DataError(f"gamma: got shape {steps.shape}, expected one number or {(n,)}")
    if steps.size and not bool(((steps >= 0) & (steps <= 1)).all()):
        raise UsageError.bad_value("gamma", float(steps.min()), "0 to 1")
    return steps


def _bounds(offsets: npt.ArrayLike, n: int) -> Ints:
    bounds = np.ascontiguousarray(offsets, dtype=np.int64)
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != n or bool((np.diff(bounds) < 0).any()):
        raise DataError(
            f"offsets: expected to rise from 0 to {n}", hint="one more offset than rows, none below the last"
        )
    return bounds


def _same_shape(r: Array, v: Array) -> None:
    if r.shape != v.shape:
        raise DataError(f"gae: got rewards {r.shape} and values {v.shape}, expected the same shape")


def _check_discount(gamma: float, lam: float) -> None:
    for name, value in (("gamma", gamma), ("lambda", lam)):
        if not 0.0 <= value <= 1.0:
            raise UsageError.bad_value(name, value, "0 to 1")
