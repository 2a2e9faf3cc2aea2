"""Proximal policy optimization: the surrogate with a clipped ratio. Schulman et al. 2017, arXiv 1707.06347."""

from __future__ import annotations

from gymdata.commands.train.losses._registry import ClipHigh, ClipLow, Curve, Result, Tensor, Tokens, loss


@loss(
    "−min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A)",
    "PPO, arXiv 1707.06347",
    "token",
    differs="verl also bounds the loss where A < 0 (dual clip, ratio 3); TRL's `loss_type` grpo is `sequence-mean`, "
    "dapo `token`, dr_grpo `constant`",
    curve=Curve("PPO-clip", "clipped"),
)
def ppo_clip(batch: Tokens, *, clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2) -> Result:
    return clipped_surrogate(batch, batch.ratio, clip_low, clip_high)


def clipped_surrogate(batch: Tokens, ratio: Tensor, low: float, high: float) -> Result:
    """−min(ratio·A, clip(ratio)·A), and where it has no gradient."""
    surrogate = (ratio * batch.advantages).minimum(ratio.clamp(1 - low, 1 + high) * batch.advantages)
    beyond = ((ratio > 1 + high) & (batch.advantages > 0)) | ((ratio < 1 - low) & (batch.advantages < 0))
    return -surrogate, beyond
