"""REINFORCE with importance weights of tokens or sequences, truncated or masked where they are large."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gymdata.commands.train.losses._registry import Cap, ClipHigh, ClipLow, Curve, Result, Tensor, Tokens, loss


def _truncated(ratio: Tensor, tis_cap: float) -> Tensor:
    return ratio.clamp(max=tis_cap)


def _masked(ratio: Tensor, clip_low: float, clip_high: float) -> Tensor:
    return ratio.masked_fill((ratio < 1 - clip_low) | (ratio > 1 + clip_high), 0.0)


@loss(
    "−sg(min(r, tis_cap))·A·ℓ",
    "truncated importance sampling of each token, arXiv 2510.13786",
    "token",
    weight=_truncated,
    curve=Curve("TIS", "capped"),
)
def tis_reinforce(batch: Tokens, *, tis_cap: Cap = 2.0) -> Result:
    """As ScaleRL describes it."""
    ratio = batch.ratio.detach()
    return -_truncated(ratio, tis_cap) * batch.advantages * batch.logprobs, ratio > tis_cap


@loss("−sg(min(R, tis_cap))·A·ℓ", "truncated importance sampling, arXiv 2503.14286", "token")
def tis_sequence(batch: Tokens, *, tis_cap: Cap = 2.0) -> Result:
    """TIS in section 2 of the source; verl's rollout correction applies the weight to the tokens in the same way."""
    ratio = batch.sequence_ratio.detach()
    return -ratio.clamp(max=tis_cap) * batch.advantages * batch.logprobs, (ratio > tis_cap) & batch.mask


@loss(
    "−sg(w·[w ≤ tis_cap])·A·ℓ, w = r with mis_level token, R with sequence",
    "masked importance sampling, arXiv 2510.26788",
    "token",
)
def mis(
    batch: Tokens,
    *,
    tis_cap: Cap = 2.0,
    mis_level: Annotated[
        Literal["token", "sequence"], Field(description="Level of mis's importance weights: token or sequence.")
    ] = "sequence",
) -> Result:
    """What ``tis_*`` truncates has no part at all."""
    ratio = (batch.sequence_ratio if mis_level == "sequence" else batch.ratio).detach()
    return -ratio.masked_fill(ratio > tis_cap, 0.0) * batch.advantages * batch.logprobs, (ratio > tis_cap) & batch.mask


@loss(
    "−sg(r·[1 − clip_low ≤ r ≤ 1 + clip_high])·A·ℓ",
    "IcePop (Ring-1T), arXiv 2510.18855",
    "token",
    weight=_masked,
    differs="the source has α = 1 − clip_low and β = 1 + clip_high",
    curve=Curve("IcePop", "masked"),
)
def icepop(batch: Tokens, *, clip_low: ClipLow = 0.5, clip_high: ClipHigh = 4.0) -> Result:
    ratio = batch.ratio.detach()
    weight = _masked(ratio, clip_low, clip_high)
    return -weight * batch.advantages * batch.logprobs, weight != ratio
