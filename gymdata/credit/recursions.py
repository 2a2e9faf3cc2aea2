"""Returns and generalised advantage estimates: recursions from a row's end to its start that step over masked tokens.

Invariants: "the next token" means the next valid one of the row; beyond the last one reward and value are 0 (or the
bootstrap value where one is given). With numba (the ``train`` extra) a compiled loop runs; without it, numpy
over blocks; both give the same numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from gymdata.credit.masked import Array, as_floats, as_mask
from gymdata.errors import DataError, UsageError

#: Floats that the numpy form works on at a time: a block stays in the cache.
_BLOCK = 1 << 20
_MAX_ROWS = 256
#: Rows and columns of a padded array that are transposed at a time.
_ROWS, _COLUMNS = 1024, 32


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
    advantages, returns = np.empty(r.shape, dtype), np.empty(r.shape, dtype)
    width = r.shape[-1] if r.ndim else 0
    if not r.size:
        return advantages, returns
    run = _gae_columns if (compiled := kernels()) is None else compiled.gae
    r, v, valid = (np.ascontiguousarray(a).reshape(-1, width) for a in (r, v, valid))
    run(r, v, valid, float(gamma), float(lam), advantages.reshape(-1, width), returns.reshape(-1, width))
    return advantages, returns


def cumulative_returns(rewards: npt.ArrayLike, mask: npt.ArrayLike, gamma: float) -> Array:
    """Discounted sums of the rewards to come, (B, A): G_t = r_t + γ·G_{t+1}."""
    (r,), dtype = as_floats(rewards)
    valid = as_mask(mask, r.shape)
    _check_discount(gamma, 1.0)
    result = np.empty(r.shape, dtype)
    if not r.size:
        return result
    width = r.shape[-1]
    rows, m, out = np.ascontiguousarray(r).reshape(-1, width), valid.reshape(-1, width), result.reshape(-1, width)
    compiled = kernels()
    if compiled is not None:
        compiled.returns(rows, np.ascontiguousarray(m), float(gamma), out)
    else:
        _returns_columns(rows, m, float(gamma), out)
    return result


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
    step = _steps(gamma, len(r))
    following = np.zeros(len(v), np.float64)
    following[:-1] = v[1:]
    ends, filled = bounds[1:] - 1, np.diff(bounds) > 0
    after = np.zeros(len(ends)) if bootstrap is None else np.asarray(bootstrap, dtype=np.float64)
    following[ends[filled]] = after[filled]
    delta = r.astype(np.float64) + step * following - v
    _check_discount(1.0, lam)
    advantages = discounted_sums(delta, bounds, step * lam)
    return advantages.astype(dtype, copy=False), (advantages + v).astype(dtype, copy=False)


def cumulative_returns_ragged(rewards: npt.ArrayLike, offsets: npt.ArrayLike, gamma: float | npt.ArrayLike) -> Array:
    """``cumulative_returns`` of ragged rows; ``gamma`` may be one number per token, as in ``gae_ragged``."""
    (r,), dtype = as_floats(rewards)
    return discounted_sums(r, _bounds(offsets, len(r)), _steps(gamma, len(r))).astype(dtype, copy=False)


def discounted_sums(values: npt.ArrayLike, offsets: npt.ArrayLike, step: float | npt.ArrayLike) -> Array:
    """x_t = b_t + s_t · x_{t+1} in each ragged row, float64; ``step`` is s, one number or one per token."""
    flat = np.asarray(values, dtype=np.float64)
    bounds = _bounds(offsets, len(flat))
    compiled = kernels()
    if compiled is not None:
        steps = np.broadcast_to(np.asarray(step, dtype=np.float64), flat.shape)
        return np.asarray(compiled.sums(flat, bounds, steps))
    return _sums(flat, bounds, step)


@lru_cache(maxsize=1)
def kernels() -> Any:
    """The compiled loops, or None without numba."""
    try:
        from gymdata.credit import _numba as compiled
    except ImportError:
        return None
    return compiled


def _gae_columns(r: Array, v: Array, m: Array, gamma: float, lam: float, advantages: Array, returns: Array) -> None:
    for rows in _row_blocks(len(r)):
        after, advantage = np.zeros(len(r[rows]), np.int64), np.zeros(len(r[rows]))
        for part in _column_blocks(r.shape[1]):
            keep = _keep(m[rows, part])
            value, delta = _turned(v[rows, part], keep), _turned(r[rows, part], keep)
            valid = np.ascontiguousarray(keep.T)
            masked, following = ~valid, np.empty_like(valid)
            for t in range(len(valid) - 1, -1, -1):
                following[t] = after
                after = (after & masked[t]) | value.view(np.int64)[t]
            delta += gamma * following.view(np.float64)
            delta -= value
            delta.view(np.int64)[...] &= valid
            advantage = _carry(delta, _steps_over(valid, gamma * lam), advantage)
            advantages[rows, part] = _turned(delta, valid)
            delta += value
            returns[rows, part] = _turned(delta, valid)


def _returns_columns(r: Array, m: Array, gamma: float, out: Array) -> None:
    for rows in _row_blocks(len(r)):
        total = np.zeros(len(r[rows]))
        for part in _column_blocks(r.shape[1]):
            keep = _keep(m[rows, part])
            valid = np.ascontiguousarray(keep.T)
            table = _turned(r[rows, part], keep)
            total = _carry(table, _steps_over(valid, gamma), total)
            out[rows, part] = _turned(table, valid)


def _keep(mask: Array) -> npt.NDArray[np.int64]:
    """All bits where a number is valid, none where it is not: ``bits & keep`` wipes also what times 0 is no 0."""
    return np.negative(mask.astype(np.int64))


def _turned(values: Array, keep: npt.NDArray[np.int64]) -> Array:
    """``values`` transposed, so that a position of all rows is contiguous: float64, 0 where masked."""
    whole = values.astype(np.float64, order="C")
    bits = whole.view(np.int64)
    np.bitwise_and(bits, keep, out=bits)
    return np.ascontiguousarray(whole.T)


def _steps_over(valid: npt.NDArray[np.int64], step: float) -> Array:
    """``step`` where valid and 1.0 where not, where a sum passes through unchanged."""
    one, other = np.float64(1.0).view(np.int64), np.float64(step).view(np.int64)
    return ((valid & (one ^ other)) ^ one).view(np.float64)


def _carry(table: Array, steps: Array, total: Array) -> Array:
    """x_t = b_t + s_t · x_{t+1} in place, position by position from the last; ``total`` is x after the last one. Returns
    the first one's."""
    held = np.empty(len(total))
    for t in range(len(table) - 1, -1, -1):
        total = np.add(table[t], np.multiply(total, steps[t], out=held), out=table[t])
    return total.copy()


