"""Settings of ``gymdata record``, and which of them make a run another run."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import ClassVar, Literal

import pydantic

from gymdata.commands.collect.settings import CollectConfig, ForcedSampling, forced
from gymdata.errors import UsageError
from gymdata.rewards.setting import RewardSpecs
from gymdata.settings import Config, ServerUrls, Settings
from gymdata.urls import LOOPBACK

#: Settings that ``record`` shares with ``collect``, by their names there.
_SHARED = (
    *("model", "endpoint", "tokenizer", "chat_template", "tool_parser", "keep_reasoning", "policy_version", "engine"),
    *(
        "temperature",
        "top_logprobs",
        "sampling",
        "seed",
        "reward",
        "reward_timeout",
        "request_timeout",
        "retries",
        "wait_for_server",
    ),
    "allow_raw_logprobs",
)


class RecordConfig(Config):
    """``gymdata record``. Times are seconds, lengths are tokens."""

    key_only: ClassVar[Set[str]] = frozenset(
        ("engine", "sampling", "reward_timeout", "request_timeout", "retries", "allow_raw_logprobs", "max_depth")
    )
    sections: ClassVar[Mapping[str, str]] = {
        "model": "Model",
        "host": "Server",
        "temperature": "Sampling",
        "max_turns": "Limits",
        "reward": "Reward",
        "output": "Output",
    }

    model: str | None = pydantic.Field(None, description="Model folder, LoRA adapter folder, or served model name.")
    endpoint: ServerUrls = pydantic.Field(
        default_factory=list,
        description="Base URL of a vLLM server, with or without /v1, or @FILE of several; repeatable.",
    )
    tokenizer: str | None = pydantic.Field(None, description="Tokenizer folder, required when the model is not local.")
    chat_template: Path | None = pydantic.Field(None, description="Chat template file that replaces the model's.")
    tool_parser: str = pydantic.Field("auto", description="Tool call parser.")
    keep_reasoning: bool = pydantic.Field(True, description="Patch a known chat template that rewrites earlier turns.")
    policy_version: int = pydantic.Field(
        0, ge=0, description="Policy version; increase it when the served model changes."
    )
    engine: Settings = pydantic.Field(default_factory=dict, description="Engine arguments of vLLM, as they are.")

    host: str = pydantic.Field("127.0.0.1", description="Address to serve on; others than loopback need --token.")
    port: int = pydantic.Field(8100, ge=0, le=65535, description="Port to serve on; 0 takes a free one.")
    allow_host: list[str] = pydantic.Field(
        default_factory=list, description="Allowed Host header; repeatable (default: loopback and --host)."
    )
    token: str | None = pydantic.Field(
        None, min_length=8, description="API key that clients must send: TOKEN, or gymdata-KEY:TOKEN for session KEY."
    )
    session: str | None = pydantic.Field(
        None, pattern=r"^[\w.:-]{1,200}$", description="Session of requests that name none (default: by conversation)."
    )
    max_sessions: int = pydantic.Field(4096, ge=1, description="Maximum sessions that are open at a time.")
    max_body_bytes: int = pydantic.Field(32 * 1024**2, ge=1, description="Maximum bytes per request.")
    max_depth: int = pydantic.Field(100, ge=1, description="Maximum nesting depth per request.")

    temperature: float = pydantic.Field(
        1.0, ge=0.0, allow_inf_nan=False, description="Sampling temperature of requests that name none."
    )
    top_logprobs: int = pydantic.Field(
        0, ge=0, le=64, description="Record the top K logprobs per token, whatever clients request."
    )
    sampling: Settings = pydantic.Field(
        default_factory=dict, description="Other sampling parameters of vLLM for requests that do not name them."
    )
    force: ForcedSampling
    seed: int | None = pydantic.Field(None, ge=0, lt=2**63, description="Random seed.")

    max_turns: int | None = pydantic.Field(None, ge=1, description="Maximum model calls per session.")
    max_tokens_total: int | None = pydantic.Field(None, ge=1, description="Maximum generated tokens per session.")
    max_context: int | None = pydantic.Field(
        None, ge=2, description="Maximum tokens of prompt and completion (default: the engine's limit)."
    )
    idle_timeout: float = pydantic.Field(
        1800.0, gt=0.0, description="Seconds without a request after which a session ends as truncated."
    )

    reward: RewardSpecs = pydantic.Field(default_factory=list)
    reward_timeout: float = pydantic.Field(300.0, gt=0.0, description="Seconds per batch of rewards.")
    output: Path = pydantic.Field(description="Run folder; resumed if it exists.")
    overwrite: bool = pydantic.Field(False, description="Start over, replacing existing output.")
    run_id: str | None = pydantic.Field(None, min_length=1, max_length=200, description="Run ID (default: random).")
    format: Literal["parquet", "jsonl"] = pydantic.Field("parquet", description="File format.")

    wait_for_server: float = pydantic.Field(
        0.0, ge=0.0, allow_inf_nan=False, description="Seconds to wait for a server that went away while recording."
    )
    request_timeout: float = pydantic.Field(300.0, gt=0.0, description="Seconds per HTTP request.")
    retries: int = pydantic.Field(2, ge=0, description="Retries after a transient failure.")
    allow_raw_logprobs: bool = pydantic.Field(
        False, description="Record although the server's logprobs ignore the sampling settings (L304)."
    )

    def checked(self) -> RecordConfig:
        """This, or UsageError for a server that others could use."""
        forced(self.force)
        if self.host not in LOOPBACK and self.token is None:
            raise UsageError(
                f"--host {self.host} serves other machines, and no --token was given",
                hint="give --token TEXT: clients then send it as their API key; or leave --host out",
            )
        return self

    def as_collect(self) -> CollectConfig:
        """The settings of the engine, tokenizer and rewards."""
        return CollectConfig.of({"tasks": "-", **{name: getattr(self, name) for name in _SHARED}}, "settings")

    def limits(self) -> Settings:
        names = ("max_turns", "max_tokens_total", "max_context")
        return {name: getattr(self, name) for name in names}
