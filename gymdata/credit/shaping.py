"""From scalar rewards of a group's rollouts to what each is worth against the others.

Invariants: missing (NaN) and infinite rewards take no part in their group's statistics and stay NaN; a group with
fewer than two known rewards, or with equal ones, gives 0; no result depends on the order of the rows.

``rewards`` is (G, n), a group per row; or (N,) with ``groups``, one label per reward; or (N,) alone, which is one
group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
import numpy.typing as npt

from gymdata.credit.adaptive import too_large
from gymdata.errors import DataError, UsageError

Array = npt.NDArray[Any]
Groups = npt.ArrayLike | None
#: A group's rewards count as equal when their standard deviation is at most this share of the largest of them.
DEGENERATE = 1e-9


@dataclass(frozen=True, slots=True)
class _Grouped:
    """Rewards as one flat array with a group code each; the statistics have one entry per group, over known rewards."""

    values: Array
    code: Array
    finite: Array
    count: Array
    total: Array
    mean: Array
    m2: Array
    largest: Array
    shape: tuple[int, ...]

    @property
    def degenerate(self) -> Array:
        std = np.sqrt(self.m2 / np.maximum(self.count, 1))
        return np.asarray((self.count < 2) | (std <= DEGENERATE * self.largest))

    def per_reward(self, result: Array) -> Array:
        """A result for every reward: 0 in degenerate groups, NaN for unknown rewards, in the caller's shape."""
        result = np.where(self.degenerate[self.code], 0.0, result)
        return np.where(self.finite, result, np.nan).reshape(self.shape)


