"""What a reward is: the protocol of reward functions and the parts that they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from gymdata.errors import OutsideError


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One named part of a reward. ``value`` None means not scored, and ``detail`` says why."""

    name: str
    value: float | None
    weight: float = 1.0
    detail: str | None = None


@runtime_checkable
class RewardFunction(Protocol):
    """Scores finished rollouts in batches. A function that fails raises RewardError; a fatal one fails on all.

    One that fails on some of them only puts an OutsideError in the place of each of those.
    """

    name: str
    source: str

    def __call__(self, rollouts: Sequence[Mapping[str, Any]]) -> Sequence[float | OutsideError | None]:
        """``rollouts``: dicts with messages (list), task (dict), completion text and token ids. One value each."""
        ...
