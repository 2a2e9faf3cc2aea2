"""Settings of ``gymdata check``."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, ClassVar

import pydantic

from gymdata.commands.collect.task_shapes import checked
from gymdata.settings import Config, OnlyWith


class CheckConfig(Config):
    """What is probed: a chat template, a server, or an environment."""

    key_only: ClassVar[Set[str]] = frozenset({"env_args", "tool_timeout"})
    only_with: ClassVar[OnlyWith] = dict.fromkeys(
        ("tasks", "map", "env_args", "play", "tool_timeout", "limit"), ("{env}", lambda config: config.env is not None)
    )
    not_with: ClassVar[OnlyWith] = dict.fromkeys(
        ("model", "endpoint", "chat_template"), ("{env}", lambda config: config.env is None)
    )

    model: str | None = pydantic.Field(
        None, description="Model or tokenizer folder; with --endpoint, the served model name."
    )
    endpoint: str | None = pydantic.Field(None, description="Base URL of a vLLM server to probe.")
    chat_template: str | None = pydantic.Field(None, description="Chat template file that replaces the model's.")
    tasks: str | None = pydantic.Field(None, description="Tasks that --env is tried on: file or glob.")
    map: list[str] = pydantic.Field(
        default_factory=list, description="Column that a field of the tasks is read from, as for collect; repeatable."
    )
    env: str | None = pydantic.Field(
        None, description="Environment in Python to try without an engine, path.py:Name; --tasks gives it tasks."
    )
    env_args: dict[str, Any] = pydantic.Field(default_factory=dict, description="Arguments of the environment's class.")
    play: bool = pydantic.Field(False, description="Play --env by hand: a line is a message, or TOOL {JSON} a call.")
    tool_timeout: float = pydantic.Field(1.0, gt=0.0, description="Seconds per call of the environment's code.")
    limit: int = pydantic.Field(3, ge=1, description="Tasks of --env that are tried, the first N.")

    _fields_of_tasks = pydantic.field_validator("map", mode="before")(checked)
