"""Rewards from wins alone: the share of wins, and Bradley–Terry strengths with standard errors.

Invariants: a tie is half a win for each side, and so is each of two comparisons in opposite positions that contradict
each other; a response without a judged comparison has NaN.
"""

from __future__ import annotations

import numpy as np

from gymdata.genrm.matches import Floats, Ints, Matches, position_inconsistency, winners

PENALTY = 1.0
_STEPS = 100
_CLOSE = 1e-12
_CELLS = 2_000_000


def points(matches: Matches) -> Floats:
    """The points of the first position in each comparison: 1, ½ or 0; NaN where nothing was judged."""
    got = (winners(matches) + 1.0) / 2.0
    a, b, flipped = position_inconsistency(matches)
    got[a[flipped]] = got[b[flipped]] = 0.5
    return got


def win_rate(matches: Matches, n: int) -> Floats:
    """Mean points of each of ``n`` responses over its judged comparisons."""
    got = points(matches)
    judged = np.isfinite(got)
    first, second, got = matches.first[judged], matches.second[judged], got[judged]
    total = np.bincount(first, got, n) + np.bincount(second, 1.0 - got, n)
    count = np.bincount(first, minlength=n) + np.bincount(second, minlength=n)
    with np.errstate(invalid="ignore"):
        rate: Floats = total / count
    return rate


def bradley_terry(matches: Matches, groups: Ints) -> tuple[Floats, Floats]:
    """Strengths θ and their standard errors: the maximum of Σ log σ(θ_w − θ_l) − (λ/2) Σ θ² in each group.

    Two wins to none give ±0.5213 at λ = 1. Standard errors come from the curvature at the maximum.
    """
    got = points(matches)
    judged = np.isfinite(got)
    first, second, got = matches.first[judged], matches.second[judged], got[judged]
    n = len(groups)
    theta, error = np.full(n, np.nan), np.full(n, np.nan)
    compared = np.bincount(np.concatenate([first, second]), minlength=n) > 0
    members = np.flatnonzero(compared)
    members = members[np.argsort(groups[members], kind="stable")]
    ids = groups[members]
    starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1])[: len(ids)])
    sizes = np.diff(np.append(starts, len(ids)))
    position, group_at = np.empty(n, np.int64), np.empty(n, np.int64)
    owner = np.repeat(np.arange(len(starts)), sizes)
    position[members], group_at[members] = np.arange(len(members)) - starts[owner], owner
    for size in np.unique(sizes):
        rows = np.flatnonzero(sizes == size)
        block = max(1, _CELLS // int(size * size))
        for begin in range(0, len(rows), block):
            block_rows = rows[begin : begin + block]
            slot = np.full(len(starts), -1)
            slot[block_rows] = np.arange(len(block_rows))
            in_block = slot[group_at[first]] >= 0
            wins = np.zeros((len(block_rows), size, size))
            cell = (slot[group_at[first[in_block]]], position[first[in_block]], position[second[in_block]])
            np.add.at(wins, cell, got[in_block])
            np.add.at(wins, (cell[0], cell[2], cell[1]), 1.0 - got[in_block])
            which = members[starts[block_rows][:, None] + np.arange(size)]
            theta[which], error[which] = _fit(wins)
    return theta, error


def _fit(wins: Floats) -> tuple[Floats, Floats]:
    """Newton's method on many groups of one size; ``wins[g, i, j]``: how often i beat j."""
    groups, size, _ = wins.shape
    games = wins + wins.transpose(0, 2, 1)
    theta = np.zeros((groups, size))
    eye = np.eye(size) * PENALTY
    curvature = np.broadcast_to(eye, games.shape)
    for _ in range(_STEPS):
        chance = 1.0 / (1.0 + np.exp(theta[:, None, :] - theta[:, :, None]))
        slope = (wins - games * chance).sum(axis=2) - PENALTY * theta
        weight = games * chance * (1.0 - chance)
        curvature = -weight + eye
        curvature[:, np.arange(size), np.arange(size)] += weight.sum(axis=2)
        # A full step can overshoot when one side won everything; the penalty keeps every step this short at the end.
        step = np.clip(np.linalg.solve(curvature, slope[:, :, None])[:, :, 0], -1.0, 1.0)
        theta = theta + step
        if np.abs(step).max() < _CLOSE:
            break
    error = np.sqrt(np.diagonal(np.linalg.inv(curvature), axis1=1, axis2=2))
    return theta, error
