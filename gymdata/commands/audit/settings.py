"""Settings of ``gymdata audit``, and of every forward pass over saved ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import pydantic

from gymdata.settings import Config, Dtype


class AuditConfig(Config):
    """``gymdata audit``."""

    sections: ClassVar[Mapping[str, str]] = {"model": "Model", "limit": "Comparison", "device": "Forward pass"}

    model: str | None = pydantic.Field(None, description="Model or LoRA adapter folder (default: the run's policy).")
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
