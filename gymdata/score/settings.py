"""Settings of ``gymdata score``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

import pydantic

from gymdata.settings import Config
from gymdata.urls import REWARD_KEYS, refuse_userinfo


class ScoreConfig(Config):
    """``name``: of the output folder and the total (default: the rewards' names joined by +). ``threshold``: a score above
    it is a success, and a rollout that changes side is a flip. ``reward_timeout``: seconds for one batch of functions.

    ``reward_model``: a folder with a sequence classification model of one label. ``reward_url``: servers (a list, or a
    text with commas), whose mean counts; each is asked for ``request_batch`` rollouts at a time, each try within
    ``request_timeout`` seconds, with ``retries`` more tries after a passing fault. ``recipe``: a file that chooses and
    weights rewards by task; it stands alone. ``tokenizer``: whose text a server is sent (default: that of the model which
    the rollouts were collected with).
    """

    given_as: ClassVar[Mapping[str, str]] = {"path": "the run as the argument"}

    path: str
    reward: list[str] = pydantic.Field(default_factory=list)
    reward_model: str | None = None
    reward_url: list[str] = pydantic.Field(default_factory=list)
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

    @pydantic.field_validator("reward_url", mode="before")
    @classmethod
    def _several_urls(cls, value: object) -> object:
        if value is None:
            return []
        # As published, the servers may also be one text with commas.
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
            return value
        return [url for text in texts for url in re.split(r",(?=https?://)", text)]

    @pydantic.field_validator("reward_url")
    @classmethod
    def _each_once(cls, urls: list[str]) -> list[str]:
        if len(set(urls)) < len(urls):
            raise ValueError("different servers: one is given twice")
        return urls

    @pydantic.field_validator("reward_url", "reward")
    @classmethod
    def _no_userinfo(cls, value: list[str], info: pydantic.ValidationInfo) -> list[str]:
        for url in value:
            refuse_userinfo(url, "--reward-url" if info.field_name == "reward_url" else "--reward", REWARD_KEYS)
        return value

    @pydantic.model_validator(mode="after")
    def _some_reward(self) -> Self:
        others = [self.reward, self.reward_model, self.reward_url]
        if self.recipe is not None and any(others):
            raise ValueError("a recipe alone, or rewards without a recipe: put them all into the recipe")
        if self.recipe is None and not any(others):
            raise ValueError("no reward is given: --reward, --reward-model, --reward-url or --recipe names one")
        return self
