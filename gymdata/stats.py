"""Statistics over rollouts: pass@k, means and differences with intervals, proportions.

Invariants: no figure depends on the order of the rows; the same input and seed give the same interval; a value
that is missing (NaN) is left out and never counted as zero; an interval that the data cannot support is NaN, not a
made-up width. Rollouts of one task are not independent, so intervals resample tasks, not rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gymdata.errors import DataError

Array = npt.NDArray[Any]
#: Squares of 10²⁰ numbers up to this still have a finite sum.
_PLAIN = 1e140


def unit_of(largest: npt.ArrayLike) -> Array:
    """The divisor for numbers with absolute values up to ``largest`` (any shape), so that sums of their squares are
    finite: 1 up to 1e140, beyond it a power of two that leaves them below 2."""
    size = np.asarray(largest, dtype=np.float64)
    return np.where(size > _PLAIN, np.ldexp(1.0, np.frexp(size)[1] - 1), 1.0)


def known_rewards(column: Any) -> Array:
    """The rewards of an Arrow column as float64, (n,), NaN for a missing one. Only a finite number is a reward: NaN and
    infinities are faults (R502), and are treated as missing wherever rewards are counted or compared."""
    import pyarrow.compute as pc

    values = pc.fill_null(column, math.nan).to_numpy()
    return np.where(np.isfinite(values), values, np.nan)


RESAMPLES = 2_000
#: Of every interval: 95 % lie between.
_BOUNDS = (0.5 - 0.95 / 2, 0.5 + 0.95 / 2)
_DRAWS_AT_ONCE = 4_000_000
_FEW_CELLS = 4_096


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of ``k`` rollouts, drawn without replacement from ``n`` with ``c`` correct, is correct.

    Unbiased: 1 − C(n−c, k) / C(n, k), exact up to one rounding. Raises DataError unless 0 ≤ c ≤ n and 1 ≤ k ≤ n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise DataError(f"pass@k: got n={n}, c={c}, k={k}, expected 0 ≤ c ≤ n and 1 ≤ k ≤ n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


@dataclass(frozen=True, slots=True)
class AtK:
    """A mean over tasks. ``too_few`` counts the tasks with fewer than ``k`` rollouts: they are not in ``value``."""

    k: int
    value: float
    n_tasks: int
    too_few: int


def pass_at_k_by_task(tasks: Sequence[Any] | np.ndarray, correct: Sequence[bool] | np.ndarray, k: int) -> AtK:
    """pass@k averaged over tasks, each with the rollouts that it really has.

    ``tasks`` and ``correct`` have one entry per rollout. ``value`` is NaN when no task has ``k`` rollouts.
    """
    n, c = _per_task(tasks, np.asarray(correct, dtype=bool).astype(np.float64))
    enough = n >= k
    shapes, counts = np.unique(np.stack([n[enough], c[enough].astype(np.int64)]), axis=1, return_counts=True)
    total = math.fsum(pass_at_k(int(a), int(b), k) * int(m) for a, b, m in zip(*shapes, counts, strict=True))
    n_tasks = int(enough.sum())
    return AtK(k, total / n_tasks if n_tasks else math.nan, n_tasks, int((~enough).sum()))


def mean_ci(
    values: Sequence[float | None] | np.ndarray,
    groups: Sequence[Any] | np.ndarray | None = None,
) -> tuple[float, float, float]:
    """Mean of ``values`` and its percentile bootstrap interval: ``(mean, low, high)``.

    ``groups`` (one label per value, usually the task_id) are resampled; without it each value is a group. No values:
    all NaN. One group: the bounds are NaN, for one task provides no information about others. Raises DataError for an
    infinite value.
    """
    numbers = _floats(values)
    present = ~np.isnan(numbers)
    numbers = numbers[present]
    if not len(numbers):
        return math.nan, math.nan, math.nan
    unit = float(unit_of(np.abs(numbers).max()))
    numbers = numbers / unit
    if groups is None:
        counts, sums = np.ones(len(numbers), dtype=np.int64), numbers
    else:
        counts, sums = _per_task(np.asarray(groups)[present], numbers)
    mean = math.fsum(numbers) / len(numbers)
    if len(counts) < 2:
        return mean * unit, math.nan, math.nan
    # Equal groups are drawn together, which also makes the result independent of their order.
    cells, times = np.unique(np.stack([sums, counts.astype(np.float64)]), axis=1, return_counts=True)
    means = np.concatenate(list(_resampled_means(cells, times, np.random.default_rng(0))))
    low, high = (float(bound) * unit for bound in np.quantile(means, _BOUNDS))
    return mean * unit, low, high


def paired_difference_ci(
    a: Sequence[float | None] | np.ndarray, b: Sequence[float | None] | np.ndarray
) -> tuple[float, float, float]:
    """Mean of ``b − a`` and its bootstrap interval; ``a[i]`` and ``b[i]`` belong to the same task.

    So with a = before and b = after, a positive result is an improvement. A task missing on either side is left out.
    """
    before, after = _floats(a), _floats(b)
    if before.shape != after.shape:
        raise DataError(f"paired difference: got {len(before)} and {len(after)} values, expected the same tasks")
    return mean_ci(after - before)


def two_way_ci(values: np.ndarray) -> tuple[float, float, float]:
    """Mean of ``values``, of shape (seeds, tasks), and its percentile bootstrap interval, ``(mean, low, high)``: seeds and
    tasks are both resampled (Owen, The pigeonhole bootstrap, 2007). With one seed, over tasks; all NaN without values, and
    the bounds with fewer than two tasks."""
    seeds, tasks = values.shape
    if not values.size:
        return math.nan, math.nan, math.nan
    mean = math.fsum(values.ravel()) / values.size
    if tasks < 2:
        return mean, math.nan, math.nan
    rng = np.random.default_rng(0)
    # In an order of their own, so that theirs does not matter; tasks with the same results are drawn together.
    cells, times = np.unique(values[np.lexsort(np.sort(values, axis=1).T)], axis=1, return_counts=True)
    of_seeds = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=RESAMPLES) / seeds
    of_tasks = rng.multinomial(tasks, times / tasks, size=RESAMPLES) / tasks
    means = np.einsum("rs,sc,rc->r", of_seeds, cells, of_tasks, optimize=True)
    low, high = (float(bound) for bound in np.quantile(means, _BOUNDS))
    return mean, low, high


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Wilson score interval of a proportion: ``(low, high)`` within [0, 1]; NaN when ``n`` is 0."""
    if not 0 <= successes <= n:
        raise DataError(f"Wilson interval: got {successes} of {n}, expected 0 ≤ successes ≤ n")
    if n == 0:
        return math.nan, math.nan
    from statistics import NormalDist

    z = NormalDist().inv_cdf(_BOUNDS[1])
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At 0 and n the bound is the end itself; rounding must not leave 1e-17 there.
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == n else centre + half)


