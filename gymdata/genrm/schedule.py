"""Which responses of a group are compared, and in which positions.

A match (i, j, judge_idx) shows response i in the first position and j in the second.
"""

from __future__ import annotations

from itertools import combinations
from typing import Literal, NamedTuple

from gymdata.errors import UsageError

Strategy = Literal["circular", "all_pairs", "both_orders"]
STRATEGIES: tuple[Strategy, ...] = ("circular", "all_pairs", "both_orders")


class Match(NamedTuple):
    """One ordered comparison by one judge."""

    response_i: int
    response_j: int
    judge_idx: int = 0


def circular(n: int) -> list[tuple[int, int]]:
    """(i, i+1) around the circle: n comparisons, each response once in each position."""
    _at_least_two(n)
    return [(i, (i + 1) % n) for i in range(n)]


def all_pairs(n: int) -> list[tuple[int, int]]:
    """Every i < j once, the lower index in the first position: n(n−1)/2 comparisons."""
    _at_least_two(n)
    return list(combinations(range(n), 2))


def both_orders(n: int) -> list[tuple[int, int]]:
    """Every two responses in both positions: n(n−1) comparisons, the two of a pair consecutively."""
    return [positions for i, j in all_pairs(n) for positions in ((i, j), (j, i))]


def schedule(strategy: str, n: int, num_judges_per_comparison: int = 1) -> list[Match]:
    """The matches of a group of ``n``; the whole list once for each judge. Raises UsageError when n < 2."""
    if num_judges_per_comparison < 1:
        raise UsageError.bad_value("num_judges_per_comparison", num_judges_per_comparison, "a whole number ≥ 1")
    makers = {"circular": circular, "all_pairs": all_pairs, "both_orders": both_orders}
    if strategy not in makers:
        raise UsageError.unknown_choice("comparison strategy", strategy, STRATEGIES)
    positions = makers[strategy](n)
    return [Match(i, j, judge) for judge in range(num_judges_per_comparison) for i, j in positions]


def _at_least_two(n: int) -> None:
    if n < 2:
        raise UsageError.bad_value("responses to compare", n, "at least 2")
