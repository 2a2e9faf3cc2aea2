"""Comparisons of many groups as columns, and who won each.

Responses of all groups are numbered together from 0; ``first`` and ``second`` are such numbers. A missing number is NaN;
a comparison without scores and ranking is missing as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gymdata.genrm.schedule import Match
from gymdata.genrm.verdict import Verdict

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

#: A ranking below it prefers the first response, above it the second.
MIDPOINT = 3.5


@dataclass(frozen=True, slots=True)
class Matches:
    """One entry per comparison in every array."""

    first: Ints
    second: Ints
    judge_idx: Ints
    score_1: Floats
    score_2: Floats
    ranking: Floats

    @classmethod
    def of(cls, rows: Iterable[tuple[Match, Verdict | None]]) -> Matches:
        """From matches with their verdicts; None is a comparison that failed."""
        rows = list(rows)
        positions = np.array([m for m, _ in rows], np.int64).reshape(-1, 3)
        none = Verdict(None, None, None)
        numbers = [(v.score_1, v.score_2, v.ranking) for v in (verdict or none for _, verdict in rows)]
        # float64 turns None into NaN.
        values = np.array(numbers, np.float64).reshape(-1, 3)
        return cls(positions[:, 0], positions[:, 1], positions[:, 2], values[:, 0], values[:, 1], values[:, 2])

    @property
    def scored(self) -> Bools:
        """Has both scores, so it counts in means."""
        both: np.ndarray = np.isfinite(self.score_1) & np.isfinite(self.score_2)
        return both

    @property
    def judged(self) -> Bools:
        """Has scores or a ranking, so somebody won or it was a tie."""
        either: np.ndarray = self.scored | np.isfinite(self.ranking)
        return either

    def broken(self) -> tuple[Floats, Floats]:
        """The scores with ties broken by the ranking: a = 3.5 − ranking moves from the second to the first."""
        tie = (self.score_1 == self.score_2) & np.isfinite(self.ranking)
        move = np.where(tie, MIDPOINT - self.ranking, 0.0)
        return self.score_1 + move, self.score_2 - move

    def swap(self) -> Matches:
        """The same judgements with the positions of every comparison exchanged."""
        return Matches(self.second, self.first, self.judge_idx, self.score_2, self.score_1, 7.0 - self.ranking)

    def __len__(self) -> int:
        return len(self.first)


def winners(matches: Matches) -> Floats:
    """1 where the first position won, −1 where the second did, 0 for a tie, NaN where nothing was judged.

    By the tie-broken scores; by the ranking where there are no scores.
    """
    score_1, score_2 = matches.broken()
    by_score = np.sign(score_1 - score_2)
    by_ranking = np.sign(MIDPOINT - matches.ranking)
    return np.where(matches.scored, by_score, by_ranking)


def position_pairs(matches: Matches) -> tuple[Ints, Ints]:
    """Places (a, b) of comparisons of the same two responses by the same judge in opposite positions."""
    low, high = np.minimum(matches.first, matches.second), np.maximum(matches.first, matches.second)
    up = matches.first < matches.second
    order = np.lexsort((up, matches.judge_idx, high, low))
    keys, up = np.stack([low, high, matches.judge_idx])[:, order], up[order]
    together = np.flatnonzero((keys[:, 1:] == keys[:, :-1]).all(axis=0) & (up[1:] != up[:-1]))
    return order[together], order[together + 1]


def position_inconsistency(matches: Matches) -> tuple[Ints, Ints, Bools]:
    """Pairs of comparisons in opposite positions that were both judged, and which of them had opposite winners.

    Places (a, b) into the rows; a flip is a win for one response in one position and for the other in the other.
    """
    a, b = position_pairs(matches)
    won = winners(matches)
    both = np.isfinite(won[a]) & np.isfinite(won[b])
    a, b = a[both], b[both]
    # The positions are exchanged, so the same sign means that the same *position* won.
    return a, b, (won[a] == won[b]) & (won[a] != 0)
