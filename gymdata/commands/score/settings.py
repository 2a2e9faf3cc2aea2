"""Settings of ``gymdata score``."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import ClassVar, Self

import pydantic

from gymdata.errors import with_options
from gymdata.rewards.setting import RewardSpecs
from gymdata.settings import Config, ServerUrls


class ScoreConfig(Config):
    """``gymdata score``."""

    given_as: ClassVar[Mapping[str, str]] = {"path": "the run as the argument"}
    key_only: ClassVar[Set[str]] = frozenset({"request_timeout", "request_batch", "retries"})
    sections: ClassVar[Mapping[str, str]] = {"reward": "Rewards", "reward_timeout": "Requests", "name": "Scores"}

    path: str = pydantic.Field(description="Run folder, file or glob of rollouts.")
    reward: RewardSpecs = pydantic.Field(default_factory=list)
    reward_model: str | None = pydantic.Field(
        None, description="Reward model folder, as written by `gymdata train-reward`."
    )
    reward_url: ServerUrls = pydantic.Field(
        default_factory=list, description="Reward server (POST queries, prompts); the mean of several is used."
    )
    recipe: Path | None = pydantic.Field(None, description="YAML file: label of a task → rewards with their weights.")
    limit: int | None = pydantic.Field(None, ge=1, description="Score only the first N rollouts.")
    tokenizer: str | None = pydantic.Field(
        None, description="Tokenizer that decodes text for --reward-url (default: the policy's)."
    )
    reward_timeout: float = pydantic.Field(300.0, gt=0.0, description="Seconds per batch.")
    request_timeout: float = pydantic.Field(60.0, gt=0.0, description="Seconds per request to a reward server.")
    request_batch: int = pydantic.Field(16, ge=1, description="Rollouts per request to a reward server.")
    retries: int = pydantic.Field(3, ge=0, description="Retries after a transient failure.")
    name: str | None = pydantic.Field(
        None, pattern=r"^[\w.+-]+$", description="Name of these scores (default: the rewards' names)."
    )
    output: Path | None = pydantic.Field(None, description="Output folder (default: RUN/scores-NAME).")
    overwrite: bool = pydantic.Field(False, description="Start over, replacing existing output.")

    @pydantic.model_validator(mode="after")
    def _some_reward(self) -> Self:
        others = [self.reward, self.reward_model, self.reward_url]
        if self.recipe is not None and any(others):
            raise ValueError("a recipe alone, or rewards without a recipe: put them all into the recipe")
        if self.recipe is None and not any(others):
            others_of = "{reward}, {reward_model}, {reward_url} or {recipe}"
            raise ValueError(with_options(f"no reward given: {others_of} names one, as in {{reward:numeric}}"))
        return self
