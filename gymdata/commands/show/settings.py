"""Settings of ``gymdata show``."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pydantic

from gymdata.settings import Config, OnlyWith

#: The value of ``pair`` for the first one, whatever its id is.
FIRST = "first"


class ShowConfig(Config):
    """``gymdata show``. What is shown: one of ``task``, ``best``, ``worst``, ``random`` and ``pair``, a rollout by its id,
    or, without any, the first rollouts."""

    only_with: ClassVar[OnlyWith] = {"reward": ("{best:True} or {worst:True}", lambda c: c.best or c.worst)}
    not_with: ClassVar[OnlyWith] = {"limit": ("{random} or {pair}", lambda c: c.random is None and c.pair is None)}

    task: str | None = pydantic.Field(None, description="All rollouts of this task.")
    best: bool = pydantic.Field(False, description="The rollout with the highest reward, or the N highest with -n.")
    worst: bool = pydantic.Field(False, description="The rollout with the lowest reward, or the N lowest with -n.")
    reward: str | None = pydantic.Field(
        None, description="Score for --best and --worst (default: the only re-scoring; without one the total reward)."
    )
    limit: int | None = pydantic.Field(None, ge=1, description="Show N rollouts (default: 1, or all of --task).")
    random: int | None = pydantic.Field(None, ge=1, description="N rollouts at random.")
    pair: str | None = pydantic.Field(
        None, description=f"A pair by its ID, or {FIRST}: chosen and rejected from the fork."
    )
    seed: int = pydantic.Field(0, description="Random seed of --random.")
    tokenizer: Path | None = pydantic.Field(
        None, description="Tokenizer folder for the text of tokens (default: that of the model in run.json)."
    )