def _floats(values: Sequence[float | None] | np.ndarray) -> np.ndarray:
    """Float64 with NaN for missing ones."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        numbers = values.astype(np.float64)
    else:
        numbers = np.array([math.nan if v is None else v for v in values], dtype=np.float64)
    if np.isinf(numbers).any():
        where = int(np.flatnonzero(np.isinf(numbers))[0])
        raise DataError(f"value {where}: got {numbers[where]}, expected a finite number or none")
    return numbers


def _per_task(tasks: Sequence[Any] | np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count and sum of ``values`` by task, in the order of the task labels."""
    labels = np.asarray(tasks)
    if len(labels) != len(values):
        raise DataError(f"got {len(labels)} group labels for {len(values)} values")
    _, codes = np.unique(labels, return_inverse=True)
    # Float sums depend on the order of their terms, so it is fixed first.
    order = np.lexsort((values, codes))
    size = int(codes.max()) + 1 if len(codes) else 0
    counts = np.bincount(codes, minlength=size).astype(np.int64)
    return counts, np.bincount(codes[order], weights=values[order], minlength=size)


def _resampled_means(cells: np.ndarray, times: np.ndarray, rng: np.random.Generator) -> Iterator[np.ndarray]:
    n = int(times.sum())
    if cells.shape[1] <= _FEW_CELLS:
        drawn = rng.multinomial(n, times / n, size=RESAMPLES) @ cells.T
        yield drawn[:, 0] / drawn[:, 1]
        return
    flat = np.repeat(cells, times, axis=1)
    # With very many groups fewer resamples give the same bounds within noise; memory stays bounded either way.
    left = max(400, min(RESAMPLES, 40_000_000 // n))
    while left > 0:
        rows = min(left, max(1, _DRAWS_AT_ONCE // n))
        picked = rng.integers(n, size=(rows, n))
        yield flat[0][picked].sum(axis=1) / flat[1][picked].sum(axis=1)
        left -= rows
