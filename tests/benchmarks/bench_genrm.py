"""How fast comparisons become rewards: a million responses in groups of 8, circular, against a plain Python loop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gymdata.genrm import aggregate
from gymdata.genrm.matches import Matches
from tests.benchmarks.rows import Row, interleave, seconds

RESPONSES, GROUP = 1_000_000, 8


def comparisons(n: int = RESPONSES) -> tuple[Matches, np.ndarray]:
    rng = np.random.default_rng(0)
    first = np.arange(n)
    second = first - first % GROUP + (first + 1) % GROUP
    scores = rng.integers(1, 6, (2, n)).astype(float)
    ranking = rng.integers(1, 7, n).astype(float)
    order = rng.permutation(n)
    columns = (first, second, np.zeros(n, np.int64), *scores, ranking)
    return Matches(*(c[order] for c in columns)), first // GROUP


def plain(columns: list[list], n: int) -> Callable[[], list[float]]:
    """One comparison after the other."""

    def run() -> list[float]:
        total, count = [0.0] * n, [0] * n
        for i, j, one, two, ranking in zip(*columns, strict=True):
            if one == two:
                move = 3.5 - ranking
                one, two = one + move, two - move
            total[i] += one
            total[j] += two
            count[i] += 1
            count[j] += 1
        return [t / c if c else 3.0 for t, c in zip(total, count, strict=True)]

    return run


def main() -> list[Row]:
    matches, groups = comparisons()
    names = ("first", "second", "score_1", "score_2", "ranking")
    rival = plain([getattr(matches, name).tolist() for name in names], len(groups))

    def ours() -> np.ndarray:
        return aggregate(matches, groups).reward

    assert np.allclose(ours(), rival(), rtol=0, atol=1e-9)
    timing = interleave(ours, rival)
    what = f"tie-break aggregation, {len(groups):,} responses, against plain Python"
    return [Row(what, seconds(timing.ours), seconds(timing.rival), timing.speedup, at_least=8)]
