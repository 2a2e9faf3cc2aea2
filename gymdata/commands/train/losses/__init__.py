"""The policy losses of ``train-rl``: one file of this folder each, or a small family; other packages add theirs by the
entry-point group ``gymdata.losses``.

``make schemas`` writes the documentation's table after a change.
"""

from __future__ import annotations

from gymdata.commands.train.losses._registry import (
    AGGREGATIONS,
    REGISTRY,
    Aggregation,
    Curve,
    Loss,
    Result,
    Tokens,
    loss,
)

__all__ = [
    "AGGREGATIONS",
    "CENTERED",
    "LOSSES",
    "Aggregation",
    "Curve",
    "Loss",
    "Result",
    "Tokens",
    "loss",
    "with_setting",
]

DEFAULT = "ppo_clip"
#: Name → loss, the default first.
LOSSES: dict[str, Loss] = {e.name: e.object for e in sorted(REGISTRY, key=lambda e: e.name != DEFAULT)}
#: The losses that score centering has a term for, as text.
CENTERED = " or ".join(name for name, loss in LOSSES.items() if loss.weight is not None)


def with_setting(setting: str) -> str:
    """The losses that a setting belongs to, as text for ``with_options``."""
    *some, last = [name for name, loss in LOSSES.items() if setting in loss.settings]
    return f"{{loss:{', '.join(some)} or {last}}}" if some else f"{{loss:{last}}}"
