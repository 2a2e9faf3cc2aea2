"""A reward for politeness."""

from __future__ import annotations

from typing import Any

from gymdata.rewards.named import REWARDS, NamedReward


@REWARDS.register("polite")
class Polite(NamedReward):
    """The last message says please or thank you."""

    def check(self, text: str, task: Any) -> float:
        return float("please" in text.lower() or "thank you" in text.lower())
