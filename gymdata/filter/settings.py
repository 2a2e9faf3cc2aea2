"""Settings of ``gymdata filter``."""

from __future__ import annotations

from typing import Any, Literal

import pydantic

from gymdata.settings import Config


class FilterConfig(Config):
    """Which rollouts are kept. The steps run in this order, each on what the one before left.

    ``where``: conditions over rollout and group columns. ``group_where``: conditions over group columns; a group stays or
    goes whole. Group columns always describe the group as it came in, before any step.
    ``dedupe``: of rollouts of a group with the same generated tokens, the one with the lowest index stays.
    ``best_n``: so many of each group, the highest ``best_by`` first (an expression that gives a number).
    ``balance``: a column or a field of the task; as many rollouts of each of its values as the rarest has, drawn by seed.
    ``split_by``, ``test_share``: that share of the tasks, drawn by seed, goes to a second file.
    """

    where: list[str] = pydantic.Field(default_factory=list)
    group_where: list[str] = pydantic.Field(default_factory=list)
    dedupe: bool = False
    best_n: int | None = pydantic.Field(None, ge=1)
    best_by: str = "reward"
    balance: str | None = None
    split_by: Literal["task"] | None = None
    test_share: float | None = pydantic.Field(None, gt=0.0, lt=1.0)
    seed: int = 0

    @pydantic.field_validator("where", "group_where", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @property
    def share(self) -> float | None:
        """The share of the tasks that goes to the second file, None without a split."""
        return self.test_share or (0.1 if self.split_by else None)
