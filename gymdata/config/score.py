"""Settings of ``gymdata score``."""

from __future__ import annotations

from pathlib import Path

import pydantic

from gymdata.config.base import Config


class ScoreConfig(Config):
    """``name``: of the output folder and the total (default: the rewards' names joined by +). ``threshold``: a score above
    it is a success, and a rollout that changes side is a flip. ``reward_timeout``: seconds for one batch."""

    path: str
    reward: list[str] = pydantic.Field(min_length=1)
    name: str | None = pydantic.Field(None, pattern=r"^[\w.+-]+$")
    output: Path | None = None
    threshold: float = 0.5
    reward_timeout: float = pydantic.Field(300.0, gt=0.0)
    overwrite: bool = False