def _grouped(rewards: npt.ArrayLike, groups: Groups) -> _Grouped:
    array = np.asarray(rewards, dtype=np.float64)
    values = array.reshape(-1)
    if groups is not None:
        labels = np.asarray(groups).reshape(-1)
        if len(labels) != len(values):
            raise DataError(f"group shaping: got {len(labels)} group labels for {len(values)} rewards")
        _, code = np.unique(labels, return_inverse=True)
    elif array.ndim == 2:
        code = np.repeat(np.arange(array.shape[0]), array.shape[1])
    else:
        code = np.zeros(len(values), np.int64)
    n = int(code.max()) + 1 if len(code) else 0
    if array.ndim == 2 and groups is None:
        n = array.shape[0]
    finite = np.isfinite(values)
    # Sums of floats depend on the order of their terms, so it is fixed first.
    order = np.lexsort((values, code))
    order = order[finite[order]]
    ordered, its = values[order], code[order]
    count = np.bincount(its, minlength=n)
    total = np.bincount(its, weights=ordered, minlength=n)
    mean = total / np.maximum(count, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        m2 = np.bincount(its, weights=np.square(ordered - mean[its]), minlength=n)
    if not bool(np.isfinite(m2).all()):
        raise too_large("rewards", float(np.abs(ordered).max()))
    largest = np.zeros(n)
    np.maximum.at(largest, its, np.abs(ordered))
    return _Grouped(values, code, finite, count, total, mean, m2, largest, array.shape)


def rloo(rewards: npt.ArrayLike, groups: Groups = None) -> Array:
    """r − (Σ − r)/(n − 1): against the mean of the others. Source: Ahmadian et al. 2024, "Back to Basics"."""
    g = _grouped(rewards, groups)
    with np.errstate(invalid="ignore"):
        others = (g.total[g.code] - g.values) / np.maximum(g.count[g.code] - 1, 1)
        return g.per_reward(g.values - others)


def reinforce_baseline(rewards: npt.ArrayLike, groups: Groups = None) -> Array:
    """r − mean. Source: Hu et al. 2025, "REINFORCE++" (its baseline form)."""
    g = _grouped(rewards, groups)
    with np.errstate(invalid="ignore"):
        return g.per_reward(g.values - g.mean[g.code])


def opo(rewards: npt.ArrayLike, groups: Groups = None, lengths: npt.ArrayLike | None = None) -> Array:
    """r − Σ n·r / Σ n with n the generated tokens of each rollout of the group: ``lengths``, in the rewards' shape; equal
    ones where not given. Source: Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline" (arXiv 2505.23585)."""
    g = _grouped(rewards, groups)
    tokens = np.ones(len(g.values)) if lengths is None else np.asarray(lengths, dtype=np.float64).reshape(-1)
    if len(tokens) != len(g.values):
        raise DataError(f"opo: got {len(tokens)} lengths for {len(g.values)} rewards")
    weight, value = np.where(g.finite, tokens, 0.0), np.where(g.finite, g.values, 0.0)
    order = np.lexsort((weight, value, g.code))
    total, weighted = (
        np.bincount(g.code[order], weights=terms[order], minlength=len(g.count)) for terms in (weight, weight * value)
    )
    baseline = np.where(total > 0, weighted / np.maximum(total, 1e-300), g.mean)
    return g.per_reward(value - baseline[g.code])


def dr_grpo(rewards: npt.ArrayLike, groups: Groups = None) -> Array:
    """r − mean, without dividing by the std. Source: Liu et al. 2025, "Understanding R1-Zero-Like Training"."""
    return reinforce_baseline(rewards, groups)


def grpo(rewards: npt.ArrayLike, groups: Groups = None) -> Array:
    """(r − mean)/(std + 1e-9), std with n − 1 below. Source: Shao et al. 2024, "DeepSeekMath"."""
    return _standard(rewards, groups, 1, 1e-9)


group_norm = grpo


def cpgd(rewards: npt.ArrayLike, groups: Groups = None) -> Array:
    """z-score within the group: (r − mean)/(population std + 1e-6). Source: Liu et al. 2025, "CPGD"."""
    return _standard(rewards, groups, 0, 1e-6)


def reinforce(rewards: npt.ArrayLike, groups: Groups = None) -> Array:  # noqa: ARG001  all shapings are called alike
    """The rewards as they are; missing and infinite ones are NaN."""
    values = np.asarray(rewards, dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def maxrl(rewards: npt.ArrayLike, groups: Groups = None) -> Array:
    """(r − mean)/mean: a success of a hard task weighs more, as in the gradient of log pass rate. A group without a
    success gives 0. Source: Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning" (arXiv 2602.02710), which has
    rewards of 0 and 1, and 1e-6 added to the mean. Raises DataError for a negative reward, which has no such mean.
    """
    g = _grouped(rewards, groups)
    low = g.values[g.finite & (g.values < 0)]
    if len(low):
        raise DataError(f"maxrl: got a reward of {low.min():g}, expected 0 or more", hint="--estimator grpo takes any")
    with np.errstate(invalid="ignore"):
        return g.per_reward((g.values - g.mean[g.code]) / (g.mean[g.code] + 1e-6))


def pass_at_k(rewards: npt.ArrayLike, groups: Groups = None, k: int = 4) -> Array:
    """The contribution of a rollout to the chance that one of k succeeds. With n rollouts, c of them right, ρ = 1 −
    C(n−c, k)/C(n, k) and σ = √(ρ(1 − ρ)), (1 − ρ)/(σ + 1e-6) for a success, (1 − ρ − C(n−c−1, k−1)/C(n−1, k−1))/(σ +
    1e-6) for a failure.

    A group of fewer than k gives 0. Source: Chen et al. 2025, "Pass@k Training" (arXiv 2508.10751, analytical derivation).
    Raises DataError for a reward that is neither 0 nor 1, UsageError for a k below 1.
    """
    if k < 1:
        raise UsageError.bad_value("k of pass@k", k, "1 or more")
    g = _grouped(rewards, groups)
    other = g.values[g.finite & (g.values != 0) & (g.values != 1)]
    if len(other):
        raise DataError(
            f"pass@k: got a reward of {other[0]:g}, expected 0 or 1",
            hint="--reward NAME uses a named reward of 0 and 1",
        )
    of: dict[tuple[int, int], tuple[float, float]] = {}
    success, failure = np.zeros(len(g.count)), np.zeros(len(g.count))
    for group, (n, c) in enumerate(zip(g.count.tolist(), g.total.astype(np.int64).tolist(), strict=True)):
        if n >= k:
            if (n, c) not in of:
                missed = comb(n - c, k) / comb(n, k)
                std = float(np.sqrt(missed * (1 - missed))) + 1e-6
                others = comb(n - c - 1, k - 1) / comb(n - 1, k - 1) if c < n else 0.0
                of[n, c] = missed / std, (missed - others) / std
            success[group], failure[group] = of[n, c]
    return g.per_reward(np.where(g.values == 1, success[g.code], failure[g.code]))


def gdpo(parts: Mapping[str, npt.ArrayLike], groups: Groups = None) -> Array:
    """Σ over parts of (r_k − mean)/(std + 1e-6) within the group, std with n − 1 below; each part (N,). A reward with a
    missing part gives NaN, and takes no part in the others' statistics either.

    Source: Liu et al. 2026, "GDPO" (arXiv 2601.05242), which then normalizes the sums over the batch (``whiten``).
    """
    table = np.stack([np.asarray(part, dtype=np.float64) for part in parts.values()])
    complete = np.isfinite(table).all(axis=0)
    total = np.where(complete, 0.0, np.nan)
    for part in table:
        total = total + _standard(np.where(complete, part, np.nan), groups)
    return np.asarray(total)


def _standard(rewards: npt.ArrayLike, groups: Groups, ddof: int = 1, floor: float = 1e-6) -> Array:
    g = _grouped(rewards, groups)
    std = np.sqrt(g.m2 / np.maximum(g.count - ddof, 1))
    with np.errstate(invalid="ignore"):
        return g.per_reward((g.values - g.mean[g.code]) / (std[g.code] + floor))


def gigpo(
    episodes: npt.ArrayLike,
    returns: npt.ArrayLike,
    owner: npt.ArrayLike,
    states: npt.ArrayLike,
    groups: npt.ArrayLike,
    step_weight: float = 1.0,
) -> Array:
    """The advantage of each turn, (T,): A_episode + step_weight · A_step, each (x − mean)/(std + 1e-6), std with n − 1.

    ``episodes`` (n,): the sum of each rollout's rewards, compared within ``groups`` (n,); ``returns`` (T,): each turn's
    discounted sum of the rewards to come, compared among the turns of the group that were taken in an equal state;
    ``owner`` (T,): the row of each turn's rollout; ``states`` (T,): a label each. A state that only one turn was taken in
    adds 0. Source: Feng et al. 2025, "Group-in-Group Policy Optimization" (arXiv 2505.10978).
    """
    rows, task = np.asarray(owner), np.unique(np.asarray(groups), return_inverse=True)[1]
    _, state = np.unique(np.asarray(states), return_inverse=True)
    task_state = task[rows].astype(np.int64) * (int(state.max(initial=0)) + 1) + state
    return np.asarray(_standard(episodes, groups)[rows] + step_weight * _standard(returns, task_state))


def degenerate(rewards: npt.ArrayLike, groups: Groups = None) -> Array:
    """Per reward, in its shape: is its group without variance (or without two known rewards)?"""
    g = _grouped(rewards, groups)
    return np.asarray(g.degenerate[g.code].reshape(g.shape))


def degenerate_groups(rewards: npt.ArrayLike, groups: Groups = None) -> Array:
    """Per group (rows of a (G, n) array; else labels in sorted order): std at most 1e-9 of the largest reward."""
    return _grouped(rewards, groups).degenerate


def clip_filter_weights(rewards: npt.ArrayLike, eps: float = 3.0, lamda: float = 1.0, groups: Groups = None) -> Array:
    """A weight for every reward, in the rewards' shape, (B, n) for (B, n): min(B/(B − |D|), eps) in informative groups,
    ``lamda`` in those of D.

    B counts the groups, D are those without variance; when all are, every weight is 1. Source: Liu et al. 2025, "CPGD"
    (clip-filter-like weights), as ``clip_filter_like_weight_func`` of LightRFT, ``lightrft/trainer/experience_maker.py``
    (which counts a standard deviation of exactly 0 only).
    """
    grouped = _grouped(rewards, groups)
    flat = grouped.degenerate
    n, dead = len(flat), int(flat.sum())
    weights = np.ones(n) if n == dead else np.where(flat, float(lamda), min(n / (n - dead), float(eps)))
    return np.asarray(weights[grouped.code].reshape(grouped.shape))


def optimal_value(rewards: npt.ArrayLike, beta: float, groups: Groups = None) -> Array:
    """V* = β·log mean exp(R/β) over the known rewards of each group, for every reward; NaN where a group has none.

    Source: the estimate of the optimal value in A*-PO (arXiv 2505.20686) and OAPL (arXiv 2602.19362). From the mean of the
    rewards (β large) to their maximum (β small).
    """
    if not beta > 0:
        raise UsageError.bad_value("beta", beta, "more than 0")
    g = _grouped(rewards, groups)
    code, finite, n = g.code, g.finite, len(g.count)
    largest = np.full(n, -np.inf)
    np.maximum.at(largest, code[finite], g.values[finite])
    terms = np.exp((g.values[finite] - largest[code[finite]]) / beta)
    sums = np.bincount(code[finite], weights=terms, minlength=n)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.where(g.count > 0, largest + beta * np.log(sums / g.count), np.nan)
    return np.asarray(values[code].reshape(g.shape))


def overlong_penalty(length: npt.ArrayLike, max_new: npt.ArrayLike, buffer: int = 1024, factor: float = 1.0) -> Array:
    """max(−factor, min(0, −(length − (max_new − buffer))/buffer · factor)), the shape of ``length``.

    ``length`` and ``max_new`` count all generated tokens of a rollout. Source: Yu et al. 2025, "DAPO" (soft overlong
    punishment). Raises UsageError when ``buffer`` is above ``max_new`` or not positive.
    """
    if buffer <= 0 or bool((np.asarray(max_new) < buffer).any()):
        raise UsageError.bad_value(
            "overlong buffer", buffer, f"1 to the largest number of new tokens ({int(np.min(max_new))})"
        )
    over = np.asarray(length, dtype=np.float64) - (np.asarray(max_new, dtype=np.float64) - buffer)
    return np.asarray(np.clip(-over / buffer * factor, -abs(factor), 0.0) + 0.0)
