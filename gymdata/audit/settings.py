"""Settings of ``gymdata audit``, and of every forward pass over saved ids."""

from __future__ import annotations

from typing import Literal

import pydantic

from gymdata.settings import Config, Dtype


class AuditConfig(Config):
    """``model``: a folder (a LoRA folder, too); the run's own policy when not given. ``limit``: so many rollouts, evenly
    spread over the file.

    ``tolerance``: largest |Δ| that counts as rounding (default: 1e-3 for float32, more for coarser numbers). ``worst``: how
    many tokens are shown. ``write_as``: also write the recomputed log-probs (and entropies) as this column.
    ``device``, ``dtype``: where and in which numbers to compute; ``batch_tokens``: with padding, at a time.
    """

    model: str | None = None
    limit: int | None = pydantic.Field(None, ge=1)
    tolerance: float | None = pydantic.Field(None, gt=0.0, allow_inf_nan=False)
    worst: int = pydantic.Field(10, ge=0)
    write_as: Literal["ref_logprobs"] | None = None
    device: str | None = None
    dtype: Dtype = "auto"
    batch_tokens: int = pydantic.Field(16_384, ge=1)
