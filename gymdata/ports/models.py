"""Models that score tokens which are there already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gymdata.ports.rollouts import Progress

if TYPE_CHECKING:
    from gymdata.core.forward import ToScore


class PolicyModel(Protocol):
    """A policy that scores tokens which were sampled. ``facts``: number format and device, for run.json."""

    facts: Mapping[str, Any]

    def log_probs(
        self, given: ToScore, *, entropy: bool = False, shift: int = 0, progress: Progress | None = None
    ) -> tuple[Any, Any]:
        """Log-probs of the scored tokens at their rows' temperature over the whole vocabulary, and entropies in nats
        (None unless asked for): float32 (given.n_scored,). ``shift``: scored with the output so many places later; NaN
        where there is none. Raises RefusedError for ids that it cannot read."""
        ...

    def log_probs_at(self, given: ToScore, temperatures: Sequence[float]) -> Any:
        """Log-probs at each of ``temperatures`` in place of the rows', float32 (len(temperatures), given.n_scored)."""
        ...


class Critic(Protocol):
    """Gives the value of the state after any token."""

    facts: Mapping[str, Any]

    def values(self, given: ToScore, *, progress: Progress | None = None) -> tuple[Any, Any]:
        """float32 (given.n_scored,) each: the value of the state before a scored token, and of the state after it."""
        ...
