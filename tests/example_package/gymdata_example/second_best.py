"""A pair strategy: the best rollout of a group and the one after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gymdata.commands.pairs.strategies import strategy

if TYPE_CHECKING:
    from gymdata.commands.pairs.groups import Groups
    from gymdata.rollouts.ragged import Array


@strategy("second-best")
def second_best(groups: Groups) -> tuple[Array, Array]:
    """The best rollout of each group and the one after it."""
    best = groups.start[groups.size >= 2]
    return best, best + 1
