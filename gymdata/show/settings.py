"""Settings of ``gymdata show``."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pydantic

from gymdata.settings import Config, OnlyWith


class ShowConfig(Config):
    """``gymdata show``. What is shown: one of ``task``, ``best``, ``worst``, ``random`` and ``pair``, a rollout by its id,
    or, without any, the first rollout."""

    only_with: ClassVar[OnlyWith] = {"reward": ("--best or --worst", lambda c: c.best or c.worst)}

    task: str | None = pydantic.Field(None, description="All rollouts of this task.")
    best: bool = pydantic.Field(False, description="The rollout with the highest reward.")
    worst: bool = pydantic.Field(False, description="The rollout with the lowest reward.")
    reward: str | None = pydantic.Field(
        None,
        description="Score for --best and --worst; after a re-scoring the newest (default: the total reward).",
    )
    random: int | None = pydantic.Field(None, ge=1, description="N rollouts at random.")
    pair: str | None = pydantic.Field(None, description="A pair: chosen and rejected from the fork.")
    seed: int = pydantic.Field(0, description="Random seed of --random.")
    tokenizer: Path | None = pydantic.Field(
        None, description="Tokenizer folder for the text of tokens (default: that of the model in run.json)."
    )
