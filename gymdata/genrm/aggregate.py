"""Judged comparisons to one reward per response, over many groups at once.

Invariants: a response without a valid comparison has no reward (NaN) unless a default is given; sums are exact in fixed
point (2⁻⁴⁰), so neither the order of the rows nor the positions change a reward; bonuses and weights act within a
group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from gymdata.errors import UsageError
from gymdata.genrm.matches import Bools, Floats, Ints, Matches
from gymdata.genrm.ranking import bradley_terry, win_rate

Aggregator = Literal["simple_tiebreaker", "win_rate", "bradley_terry"]
AGGREGATORS: tuple[Aggregator, ...] = get_args(Aggregator)
_FIXED = float(1 << 40)


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Adjustments of a group's means, with the published names and defaults."""

    reasoning_bonus: float = 0.0
    answer_bonus: float = 0.0
    top_percentile: float = 0.2
    group_reasoning_length_penalty_coeff: float = 0.0
    group_answer_length_penalty_coeff: float = 0.0
    group_style_penalty_coeff: float = 0.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """One entry per response: characters of the stripped reasoning and answer, and style density."""

    reasoning: npt.NDArray[np.int64]
    answer: npt.NDArray[np.int64]
    style: Floats


@dataclass(frozen=True, slots=True)
class Rewards:
    """One entry per response. ``reward`` = ``base`` + ``bonus``, NaN where nothing was judged.

    ``judged`` and ``missing`` count its comparisons; ``error`` is the standard error where the aggregator has one.
    ``metrics``: mean and population deviation of the individual scores before tie-breaks, and the share of ties.
    """

    reward: Floats
    base: Floats
    bonus: Floats
    judged: Ints
    missing: Ints
    error: Floats
    metrics: dict[str, float]


def aggregate(
    matches: Matches,
    groups: npt.NDArray[np.int64] | int,
    method: str = "simple_tiebreaker",
    *,
    adjust: Adjustments | None = None,
    sizes: Sizes | None = None,
    default_score: float | None = None,
    empty_is_longest: bool = True,
) -> Rewards:
    """Rewards of all responses.

    ``groups``: the group number of each response, or how many responses there are in one group. ``sizes`` are needed for
    adjustments, which act on ``simple_tiebreaker`` only. ``default_score`` is the base of a response without a valid
    comparison, as published. ``empty_is_longest``: an answer without text counts as long as the group's longest; as
    published it is the shortest.
    """
    if method not in AGGREGATORS:
        raise UsageError.unknown_choice("aggregator", method, AGGREGATORS)
    number = np.zeros(groups, np.int64) if isinstance(groups, int) else np.asarray(groups, np.int64)
    n = len(number)
    counted = matches.scored if method == "simple_tiebreaker" else matches.judged
    judged = _per_response(matches, counted, n)
    missing = _per_response(matches, ~counted, n)
    error = np.full(n, np.nan)
    bonus = np.zeros(n)
    if method == "simple_tiebreaker":
        score_1, score_2 = matches.broken()
        first, second = matches.first[counted], matches.second[counted]
        total = np.bincount(first, np.rint(score_1[counted] * _FIXED), n)
        total += np.bincount(second, np.rint(score_2[counted] * _FIXED), n)
        with np.errstate(invalid="ignore"):
            base: Floats = total / (judged * _FIXED)
        if default_score is not None:
            base = np.where(judged > 0, base, default_score)
        if adjust is not None and sizes is not None:
            bonus = bonuses(number, base, sizes, adjust, empty_is_longest)
    elif method == "win_rate":
        base = win_rate(matches, n)
    else:
        base, error = bradley_terry(matches, number)
    return Rewards(base + bonus, base, bonus, judged, missing, error, metrics(matches))


def simple_tiebreaker(
    matches: Matches,
    groups: npt.NDArray[np.int64] | int,
    adjust: Adjustments | None = None,
    sizes: Sizes | None = None,
    default_score: float | None = None,
) -> Rewards:
    """Means of tie-broken scores with bonuses, as published; without a ``default_score`` missing stays missing."""
    return aggregate(
        matches, groups, adjust=adjust, sizes=sizes, default_score=default_score, empty_is_longest=default_score is None
    )


def metrics(matches: Matches) -> dict[str, float]:
    """Figures over the scored comparisons; empty when there are none."""
    scored = matches.scored
    if not scored.any():
        return {}
    score_1, score_2 = matches.score_1[scored], matches.score_2[scored]
    scores = np.concatenate([score_1, score_2])
    return {
        "mean_individual_score": float(np.mean(scores)),
        "std_individual_score": float(np.std(scores)),
        "tiebreak_usage_rate": float(np.mean(score_1 == score_2)),
    }


def _per_response(matches: Matches, which: Bools, n: int) -> Ints:
    return np.bincount(matches.first[which], minlength=n) + np.bincount(matches.second[which], minlength=n)


def bonuses(groups: Ints, base: Floats, sizes: Sizes, adjust: Adjustments, empty_is_longest: bool) -> Floats:
    """What bonuses and weights add to each response's base, within groups of responses that have a base."""
    if adjust == Adjustments(top_percentile=adjust.top_percentile):
        return np.zeros(len(base))
    import polars as pl

    of_response = {"reasoning": sizes.reasoning, "answer": sizes.answer, "style": sizes.style}
    rows = pl.DataFrame({"group": groups, "base": base, **of_response})
    n, score = pl.len(), pl.col("base")
    last_of_top = (n * adjust.top_percentile).cast(pl.Int64) - 1
    lowest_of_top = pl.col("base").sort(descending=True).get(last_of_top.clip(0, n - 1))
    for bonus, lengths in ((adjust.reasoning_bonus, "reasoning"), (adjust.answer_bonus, "answer")):
        length = pl.when(pl.col(lengths) > 0).then(pl.col(lengths))
        is_shortest = pl.int_range(n) == length.arg_min()
        score += pl.when(is_shortest & (score >= lowest_of_top) & (n > 1)).then(bonus).otherwise(0.0)
    answer = pl.col("answer")
    if empty_is_longest:
        answer = pl.when(answer == 0).then(answer.max()).otherwise(answer)
    for coefficient, values in (
        (adjust.group_reasoning_length_penalty_coeff, pl.col("reasoning")),
        (adjust.group_answer_length_penalty_coeff, answer),
        (adjust.group_style_penalty_coeff, pl.col("style")),
    ):
        # 1 for the least, 0 for the most and where all are equal, minus the group's mean of that.
        span = values.max() - values.min()
        weight = pl.when(span > 0).then(1.0 - (values - values.min()) / span).otherwise(0.0)
        score += coefficient * (weight - weight.mean())
    judged = np.isfinite(base)
    added = np.zeros(len(base))
    added[judged] = rows.filter(judged).select((score - pl.col("base")).over("group")).to_series().to_numpy()
    return added
