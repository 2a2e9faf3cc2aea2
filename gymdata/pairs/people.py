"""Pairs from what people chose: two rollouts that someone compared, and no others.

A rollout's score is how many rollouts it stands above, one after another, by people's choices: the longest chain below it.
Choices that go round in a circle give all in it the same score, so that none of them becomes a pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from gymdata.pairs.groups import Groups
from gymdata.rollouts.ragged import Array


def heights(rollout_ids: Sequence[str], preferred: Mapping[tuple[str, str], int]) -> pa.ChunkedArray:
    """One score per rollout: the longest chain of worse ones below it; null for one that nobody compared."""
    present = set(rollout_ids)
    below: dict[str, set[str]] = {}
    for better, worse in preferred:
        if better in present and worse in present:
            below.setdefault(better, set()).add(worse)
            below.setdefault(worse, set())
    height: dict[str, float] = {}
    while below:
        # Those whose worse ones all have a height; where there are none, the rest stands on a circle.
        ready = [better for better, worse in below.items() if worse <= height.keys()]
        if not ready:
            top = 1.0 + max(height.values(), default=-1.0)
            height |= dict.fromkeys(below, top)
            break
        height |= {better: 1.0 + max((height[worse] for worse in below[better]), default=-1.0) for better in ready}
        for better in ready:
            del below[better]
    return pa.chunked_array([pa.array([height.get(rollout) for rollout in rollout_ids], pa.float64())])


def choices(
    rollout_ids: Sequence[str], preferred: Mapping[tuple[str, str], int], groups: Groups
) -> tuple[Array, Array]:
    """The candidates, as a pair strategy gives them: what was chosen within a group. ``rollout_ids``: of each row."""
    index = {rollout_ids[row]: position for position, row in enumerate(groups.row.tolist())}
    pairs = [(index[better], index[worse]) for better, worse in preferred if better in index and worse in index]
    sides = np.array([(a, b) for a, b in pairs if groups.group[a] == groups.group[b]], np.int64).reshape(-1, 2)
    return sides[:, 0], sides[:, 1]
