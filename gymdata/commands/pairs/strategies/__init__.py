"""Pair strategies, one file per strategy or family: ``@strategy("name")`` makes one known to ``--strategy``, help and docs.

A strategy gets the scored rollouts (``pairs.groups.Groups``, with a random generator that the seed determines) and
returns candidates as two arrays of positions in them: the two sides of each, in any order, both of one group. Another
package adds strategies through entry points of the group ``gymdata.strategies``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gymdata.registry import Registry

if TYPE_CHECKING:
    from gymdata.commands.pairs.groups import Groups
    from gymdata.rollouts.ragged import Array

    Strategy = Callable[[Groups], tuple[Array, Array]]

STRATEGIES: Registry[Strategy] = Registry("strategy", __name__, "gymdata.strategies")
#: ``ordered=True``: candidates of a group come together, from the widest margin, so that they need no sorting.
strategy = STRATEGIES.register
