"""Baselines of tokens and agents: what is expected at a position of the rollout, or of an agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gymdata.errors import DataError, UsageError

Array = npt.NDArray[Any]


def running_baseline(rewards: npt.ArrayLike, agents: npt.ArrayLike, decay: float = 0.95) -> Array:
    """r − b of its agent, (N,), in the order given: b begins at 0 and becomes decay · b + (1 − decay) · r after each reward.

    ``agents`` (N,): a label each. A missing reward gives NaN and leaves the baseline as it is. Source: Liu et al. 2025,
    "SPIRAL" (arXiv 2506.24119, role-conditioned advantage estimation), whose decay is 0.95. Raises UsageError for a decay
    that is not from 0 to below 1.
    """
    if not 0 <= decay < 1:
        raise UsageError.bad_value("decay of the baseline", decay, "0 to below 1")
    values = np.asarray(rewards, dtype=np.float64)
    labels = np.asarray(agents)
    if values.shape != labels.shape:
        raise DataError(f"running baseline: got {len(labels)} agents for {len(values)} rewards")
    result = np.full(len(values), np.nan)
    for label in np.unique(labels):
        baseline = 0.0
        for row in np.flatnonzero((labels == label) & np.isfinite(values)).tolist():
            result[row] = values[row] - baseline
            baseline = decay * baseline + (1 - decay) * values[row]
    return result


def gradient_energy(logprobs: npt.ArrayLike, sum_pi_squared: npt.ArrayLike) -> Array:
    """‖∂ log π/∂ logits‖² of each sampled token, float64: 1 − 2π + Σπ². ``sum_pi_squared``: Σπ² over the vocabulary, taken
    as π² at least. Source: Li et al. 2026, "The Optimal Token Baseline" (arXiv 2602.07078, Logit-Gradient Proxy)."""
    pi = np.exp(np.asarray(logprobs, dtype=np.float64))
    return np.asarray(1 - 2 * pi + np.maximum(np.asarray(sum_pi_squared, dtype=np.float64), np.square(pi)))


@dataclass(frozen=True, slots=True)
class TokenBaseline:
    """The optimal baseline of every position of a group's rollouts, B_t = Σ G_t·W_t / Σ W_t over the rollouts that
    reach it, with W_t the sum of ``gradient_energy`` up to t; where all W_t are 0, the mean. Rollouts are added batch
    by batch.

    Source: as ``gradient_energy``; verl's estimator ``optimal_token_baseline`` computes it so. A position that one
    rollout reaches has its own return as the baseline (verl's ``handle_zero_tail=False``).
    """

    starts: Array
    weighted: Array
    weight: Array
    total: Array
    count: Array

    @classmethod
    def of(cls, groups: npt.ArrayLike, lengths: npt.ArrayLike) -> TokenBaseline:
        """For rollouts of at most ``lengths`` (n,) tokens, in ``groups`` (n,), codes from 0."""
        code, size = np.asarray(groups, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
        longest = np.zeros(int(code.max(initial=-1)) + 1, np.int64)
        np.maximum.at(longest, code, size)
        starts = np.concatenate(([0], np.cumsum(longest)))
        return cls(starts, *(np.zeros(int(starts[-1])) for _ in range(4)))

    def add(self, returns: Array, energy: Array, offsets: Array, groups: Array) -> None:
        """Rollouts as ragged rows: ``returns`` and ``energy`` flat, ``groups`` one code a row."""
        positions = self._places(offsets, groups)
        so_far = np.cumsum(energy, dtype=np.float64)
        before = np.concatenate(([0.0], so_far))[offsets[:-1]]
        w = so_far - np.repeat(before, np.diff(offsets))
        np.add.at(self.weighted, positions, w * returns)
        np.add.at(self.weight, positions, w)
        np.add.at(self.total, positions, returns)
        np.add.at(self.count, positions, 1.0)

    def subtracted(self, returns: Array, offsets: Array, groups: Array) -> Array:
        """G_t − B_t, flat, of rows whose groups were all added."""
        positions = self._places(offsets, groups)
        alone = self.count[positions] < 2
        with np.errstate(divide="ignore", invalid="ignore"):
            best = self.weighted[positions] / self.weight[positions]
        mean = self.total[positions] / np.maximum(self.count[positions], 1)
        result = returns - np.where(self.weight[positions] > 1e-8, best, mean)
        return np.asarray(np.where(alone, 0.0, result))

    def _places(self, offsets: Array, groups: Array) -> Array:
        lengths = np.diff(offsets)
        begin = self.starts[groups] - offsets[:-1]
        return np.asarray(np.arange(int(offsets[-1])) + np.repeat(begin, lengths))


def optimal_token_baseline(
    returns: npt.ArrayLike, energy: npt.ArrayLike, offsets: npt.ArrayLike, groups: npt.ArrayLike
) -> Array:
    """The advantage of each token of ragged rows, flat: see ``TokenBaseline``. ``groups``: one label per row."""
    g, e = np.asarray(returns, dtype=np.float64), np.asarray(energy, dtype=np.float64)
    bounds = np.asarray(offsets, dtype=np.int64)
    _, code = np.unique(np.asarray(groups), return_inverse=True)
    baseline = TokenBaseline.of(code, np.diff(bounds))
    baseline.add(g, e, bounds, code)
    return baseline.subtracted(g, bounds, code)
