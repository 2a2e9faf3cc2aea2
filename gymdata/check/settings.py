"""Settings of ``gymdata check``."""

from __future__ import annotations

from collections.abc import Set
from typing import ClassVar

import pydantic

from gymdata.rewards.setting import RewardSpecs
from gymdata.settings import Config, without_userinfo
from gymdata.urls import REWARD_KEYS


class CheckConfig(Config):
    """What is probed: a model's chat template, the server at an endpoint, a reward on saved rollouts, or an agent."""

    key_only: ClassVar[Set[str]] = frozenset({"reward_timeout"})

    model: str | None = pydantic.Field(
        None, description="Model or tokenizer folder; with --endpoint, the served model name."
    )
    endpoint: str | None = pydantic.Field(None, description="Base URL of a vLLM server to probe.")
    chat_template: str | None = pydantic.Field(None, description="Chat template file that replaces the model's.")
    reward: RewardSpecs = pydantic.Field(default_factory=list)
    data: str | None = pydantic.Field(
        None, description="Rollouts to try --reward on (run folder, file or glob), or tasks."
    )
    agent: str | None = pydantic.Field(
        None, description="Agent of collect --agent; what it needs and is missing is reported."
    )
    limit: int = pydantic.Field(20, ge=1, description="Rollouts to try --reward on, the first N.")
    reward_timeout: float = pydantic.Field(300.0, gt=0.0, description="Seconds per rollout.")

    _no_userinfo = without_userinfo("reward", keys=REWARD_KEYS)
