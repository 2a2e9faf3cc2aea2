"""Direct preferences between two responses from their comparisons, in addition to the aggregate.

Invariants: the order of the rows changes nothing; a pair whose winner depends on the positions is no preference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gymdata.genrm.matches import Bools, Ints, Matches, position_inconsistency, winners


@dataclass(frozen=True, slots=True)
class Preferences:
    """One entry for each two responses that were compared, ``low`` < ``high``.

    ``winner``: 1 when every decided comparison went to ``low``, −1 when to ``high``, 0 otherwise. ``both_positions``: judged
    in both positions at least once. ``flipped``: the same judge contradicted itself with the positions exchanged.
    ``mixed``: wins on both sides, whatever the reason.
    """

    low: Ints
    high: Ints
    winner: Ints
    both_positions: Bools
    flipped: Bools
    mixed: Bools

    def rejections(self, chosen: Ints, rejected: Ints, *, both_positions: bool = True) -> list[tuple[str, Bools]]:
        """Why the comparisons do not confirm that each ``chosen`` beats its ``rejected``, by reason. A winner that
        changes with the positions is never confirmed. With ``both_positions`` the two must have been judged in both,
        and the judge must have preferred ``chosen``; without, it is enough that it did not prefer ``rejected``.
        """
        room = int(max(self.high.max(initial=0), chosen.max(initial=0), rejected.max(initial=0))) + 1
        keys = self.low * room + self.high
        pair_keys = np.minimum(chosen, rejected) * room + np.maximum(chosen, rejected)
        row = np.minimum(np.searchsorted(keys, pair_keys), max(len(keys) - 1, 0))
        compared = (keys[row] == pair_keys) if len(keys) else np.zeros(len(pair_keys), dtype=bool)

        def of(values: np.ndarray) -> np.ndarray:
            """``values`` of each pair; 0 where the two were never compared."""
            return np.where(compared, values[row], 0) if len(keys) else np.zeros(len(pair_keys), values.dtype)

        prefers = np.where(chosen < rejected, of(self.winner), -of(self.winner))
        reasons = [("not_in_both_positions", ~of(self.both_positions).astype(bool))] if both_positions else []
        reasons.append(("order_flipped", of(self.flipped).astype(bool)))
        reasons.append(("against_comparisons", prefers < 0))
        if both_positions:
            reasons.append(("undecided", prefers == 0))
        return reasons

    def cycles(self, groups: Ints) -> tuple[int, int]:
        """Triples a > b > c > a among direct winners, and the groups that have one."""
        better = np.where(self.winner > 0, self.low, self.high)[self.winner != 0]
        worse = np.where(self.winner > 0, self.high, self.low)[self.winner != 0]
        n_cycles, n_groups = 0, 0
        order = np.argsort(groups[better], kind="stable")
        for part in np.split(order, np.flatnonzero(np.diff(groups[better[order]])) + 1):
            if len(part) < 3:
                continue
            names, edges = np.unique(np.stack([better[part], worse[part]]), return_inverse=True)
            beats = np.zeros((len(names), len(names)), np.int64)
            edges = edges.reshape(2, -1)
            beats[edges[0], edges[1]] = 1
            triples = int(np.trace(beats @ beats @ beats)) // 3
            n_cycles += triples
            n_groups += triples > 0
        return n_cycles, n_groups


def preferences(matches: Matches) -> Preferences:
    """Direct preferences from the judged comparisons."""
    won = winners(matches)
    low, high = np.minimum(matches.first, matches.second), np.maximum(matches.first, matches.second)
    up = matches.first < matches.second
    judged = np.isfinite(won)
    for_low = np.where(up, won, -won)
    a, _, flip = position_inconsistency(matches)
    room = int(max(low.max(initial=0), high.max(initial=0))) + 1
    key = low * room + high
    keys, case = np.unique(key[judged], return_inverse=True)
    n = len(keys)
    wins_low = np.bincount(case, for_low[judged] > 0, n) > 0
    wins_high = np.bincount(case, for_low[judged] < 0, n) > 0
    positions = (np.bincount(case, up[judged], n) > 0) & (np.bincount(case, ~up[judged], n) > 0)
    flipped = np.isin(keys, key[a[flip]])
    mixed = wins_low & wins_high
    winner = np.where(mixed, 0, wins_low.astype(np.int64) - wins_high.astype(np.int64))
    return Preferences(keys // room, keys % room, winner, positions, flipped, mixed)