def _row_blocks(rows: int) -> list[slice]:
    return [slice(start, start + _ROWS) for start in range(0, rows, _ROWS)]


def _column_blocks(width: int) -> list[slice]:
    """From the last to the first."""
    return [slice(max(0, stop - _COLUMNS), stop) for stop in range(width, 0, -_COLUMNS)]


def _sums(flat: Array, offsets: npt.NDArray[np.int64], step: float | npt.ArrayLike) -> Array:
    """Rows of similar length side by side, so that one numpy operation handles one position of many rows."""
    lengths = np.diff(offsets)
    result = np.empty(len(flat), np.float64)
    steps = np.asarray(step, dtype=np.float64)
    order = np.argsort(-lengths, kind="stable")
    first = 0
    while first < len(order):
        width = int(lengths[order[first]])
        count = max(1, min(4 * _MAX_ROWS, _BLOCK // max(width, 1)))
        rows = order[first : first + count]
        first += count
        if not width:
            break
        # The row stride must not be a power of two, or rows would compete for the same cache sets.
        table = np.zeros((len(rows), width + 8 + (width % 16 == 8) * 8))
        here = np.arange(width) < lengths[rows][:, None]
        whole = len(rows) == len(lengths) and bool((np.diff(rows) == 1).all())
        source: Any = slice(None) if whole else (np.arange(width) + offsets[rows][:, None])[here]
        grid = table[:, :width]
        grid[here] = flat[source]
        held = np.empty(len(rows))
        factors = None
        if steps.ndim:
            factors = np.zeros_like(table)
            factors[:, :width][here] = steps[source]
        for t in range(width - 2, -1, -1):
            np.multiply(table[:, t + 1], steps if factors is None else factors[:, t], out=held)
            column = table[:, t]
            np.add(column, held, out=column)
        result[source] = grid[here]
    return result


def _steps(gamma: float | npt.ArrayLike, n: int) -> Array:
    steps = np.asarray(gamma, dtype=np.float64)
    if steps.ndim and steps.shape != (n,):
        raise DataError(f"gamma: got shape {steps.shape}, expected one number or {(n,)}")
    if steps.size and not bool(((steps >= 0) & (steps <= 1)).all()):
        raise UsageError.bad_value("gamma", float(steps.min()), "0 to 1")
    return steps


def _bounds(offsets: npt.ArrayLike, n: int) -> npt.NDArray[np.int64]:
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
