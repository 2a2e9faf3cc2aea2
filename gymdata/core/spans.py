"""Where two id lists that begin alike run together again: the differing spans of a break.

What always holds: spans are in order, the first begins at the break, and outside of them both lists agree up to the end
of the first one; the cost grows as n·log n with the tokens after the break.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gymdata.core.tokens import Ids, common_prefix

#: Tokens that must agree before two lists are taken to run together again.
WINDOW = 8
#: More places that differ than this are given as one span to the end.
MOST_SPANS = 500
_NEAR = 512
_MOST_CANDIDATES = 64
#: An agreement counts when it is longer than this fraction (1 in so many) of what differs before it.
_CHANCE = 4
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Span:
    """``before[start:end]`` of what was there stands against ``prompt[new_start:new_end]`` of what came instead."""

    start: int
    end: int
    new_start: int
    new_end: int


def differing_spans(before: Ids, prompt: Ids, position: int) -> list[Span]:
    """Every differing span of ``prompt`` against ``before``, equal up to ``position``; tokens that follow after the end
    of ``before`` are new and no difference."""
    found: list[Span] = []
    a = b = position
    while a < len(before):
        near = bool(found)
        end, new_end = resync(before[a:], prompt[b:], near=near) if len(found) < MOST_SPANS else (len(before) - a, -1)
        end, new_end = a + end, len(prompt) if new_end < 0 else b + new_end
        found.append(Span(a, end, b, new_end))
        same = common_prefix(before[end:], prompt[new_end:])
        a, b = end + same, new_end + same
    return found


def resync(before: Ids, prompt: Ids, *, near: bool = False) -> tuple[int, int]:
    """The smallest a, b with before[a:a + 8] = prompt[b:b + 8]; (len(before), -1) when they never run together.

    Templates repeat texts, so 8 tokens can agree by chance: of the stretches that agree the longest is taken, and an
    earlier one only when it is not short against what lies before it. Within the last tokens of ``before`` fewer than 8
    are enough. ``near`` looks close by first.
    """
    if near and min(len(before), len(prompt)) > _NEAR:
        found = _by_windows(before[:_NEAR], prompt[:_NEAR])
        if found is not None:
            return found
    return _by_windows(before, prompt) or _by_tail(before, prompt)


def _by_windows(before: Ids, prompt: Ids) -> tuple[int, int] | None:
    found = _longest(before, prompt)
    while found is not None:
        a, b, _ = found
        earlier = _longest(before[:a], prompt[:b])
        if earlier is None or _CHANCE * earlier[2] < earlier[0] + earlier[1]:
            return a, b
        found = earlier
    return None


def _longest(before: Ids, prompt: Ids) -> tuple[int, int, int] | None:
    """The longest stretch of at least 8 tokens that both hold: where it begins in each, and its length."""
    mine, theirs = _hashes(before), _hashes(prompt)
    if not len(mine) or not len(theirs):
        return None
    known, first = np.unique(mine, return_index=True)
    at = np.minimum(np.searchsorted(known, theirs), len(known) - 1)
    there = np.flatnonzero(known[at] == theirs)
    if not len(there):
        return None
    a = first[at[there]]
    # Pieces in which both sides step by one; a repeated window cuts them, so the longest are looked at in full.
    starts = np.concatenate(([0], np.flatnonzero((np.diff(there) != 1) | (np.diff(a) != 1)) + 1))
    sizes = np.diff(np.concatenate((starts, [len(there)])))
    best: tuple[int, int, int] | None = None
    for piece in starts[np.argsort(-sizes, kind="stable")[:_MOST_CANDIDATES]].tolist():
        x, y = int(a[piece]), int(there[piece])
        back = common_prefix(before[:x][::-1], prompt[:y][::-1])
        x, y = x - back, y - back
        size = common_prefix(before[x:], prompt[y:])
        if size >= WINDOW and (best is None or (-size, x + y) < (-best[2], best[0] + best[1])):
            best = x, y, size
    return best


def _by_tail(before: Ids, prompt: Ids) -> tuple[int, int]:
    data = np.ascontiguousarray(prompt).tobytes()
    for length in range(min(WINDOW - 1, len(before)), 0, -1):
        tail = np.ascontiguousarray(before[len(before) - length :]).tobytes()
        at = data.find(tail)
        while at >= 0 and at % 4:
            at = data.find(tail, at + 1)
        if at >= 0:
            return len(before) - length, at // 4
    return len(before), -1


def _hashes(ids: Ids) -> npt.NDArray[np.uint64]:
    """A hash of each window of 8."""
    n = len(ids) - WINDOW + 1
    if n <= 0:
        return np.empty(0, np.uint64)
    values = ids.astype(np.uint64)
    total = np.zeros(n, np.uint64)
    for k in range(WINDOW):
        total = total * _BASE + values[k : k + n]
    return total
