"""What an advantage estimator is, and how it registers itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from gymdata.registry import Registry

Shape = Callable[..., npt.NDArray[Any]]


@dataclass(frozen=True)
class Estimator:
    """``shape``: (rewards, groups) → the worth of each rollout; it may take ``lengths`` and ``k`` by name. ``compares``: the
    rollouts of a group, so that one with equal rewards gives no signal. ``standardizes``: the formula is (r − mean) divided
    by something. ``plain``: takes any reward of a rollout. ``of_outcomes``: reads no rewards of turns. ``returns``:
    advantages are discounted sums over tokens. ``whitens``: they are normalized over all tokens of the file."""

    name: str
    shape: Shape
    formula: str
    source: str
    when: str
    compares: bool = False
    standardizes: bool = False
    plain: bool = True
    of_outcomes: bool = False
    returns: bool = True
    whitens: bool = False


REGISTRY: Registry[Estimator] = Registry("estimator", "gymdata.credit.estimators", "gymdata.estimators")


def estimator(name: str, formula: str, source: str, when: str, **more: bool) -> Callable[[Shape], Shape]:
    """Register a function as the shaping of estimator ``name``; ``more``: other fields of ``Estimator``."""

    def register(shape: Shape) -> Shape:
        REGISTRY.register(name)(Estimator(name, shape, formula, source, when, **more))
        return shape

    return register
