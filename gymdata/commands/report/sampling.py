"""Which of many rollouts a page shows: the first, the best, the worst, groups with different rewards, or a random sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gymdata.errors import RefusedError, counted, option

Sample = Literal["first", "best", "worst", "mixed", "random"]
_NAMES: Mapping[Sample, str] = {
    "first": "the first",
    "best": "those with the highest {score}",
    "worst": "those with the lowest {score}",
    "mixed": "of groups whose rewards differ",
    "random": "drawn at random",
}


def sample(kind: Sample, limit: int, rewards: npt.NDArray[Any], groups: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """At most ``limit`` rows. ``rewards``: NaN where there is none; ``groups``: each row's group as a code from 0. Best and
    worst are in their order, the others in that of the rows; the same rows give the same random sample.

    Raises RefusedError where no row has a reward that ``kind`` needs.
    """
    rows, all_rollouts = np.arange(len(rewards)), counted(len(rewards), "rollout")
    if kind == "random":
        return np.sort(np.random.default_rng(0).permutation(rows)[:limit])
    scored = np.isfinite(rewards)
    if kind in ("best", "worst"):
        if not scored.any():
            raise RefusedError(f"{option('sample')} {kind}: none of {all_rollouts} has a reward")
        order = np.argsort(-rewards if kind == "best" else rewards, kind="stable")
        return order[: min(limit, int(scored.sum()))]
    if kind == "mixed":
        rows = rows[scored & mixed(rewards, groups)[groups]]
        if not len(rows):
            raise RefusedError(f"{option('sample')} {kind}: no group of {all_rollouts} has different rewards")
        # The worst and the best of each group before what is between them; groups stay together.
        order = rows[np.lexsort((rewards[rows], groups[rows]))]
        _, starts, sizes = np.unique(groups[order], return_index=True, return_counts=True)
        from_start = np.arange(len(order)) - np.repeat(starts, sizes)
        from_end = np.minimum(from_start, np.repeat(sizes, sizes) - 1 - from_start)
        rows = order[np.lexsort((groups[order], from_end))[:limit]]
        rows = rows[np.lexsort((rows, groups[rows]))]
    return rows[:limit]


def mixed(rewards: npt.NDArray[Any], groups: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Of each group whether its rewards differ."""
    scored = np.isfinite(rewards)
    least, most = (np.full(int(groups.max(initial=-1)) + 1, end) for end in (np.inf, -np.inf))
    np.minimum.at(least, groups[scored], rewards[scored])
    np.maximum.at(most, groups[scored], rewards[scored])
    differ: npt.NDArray[np.bool_] = most > least
    return differ


def sampled_as(kind: Sample, shown: int, total: int, score: str | None) -> str:
    """How many of how many are shown, and which."""
    if shown == total:
        return counted(total, "rollout")
    return f"{shown:,} of {counted(total, 'rollout')}, {_NAMES[kind].format(score=score or 'reward')}"
