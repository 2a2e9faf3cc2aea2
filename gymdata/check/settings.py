"""Settings of ``gymdata check``."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, ClassVar

import pydantic

from gymdata.collect.task_shapes import checked
from gymdata.rewards.setting import RewardSpecs
from gymdata.settings import Config, without_userinfo
from gymdata.urls import REWARD_KEYS


class CheckConfig(Config):
    """What is probed: a chat template, a server, an environment, or a reward on saved rollouts."""

    key_only: ClassVar[Set[str]] = frozenset({"reward_timeout", "env_args", "tool_timeout"})

    model: str | None = pydantic.Field(
        None, description="Model or tokenizer folder; with --endpoint, the served model name."
    )
    endpoint: str | None = pydantic.Field(None, description="Base URL of a vLLM server to probe.")
    chat_template: str | None = pydantic.Field(None, description="Chat template file that replaces the model's.")
    reward: RewardSpecs = pydantic.Field(default_factory=list)
    data: str | None = pydantic.Field(
        None, description="Rollouts to try --reward on (run folder, file or glob), or tasks, as for --env."
    )
    map: list[str] = pydantic.Field(
        default_factory=list, description="Column that a field of the tasks is read from, as for collect; repeatable."
    )
    env: str | None = pydantic.Field(
        None, description="Environment in Python to try without an engine, path.py:Name; --tasks gives it tasks."
    )
    env_args: dict[str, Any] = pydantic.Field(default_factory=dict, description="Arguments of the environment's class.")
    play: bool = pydantic.Field(False, description="Play --env by hand: a line is a message, or TOOL {JSON} a call.")
    tool_timeout: float = pydantic.Field(1.0, gt=0.0, description="Seconds per call of the environment's code.")
    limit: int = pydantic.Field(
        20, ge=1, description="Rollouts to try --reward on, or tasks of --env (there 3 unless given), the first N."
    )
    reward_timeout: float = pydantic.Field(300.0, gt=0.0, description="Seconds per rollout.")

    _fields_of_tasks = pydantic.field_validator("map", mode="before")(checked)
    _no_userinfo = without_userinfo("reward", keys=REWARD_KEYS)
