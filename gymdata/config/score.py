"""Settings of ``gymdata score``."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import pydantic

from gymdata.config.base import Config
from gymdata.config.urls import REWARD_KEYS, refuse_userinfo


class ScoreConfig(Config):
    """``name``: of the output folder and the total (default: the rewards' names joined by +). ``threshold``: a score above
    it is a success, and a rollout that changes side is a flip. ``reward_timeout``: seconds for one batch of functions.

    ``reward_model``: a folder with a sequence classification model of one label. ``reward_url``: a server that is asked
    ``request_batch`` rollouts at a time, each try within ``request_timeout`` seconds, ``retries`` more tries after a
    passing fault. ``recipe``: a file that chooses and weights rewards by task; it stands alone. ``tokenizer``: whose text a
    server is sent (default: that of the model which the rollouts were collected with).
    """

    path: str
    reward: list[str] = pydantic.Field(default_factory=list)
    reward_model: str | None = None
    reward_url: str | None = None
    recipe: Path | None = None
    tokenizer: str | None = None
    name: str | None = pydantic.Field(None, pattern=r"^[\w.+-]+$")
    output: Path | None = None
    threshold: float = 0.5
    reward_timeout: float = pydantic.Field(300.0, gt=0.0)
    request_timeout: float = pydantic.Field(60.0, gt=0.0)
    request_batch: int = pydantic.Field(16, ge=1)
    retries: int = pydantic.Field(3, ge=0)
    overwrite: bool = False

    @pydantic.field_validator("reward_url", "reward")
    @classmethod
    def _no_userinfo(cls, value: str | list[str] | None) -> str | list[str] | None:
        for url in value if isinstance(value, list) else [value]:
            refuse_userinfo(url, "--reward" if isinstance(value, list) else "--reward-url", REWARD_KEYS)
        return value

    @pydantic.model_validator(mode="after")
    def _some_reward(self) -> Self:
        others = [self.reward, self.reward_model, self.reward_url]
        if self.recipe is not None and any(others):
            raise ValueError("a recipe alone, or rewards without a recipe: put them all into the recipe")
        if self.recipe is None and not any(others):
            raise ValueError("no reward is given: --reward, --reward-model, --reward-url or --recipe names one")
        return self
