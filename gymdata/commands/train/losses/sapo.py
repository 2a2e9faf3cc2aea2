"""A soft gate in place of a clipped ratio; its gradient at r = 1 is that of REINFORCE. Gao et al. 2025, arXiv 2511.20347."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gymdata.commands.train.losses._registry import Result, Tokens, loss


@loss(
    "−σ(τ·(r − 1))·4/τ·A, τ = tau_positive where A > 0, else tau_negative",
    "SAPO, arXiv 2511.20347",
    "sequence-mean",
    differs="none",
)
def sapo(
    batch: Tokens,
    *,
    tau_positive: Annotated[float, Field(description="Temperature of sapo's gate where A > 0.", gt=0.0)] = 1.0,
    tau_negative: Annotated[float, Field(description="Temperature of sapo's gate elsewhere.", gt=0.0)] = 1.05,
) -> Result:
    tau = batch.advantages.new_full(batch.mask.shape, tau_negative).masked_fill(batch.advantages > 0, tau_positive)
    return -(tau * (batch.ratio - 1)).sigmoid() * 4 / tau * batch.advantages, batch.unlimited
