"""What an advantage estimator is, and how it registers itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy.typing as npt

from gymdata.credit.shaping import reinforce
from gymdata.registry import Registry, Setting, settings_of

Array = npt.NDArray[Any]
Shape = Callable[..., Array]


@dataclass(frozen=True)
class TurnRewards:
    """All turns of a file's n rollouts, T in all, in the order of the rollouts: ``owner``, the row of each one's rollout;
    ``state``, a label of the state that it was taken in; ``agent``, a code; ``reward``, 0 where it has none. Of each
    rollout: ``outcome``, 0 without one; ``kept``, false where it takes no part; ``groups``, a code. ``gamma``: the
    discount of a turn."""

    owner: Array
    state: Array
    agent: Array
    reward: Array
    outcome: Array
    kept: Array
    groups: Array
    gamma: float


@dataclass(frozen=True)
class Estimator:
    """``shape``: (rewards, groups) → the worth of each rollout; it may take ``lengths`` by name, the generated tokens of
    each. ``turns``: ``TurnRewards`` → the advantage of each turn, in place of that. ``options``: the settings of these
    functions.

    ``reads``: the reward of a rollout, its named parts one by one, or none. ``compares``: the rollouts of a group, so that
    one with equal rewards gives no signal; ``baseline``: with the rollout of another run. ``standardizes``: the formula is
    (r − mean) divided by something, with ``ddof`` where that is the std. ``alone``: it follows from the rewards of the
    group alone; ``limited``: not any reward will do. ``of_outcomes``: reads no rewards of turns. ``returns``: advantages
    are discounted sums over tokens; ``discounts``: these or others are discounted. ``whitens``: they are normalized over
    all tokens of the file. ``least``: the setting that says how many scored rollouts a group needs."""

    name: str
    formula: str
    source: str
    when: str
    shape: Shape = reinforce
    turns: Callable[..., Array] | None = None
    options: Mapping[str, Setting] = field(default_factory=dict)
    reads: Literal["reward", "parts", "none"] = "reward"
    compares: bool = False
    baseline: bool = False
    standardizes: bool = False
    ddof: int = 1
    alone: bool = True
    limited: bool = False
    of_outcomes: bool = False
    returns: bool = True
    discounts: bool = True
    whitens: bool = False
    least: str | None = None


REGISTRY: Registry[Estimator] = Registry("estimator", "gymdata.credit.estimators", "gymdata.estimators")


def estimator(
    name: str, formula: str, source: str, when: str, by_turn: bool = False, **more: Any
) -> Callable[[Shape], Shape]:
    """Register a function as the shaping of estimator ``name``, or ``by_turn`` as its credit of turns; its keyword-only
    parameters are the estimator's settings. ``more``: other fields of ``Estimator``."""

    def register(function: Shape) -> Shape:
        own = {"turns" if by_turn else "shape": function, "options": settings_of(function), **more}
        REGISTRY.register(name)(Estimator(name, formula, source, when, **own))
        return function

    return register
