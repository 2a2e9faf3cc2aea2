"""Settings of ``gymdata collect``, and which of them make a run another run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import pydantic

from gymdata.settings import Config
from gymdata.urls import ENGINE_KEYS, ENVIRONMENT_KEYS, REWARD_KEYS, WORKFLOW_KEYS, refuse_userinfo

_KEYS = {"workflow_url": WORKFLOW_KEYS, "env": ENVIRONMENT_KEYS, "reward": REWARD_KEYS}

#: Engine arguments that change what is sampled; the others (memory, batching) are free on resume.
_ENGINE_IDENTITY = (
    "dtype",
    "max_model_len",
    "quantization",
    "logprobs_mode",
    "hf_overrides",
    "revision",
    "rope_scaling",
)


class CollectConfig(Config):
    """``gymdata collect``. Times are seconds, lengths are tokens.

    ``max_tokens`` is for one turn; ``max_context`` for prompt and generation together (default: what the engine holds);
    ``time_limit`` for one rollout; ``tool_timeout`` for one call of a tool; ``request_timeout`` for one HTTP try;
    ``reward_timeout`` for one batch. ``engine`` holds arguments for vLLM as they are. ``endpoint`` is spoken to in ids,
    ``chat_endpoint`` in messages; ``on_break``: whether a rollout whose prompt was read otherwise than sent is kept.
    ``env``: None, ``path.py:Name`` or the URL of a resource server; ``workflow_url``: where whole rollouts are made.
    """

    given_as: ClassVar[Mapping[str, str]] = {"tasks": "the tasks file as the argument"}

    tasks: str
    model: str | None = None
    endpoint: str | None = None
    chat_endpoint: str | None = None
    workflow_url: str | None = None
    on_break: Literal["keep", "fail"] = "keep"
    tokenizer: str | None = None
    chat_template: Path | None = None
    tool_parser: str = "auto"
    keep_reasoning: bool = True
    output: Path | None = None

    limit: int | None = pydantic.Field(None, ge=1)
    num_rollouts: int = pydantic.Field(1, ge=1)
    concurrency: int | None = pydantic.Field(None, ge=1)

    temperature: float = pydantic.Field(1.0, ge=0.0, allow_inf_nan=False)
    top_p: float = pydantic.Field(1.0, gt=0.0, le=1.0)
    top_k: int = pydantic.Field(0, ge=-1)
    min_p: float = pydantic.Field(0.0, ge=0.0, le=1.0)
    repetition_penalty: float = pydantic.Field(1.0, gt=0.0)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = pydantic.Field(0, ge=0)
    seed: int | None = pydantic.Field(None, ge=0, lt=2**63)

    max_tokens: int = pydantic.Field(1024, ge=1)
    max_turns: int = pydantic.Field(16, ge=1)
    max_context: int | None = pydantic.Field(None, ge=2)
    time_limit: float | None = pydantic.Field(None, gt=0.0)

    env: str | None = None
    tool_timeout: float = pydantic.Field(60.0, gt=0.0)
    reward: list[str] = pydantic.Field(default_factory=list)
    reward_timeout: float = pydantic.Field(300.0, gt=0.0)

    run_id: str | None = pydantic.Field(None, min_length=1, max_length=200)
    policy_version: int = pydantic.Field(0, ge=0)
    max_attempts: int = pydantic.Field(3, ge=1)
    give_up: bool = False
    skip_bad_rows: bool = False
    rows_per_file: int | None = pydantic.Field(None, ge=1)
    format: Literal["parquet", "jsonl"] = "parquet"
    overwrite: bool = False

    request_timeout: float = pydantic.Field(300.0, gt=0.0)
    retries: int = pydantic.Field(5, ge=0)
    allow_raw_logprobs: bool = False
    engine: dict[str, Any] = pydantic.Field(default_factory=dict)

    @pydantic.field_validator("endpoint", "chat_endpoint", "workflow_url", "env", "reward")
    @classmethod
    def _no_userinfo(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        name = str(info.field_name)
        for url in value if isinstance(value, list) else [value]:
            place = url.removeprefix("resources:") if name == "env" and url else url
            refuse_userinfo(place, f"--{name.replace('_', '-')}", _KEYS.get(name, ENGINE_KEYS))
        return value

    def sampling(self) -> dict[str, Any]:
        """What decides the distribution that tokens are drawn from."""
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "top_logprobs",
        )
        return {name: getattr(self, name) for name in names} | {"top_k": max(0, self.top_k)}

    def identity(self) -> dict[str, Any]:
        """The settings that a resumed run must share; the caller adds what only files and hashes tell."""
        limits = {name: getattr(self, name) for name in ("max_tokens", "max_turns", "max_context", "time_limit")}
        engine = {key: self.engine[key] for key in _ENGINE_IDENTITY if key in self.engine}
        modes = {
            "dtype": engine.pop("dtype", "auto"),
            "logprobs_mode": engine.pop("logprobs_mode", "processed_logprobs"),
        }
        # A chat server may render other prompts from the messages, so the two are never one run.
        protocol = {"protocol": "chat"} if self.chat_endpoint is not None else {}
        return {
            **self.sampling(),
            **limits,
            **modes,
            **protocol,
            "engine": engine,
            "policy_version": self.policy_version,
        }

    def operation(self) -> dict[str, Any]:
        """The settings that are free on resume, recorded for each attempt."""
        names = (
            "concurrency",
            "endpoint",
            "chat_endpoint",
            "workflow_url",
            "env",
            "on_break",
            "max_attempts",
            "give_up",
            "skip_bad_rows",
            "rows_per_file",
            "format",
            "tool_timeout",
            "reward_timeout",
            "request_timeout",
            "retries",
        )
        engine = {key: value for key, value in self.engine.items() if key not in _ENGINE_IDENTITY}
        return {**{name: getattr(self, name) for name in names}, "engine": engine}
