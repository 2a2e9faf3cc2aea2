"""Strategies by rank: the best and the worst, every two, neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gymdata.commands.pairs.strategies import strategy

if TYPE_CHECKING:
    from gymdata.commands.pairs.groups import Groups
    from gymdata.rollouts.ragged import Array


#: Candidates that are ordered at a time, for memory.
_GRID_CELLS = 500_000


@strategy("best-worst")
def best_worst(groups: Groups) -> tuple[Array, Array]:
    """The best and the worst rollout of each group."""
    enough = groups.size >= 2
    return groups.start[enough], (groups.start + groups.size - 1)[enough]


@strategy("all", ordered=True)
def every_two(groups: Groups) -> tuple[Array, Array]:
    """Every two rollouts of a group."""
    import numpy as np

    kind = groups.row.dtype
    betters, worses = [np.empty(0, kind)], [np.empty(0, kind)]
    # Groups of one size are done together, in blocks that bound the memory.
    for size in np.unique(groups.size[groups.size >= 2]):
        i, j = np.triu_indices(int(size), 1)
        starts = groups.start[groups.size == size]
        block = max(1, _GRID_CELLS // len(i))
        for begin in range(0, len(starts), block):
            base = starts[begin : begin + block, None]
            # With the members by rollout index, the columns are already in the order that breaks equal margins.
            members = base + np.argsort(groups.index[base + np.arange(size)], axis=1, kind="stable")
            left, right = members[:, i], members[:, j]
            better, worse = np.minimum(left, right), np.maximum(left, right)
            with np.errstate(over="ignore"):
                order = np.argsort(groups.score[worse] - groups.score[better], axis=1, kind="stable")
            betters.append(np.take_along_axis(better, order, axis=1).ravel().astype(kind))
            worses.append(np.take_along_axis(worse, order, axis=1).ravel().astype(kind))
    return np.concatenate(betters), np.concatenate(worses)


@strategy("adjacent")
def adjacent(groups: Groups) -> tuple[Array, Array]:
    """Each rollout and the next lower one of its group."""
    (first,) = (groups.group[:-1] == groups.group[1:]).nonzero()
    return first, first + 1
