"""The advantage estimators of ``experience``: a file of this folder registers one or a small family; other packages add
theirs by the entry-point group ``gymdata.estimators``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gymdata.credit.estimators._registry import REGISTRY, Estimator, TurnRewards, estimator
from gymdata.errors import UsageError
from gymdata.registry import Setting

__all__ = ["ALL", "DEFAULT", "ESTIMATORS", "SETTINGS", "Estimator", "TurnRewards", "estimator", "shape_rewards"]
DEFAULT = "grpo"
#: Name → estimator, the default first.
ALL: dict[str, Estimator] = {e.name: e.object for e in sorted(REGISTRY, key=lambda e: e.name != DEFAULT)}
#: Setting of an estimator → its type, default and help.
SETTINGS: dict[str, Setting] = {name: option for e in ALL.values() for name, option in e.options.items()}
#: Name → how its group's scalar rewards are shaped, of those that take any reward of a rollout.
ESTIMATORS: dict[str, Callable[..., npt.NDArray[Any]]] = {
    name: e.shape for name, e in ALL.items() if e.alone and not e.limited
}


def shape_rewards(
    rewards: npt.ArrayLike,
    estimator: str,
    groups: npt.ArrayLike | None = None,
    pass_k: int = 4,
    lengths: npt.ArrayLike | None = None,
    **settings: Any,
) -> npt.NDArray[Any]:
    """Group shaping by the estimator's name (``-`` and ``_`` are the same; ``group_norm`` is ``grpo``). ``pass_k``: the k of
    ``pass_at_k``; ``lengths``: generated tokens of each rollout, for ``opo``; ``settings``: those of other estimators.
    """
    name = estimator.replace("_", "-")
    name = "grpo" if name == "group-norm" else name
    if name not in ALL:
        raise UsageError.unknown_choice("estimator", estimator, ALL)
    shape = ALL[name].shape
    takes = inspect.signature(shape).parameters
    options = {"pass_k": pass_k, "lengths": lengths, **settings}
    return np.asarray(shape(rewards, groups, **{key: value for key, value in options.items() if key in takes}))
