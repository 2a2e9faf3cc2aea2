"""Settings of ``gymdata filter``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pydantic

from gymdata.settings import Config, OnlyWith


class FilterConfig(Config):
    """Which rollouts are kept. The steps run in this order, each on what the one before left.

    Conditions are over rollout and group columns. Group columns always describe the group as it came in, before any step.
    """

    only_with: ClassVar[OnlyWith] = {"best_by": ("{best_n}", lambda c: c.best_n is not None)}
    sections: ClassVar[Mapping[str, str]] = {"where": "Selection", "split_by": "Split"}

    where: list[str] = pydantic.Field(
        default_factory=list, description='Keep rollouts that satisfy this, as "reward > 0.5"; repeatable.'
    )
    group_where: list[str] = pydantic.Field(
        default_factory=list, description='Keep groups that satisfy this, as "min_reward < max_reward"; repeatable.'
    )
    dedupe: bool = pydantic.Field(
        False,
        description="Keep one of the rollouts of a group with identical tokens: with --best-n the best, else the first.",
    )
    best_n: int | None = pydantic.Field(None, ge=1, description="Keep the best N rollouts per group, after --dedupe.")
    best_by: str = pydantic.Field("reward", description="Number that ranks rollouts for --best-n.")
    balance: str | None = pydantic.Field(None, description="Keep the same number of rollouts per value of this column.")
    split_by: Literal["task"] | None = pydantic.Field(None, description="Write a train and a test file, split by task.")
    test_share: float | None = pydantic.Field(
        None, gt=0.0, lt=1.0, description="Share of tasks in the test file (default: 0.1)."
    )
    seed: int = pydantic.Field(0, description="Random seed.")

    @pydantic.field_validator("where", "group_where", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @property
    def share(self) -> float | None:
        """The share of the tasks that goes to the second file, None without a split."""
        return self.test_share or (0.1 if self.split_by else None)
