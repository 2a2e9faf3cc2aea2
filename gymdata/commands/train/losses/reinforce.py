"""REINFORCE on log-probabilities, without the ratio of every token."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gymdata.commands.train.losses._registry import Result, Tau, Tensor, Tokens, loss


def _one(ratio: Tensor) -> Tensor:
    return ratio.new_ones(ratio.shape)


@loss("−A·ℓ", "GPG, arXiv 2504.02546", "token", of_ratios=False, weight=_one, differs="none")
def gpg(batch: Tokens) -> Result:
    return -batch.advantages * batch.logprobs, batch.unlimited


@loss("−A·L where A ≥ 0, −sg(min(R, 1))·A·L where A < 0", "TOPR, arXiv 2503.14286", "sequence-sum")
def topr(batch: Tokens) -> Result:
    ratio = batch.sequence_ratio.detach()
    beyond = (batch.advantages < 0) & (ratio > 1) & batch.mask
    weight = batch.mask * ratio.clamp(max=1.0)
    return -weight.masked_fill(batch.advantages >= 0, 1.0) * batch.advantages * batch.logprobs, beyond


@loss("−(A − baseline_shift)·L", "AsymRE, arXiv 2506.20520", "sequence-sum", at_zero=True, of_ratios=False)
def asymre(
    batch: Tokens,
    *,
    baseline_shift: Annotated[float, Field(description="Baseline shift δV of asymre.")] = -0.1,
) -> Result:
    """The baseline lies below the mean reward where the shift (δV of the source) is negative."""
    return -(batch.advantages - baseline_shift) * batch.logprobs, batch.unlimited


@loss("−A·ℓ/(1 + tau)", "OPMD (Trinity-RFT), arXiv 2505.17826", "token", of_ratios=False)
def opmd(batch: Tokens, *, tau: Tau = 1.0) -> Result:
    """The simplified form of the source."""
    return -batch.advantages * batch.logprobs / (1 + tau), batch.unlimited
