"""REINFORCE on log-probabilities, without the ratio of every token."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gymdata.train.losses._registry import Result, Tau, Tokens, loss


@loss("−A·ℓ", "GPG, arXiv 2504.02546", "token", of_ratios=False, differs="none")
def gpg(at: Tokens) -> Result:
    return -at.advantages * at.logprobs, at.unlimited


@loss("−A·L where A ≥ 0, −sg(min(R, 1))·A·L where A < 0", "TOPR, arXiv 2503.14286", "sequence-sum")
def topr(at: Tokens) -> Result:
    ratio = at.sequence_ratio.detach()
    beyond = (at.advantages < 0) & (ratio > 1) & at.mask
    weight = at.mask * ratio.clamp(max=1.0)
    return -weight.masked_fill(at.advantages >= 0, 1.0) * at.advantages * at.logprobs, beyond


@loss("−(A − baseline_shift)·L", "AsymRE, arXiv 2506.20520", "sequence-sum", at_zero=True, of_ratios=False)
def asymre(
    at: Tokens,
    *,
    baseline_shift: Annotated[float, Field(description="Baseline shift δV of asymre.")] = -0.1,
) -> Result:
    """The baseline lies below the mean reward where the shift (δV of the source) is negative."""
    return -(at.advantages - baseline_shift) * at.logprobs, at.unlimited


@loss("−A·ℓ/(1 + tau)", "OPMD (Trinity-RFT), arXiv 2505.17826", "token", of_ratios=False)
def opmd(at: Tokens, *, tau: Tau = 1.0) -> Result:
    """The simplified form of the source."""
    return -at.advantages * at.logprobs / (1 + tau), at.unlimited
