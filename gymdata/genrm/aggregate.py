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
        first, second = matches.first, matches.second
        if not counted.all():
            first, second, score_1, score_2 = first[counted], second[counted], score_1[counted], score_2[counted]
        total = np.bincount(first, np.rint(score_1 * _FIXED), n) + np.bincount(second, np.rint(score_2 * _FIXED), n)
        with np.errstate(invalid="ignore"):
            base: Floats = total / (judged * _FIXED)
        if default_score is not None:
            base = np.where(judged > 0, base, default_score)
        if adjust is not None and sizes is not None:
            bonus = _Adjusting(number, base, sizes, empty_is_longest).total(adjust)
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
    if not which.any():
        return np.zeros(n, np.int64)
    first, second = (matches.first, matches.second) if which.all() else (matches.first[which], matches.second[which])
    return np.bincount(first, minlength=n) + np.bincount(second, minlength=n)


class _Adjusting:
    """Bonuses and weights within groups, over responses that have a base."""

    def __init__(self, group: Ints, base: Floats, sizes: Sizes, empty_is_longest: bool) -> None:
        here = np.flatnonzero(np.isfinite(base))
        here = here[np.argsort(group[here], kind="stable")]
        ids = group[here]
        starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1])[: len(ids)])
        #: Places of the responses with a base, group by group; groups of one are never adjusted.
        self.here: Ints = here
        self.n = len(group)
        self.start: Ints = starts
        self.size: Ints = np.diff(np.append(starts, len(here)))
        self.owner: Ints = np.repeat(np.arange(len(starts)), self.size)
        self.base = base[here]
        self.reasoning, self.answer = sizes.reasoning[here], sizes.answer[here]
        self.style = sizes.style[here]
        self.empty_is_longest = empty_is_longest

    def total(self, adjust: Adjustments) -> Floats:
        score = self.base.copy()
        if not len(score):
            return np.zeros(self.n)
        threshold = self._threshold(adjust.top_percentile)
        for bonus, lengths in ((adjust.reasoning_bonus, self.reasoning), (adjust.answer_bonus, self.answer)):
            if bonus > 0:
                self._reward_shortest(score, lengths, bonus, threshold)
        answers = self._longest_where_empty() if self.empty_is_longest else self.answer
        weights = (
            (adjust.group_reasoning_length_penalty_coeff, self.reasoning),
            (adjust.group_answer_length_penalty_coeff, answers),
            (adjust.group_style_penalty_coeff, self.style),
        )
        for coefficient, values in weights:
            if coefficient > 0:
                score += coefficient * self._weights(values.astype(np.float64))
        bonus_of = np.zeros(self.n)
        bonus_of[self.here] = score - self.base
        return bonus_of

    def _threshold(self, top_percentile: float) -> Floats:
        """The lowest score of each group's top."""
        ranked = self.base[np.lexsort((-self.base, self.owner))]
        last_of_top = np.maximum(0, (self.size * top_percentile).astype(np.int64) - 1)
        threshold: Floats = ranked[self.start + np.minimum(last_of_top, self.size - 1)]
        return threshold

    def _reward_shortest(self, score: Floats, lengths: Ints, bonus: float, threshold: Floats) -> None:
        some = np.flatnonzero((lengths > 0) & (self.size[self.owner] >= 2))
        order = some[np.lexsort((some, lengths[some], self.owner[some]))]
        owner = self.owner[order]
        shortest = order[np.append(True, owner[1:] != owner[:-1])[: len(order)]]
        score[shortest[score[shortest] >= threshold[self.owner[shortest]]]] += bonus

    def _longest_where_empty(self) -> Ints:
        longest = np.maximum.reduceat(self.answer, self.start)
        return np.where(self.answer == 0, longest[self.owner], self.answer)

    def _weights(self, values: Floats) -> Floats:
        """1 for the least, 0 for the most, minus the group's mean of that; 0 where all are equal."""
        low = np.minimum.reduceat(values, self.start)[self.owner]
        span = np.maximum.reduceat(values, self.start)[self.owner] - low
        raw = np.where(span > 0, 1.0 - (values - low) / np.where(span > 0, span, 1.0), 0.0)
        mean = np.bincount(self.owner, raw) / self.size
        return raw - mean[self.owner]
