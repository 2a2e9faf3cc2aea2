"""Settings of ``gymdata audit``, and of every forward pass over saved ids."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import ClassVar, Literal

import pydantic

from gymdata.errors import UsageError
from gymdata.settings import Config, Dtype, OnlyWith, ServerUrls, without_userinfo
from gymdata.urls import ENGINE_KEYS


class AuditConfig(Config):
    """``gymdata audit``."""

    key_only: ClassVar[Set[str]] = frozenset({"request_timeout"})
    only_with: ClassVar[OnlyWith] = {
        "wait_for_server": ("{endpoint}", lambda c: bool(c.endpoint)),
    }
    sections: ClassVar[Mapping[str, str]] = {"model": "Model", "limit": "Comparison", "device": "Forward pass"}

    model: str | None = pydantic.Field(None, description="Model or LoRA adapter folder (default: the run's policy).")
    endpoint: ServerUrls = pydantic.Field(
        default_factory=list,
        description="Base URL of a vLLM server that scores the tokens, or @FILE of several; repeatable.",
    )
    request_timeout: float = pydantic.Field(300.0, gt=0.0, description="Seconds per request.")
    wait_for_server: float = pydantic.Field(
        600.0, ge=0.0, description="Seconds to wait for a server that stops answering."
    )
    limit: int | None = pydantic.Field(None, ge=1, description="Audit N rollouts, evenly spaced.")
    tolerance: float | None = pydantic.Field(
        None, gt=0.0, description="|Δ| that few tokens may exceed (default: 1e-3 for float32, 0.5 for bfloat16)."
    )
    worst: int = pydantic.Field(10, ge=0, description="Tokens to show.")
    write_as: Literal["ref_logprobs"] | None = pydantic.Field(
        None, description="Also write recomputed logprobs (and entropies) as this column."
    )
    device: str | None = pydantic.Field(None, description="cpu, cuda or cuda:N (default: cuda if available).")
    dtype: Dtype = pydantic.Field("auto", description="dtype of the forward pass.")
    batch_tokens: int = pydantic.Field(16_384, ge=1, description="Tokens per forward pass, padding included.")

    _no_userinfo = without_userinfo("endpoint", keys=ENGINE_KEYS)

    def checked(self) -> AuditConfig:
        """This, or UsageError for settings of a forward pass in this process together with servers."""
        local = [name for name in ("device", "dtype", "batch_tokens", "write_as") if name in self.model_fields_set]
        if self.endpoint and local and (value := getattr(self, local[0])) not in (None, "auto"):
            raise UsageError(
                f"--{local[0].replace('_', '-')} {value} and --endpoint were both given",
                hint="a server decides how it computes, and gives no entropies: leave one of them out",
            )
        return self
