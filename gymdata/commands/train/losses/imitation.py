"""Supervised losses that the advantages weigh or choose."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gymdata.commands.train.losses._registry import LARGEST, Result, Tau, Tokens, loss


@loss("−min(exp(A/tau), weight_max)·ℓ", "AWR, arXiv 1910.00177", "token", at_zero=True, of_ratios=False)
def awr(
    batch: Tokens,
    *,
    tau: Tau = 1.0,
    weight_max: Annotated[float, Field(description="Cap of awr's weight.", gt=0.0)] = 20.0,
) -> Result:
    """Peng et al. 2019 (there β)."""
    weight = (batch.advantages / tau).clamp(max=LARGEST).exp()
    return -weight.clamp(max=weight_max) * batch.logprobs, weight > weight_max


@loss("−[A > 0]·ℓ", "filtered behavior cloning (CRR, binary), arXiv 2006.15134", "token", of_ratios=False)
def filtered_bc(batch: Tokens) -> Result:
    """What did better than its baseline."""
    return -batch.logprobs * (batch.advantages > 0), batch.advantages <= 0
