"""Importance weights that are clipped while every token keeps its gradient. MiniMax-M1, 2025, arXiv 2506.13585."""

from __future__ import annotations

from gymdata.commands.train.losses._registry import ClipHigh, ClipLow, Curve, Result, Tokens, loss


@loss(
    "−sg(clip(r, 1 − clip_low, 1 + clip_high))·A·ℓ",
    "MiniMax-M1, arXiv 2506.13585",
    "token",
    differs="TRL has no lower bound, and its epsilon_high is 1 + clip_high",
    curve=Curve("CISPO", "capped"),
)
def cispo(batch: Tokens, *, clip_low: ClipLow = 1.0, clip_high: ClipHigh = 4.0) -> Result:
    ratio = batch.ratio.detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * batch.advantages * batch.logprobs, ratio != weight
