"""Importance weights that are clipped while every token keeps its gradient. MiniMax-M1, 2025, arXiv 2506.13585."""

from __future__ import annotations

from gymdata.commands.train.losses._registry import ClipHigh, ClipLow, Curve, Result, Tensor, Tokens, loss


def _clipped(ratio: Tensor, clip_low: float, clip_high: float) -> Tensor:
    return ratio.clamp(1 - clip_low, 1 + clip_high)


@loss(
    "−sg(clip(r, 1 − clip_low, 1 + clip_high))·A·ℓ",
    "MiniMax-M1, arXiv 2506.13585",
    "token",
    weight=_clipped,
    differs="TRL has no lower bound, and its epsilon_high is 1 + clip_high",
    curve=Curve("CISPO", "capped"),
)
def cispo(batch: Tokens, *, clip_low: ClipLow = 1.0, clip_high: ClipHigh = 4.0) -> Result:
    ratio = batch.ratio.detach()
    weight = _clipped(ratio, clip_low, clip_high)
    return -weight * batch.advantages * batch.logprobs, ratio != weight
