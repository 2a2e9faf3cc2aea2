"""The few tokens whose log-prob and advantage vary most together lose entropy: they are left out, or held by a KL. Cui et
al. 2025, arXiv 2505.22617.

Covariances are of the tokens that are run together, as in the published code, so these losses depend on the batch size.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gymdata.commands.train.losses._registry import ClipHigh, ClipLow, Result, Tensor, Tokens, loss
from gymdata.commands.train.losses.ppo_clip import clipped_surrogate

CovarianceRatio = Annotated[
    float, Field(description="Share of a batch's tokens that the covariance chooses, at least one.", gt=0.0, le=1.0)
]


def _covariance(batch: Tokens) -> Tensor:
    """(A − mean A)·(ℓ − mean ℓ) of each token over all tokens of the batch."""
    count = batch.mask.sum().clamp(min=1)
    logprobs = batch.logprobs.detach()
    return (batch.advantages - batch.advantages.sum() / count) * (logprobs - logprobs.sum() / count)


def _how_many(batch: Tokens, ratio: float) -> int:
    return max(int(ratio * int(batch.mask.sum())), 1)


@loss(
    "that of ppo_clip; 0 for cov_ratio of the tokens, drawn among those with cov_low < (A − mean A)·(ℓ − mean ℓ) < cov_high",
    "Clip-Cov, arXiv 2505.22617",
    "token",
    over_batch=True,
    differs="none; tokens are drawn by torch's generator, so by the seed",
)
def clip_cov(
    batch: Tokens,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    cov_ratio: CovarianceRatio = 2e-4,
    cov_low: Annotated[float, Field(description="Lower bound of the covariances that clip_cov draws from.")] = 1.0,
    cov_high: Annotated[float, Field(description="Upper bound of the covariances that clip_cov draws from.")] = 5.0,
) -> Result:
    tokens, clipped = clipped_surrogate(batch, batch.ratio, clip_low, clip_high)
    covariance = _covariance(batch)
    drawn = ((covariance > cov_low) & (covariance < cov_high) & batch.mask & ~clipped).nonzero()
    order = batch.saved.new_empty(len(drawn)).uniform_().argsort()
    drawn = drawn[order[: _how_many(batch, cov_ratio)]]
    left_out = batch.unlimited
    left_out[drawn[:, 0], drawn[:, 1]] = True
    return tokens.masked_fill(left_out, 0.0), clipped | left_out


@loss(
    "−r·A; + kl_weight·|ℓ − ℓ_saved| for the cov_ratio of the tokens with the largest (A − mean A)·(ℓ − mean ℓ)",
    "KL-Cov, arXiv 2505.22617",
    "token",
    over_batch=True,
    differs="none",
)
def kl_cov(
    batch: Tokens,
    *,
    cov_ratio: CovarianceRatio = 2e-4,
    kl_weight: Annotated[float, Field(description="Weight of the distance to the sampler in kl_cov.", ge=0.0)] = 1.0,
) -> Result:
    covariance = _covariance(batch).masked_fill(~batch.mask, -float("inf")).flatten()
    chosen = batch.unlimited
    chosen.view(-1)[covariance.topk(min(_how_many(batch, cov_ratio), len(covariance))).indices] = True
    chosen = chosen & batch.mask
    distance = (batch.logprobs - batch.saved).abs()
    return -batch.ratio * batch.advantages + kl_weight * distance * chosen, chosen
