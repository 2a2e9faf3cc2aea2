"""Ratios of whole sequences as the geometric mean of those of their tokens: GSPO and GMPO."""

from __future__ import annotations

from gymdata.commands.train.losses._registry import ClipHigh, ClipLow, Curve, Result, Tokens, loss
from gymdata.commands.train.losses.ppo_clip import clipped_surrogate


@loss(
    "−min(s·A, clip(s, 1 − clip_low, 1 + clip_high)·A)",
    "GSPO, arXiv 2507.18071",
    "sequence-mean",
    differs="none",
    curve=Curve("GSPO", "clipped", of="sequence"),
)
def gspo(batch: Tokens, *, clip_low: ClipLow = 3e-4, clip_high: ClipHigh = 4e-4) -> Result:
    """In the form GSPO-token of the source: the gradient of s reaches each token through its own log-prob, so advantages
    may differ within a sequence; where they do not, loss and gradient are those of GSPO."""
    mean = batch.mean(batch.logprobs - batch.saved).detach()
    return clipped_surrogate(batch, (mean + batch.logprobs - batch.logprobs.detach()).exp(), clip_low, clip_high)


@loss(
    "−exp(mean of log r)·mean of A; log r is at most clip_high where A > 0, at least −clip_low where A < 0",
    "GMPO, arXiv 2507.20673",
    "sequence-mean",
    differs="none",
)
def gmpo(batch: Tokens, *, clip_low: ClipLow = 0.4, clip_high: ClipHigh = 0.4) -> Result:
    log_ratio = batch.logprobs - batch.saved
    beyond = ((log_ratio > clip_high) & (batch.advantages > 0)) | ((log_ratio < -clip_low) & (batch.advantages < 0))
    limited = log_ratio.clamp(-clip_low, clip_high).where(beyond, log_ratio)
    return -batch.mean(limited).exp() * batch.mean(batch.advantages) * batch.mask, beyond
