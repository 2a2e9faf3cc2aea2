"""Divergence PPO: a token is masked when its update leads further away and its probability has moved too far. Qi et al.
2026, arXiv 2602.04879."""

from __future__ import annotations

from gymdata.commands.train.losses._registry import Cap, ClipHigh, ClipLow, Result, Tensor, Tokens, loss


def _masked_by_divergence(batch: Tokens, beyond: Tensor, tis_cap: float) -> Result:
    weight = batch.ratio.detach().clamp(max=tis_cap)
    return -(weight * batch.advantages).masked_fill(beyond, 0.0) * batch.logprobs, beyond


@loss(
    "−sg(min(r, tis_cap))·A·ℓ; 0 where A > 0 and π − π_saved > clip_high, or A < 0 and π_saved − π > clip_low",
    "DPPO, arXiv 2602.04879",
    "token",
)
def dppo_tv(batch: Tokens, *, clip_low: ClipLow = 0.15, clip_high: ClipHigh = 0.15, tis_cap: Cap = 20.0) -> Result:
    """The binary total variation."""
    moved = (batch.logprobs.exp() - batch.saved.exp()).detach()
    beyond = ((batch.advantages > 0) & (moved > clip_high)) | ((batch.advantages < 0) & (-moved > clip_low))
    return _masked_by_divergence(batch, beyond, tis_cap)


@loss(
    "−sg(min(r, tis_cap))·A·ℓ; 0 where A > 0, r > 1 and D > clip_high, or A < 0, r < 1 and D > clip_low; "
    "D: KL of π_saved to π, of this token against all others",
    "DPPO, arXiv 2602.04879",
    "token",
)
def dppo_kl(batch: Tokens, *, clip_low: ClipLow = 0.05, clip_high: ClipHigh = 0.05, tis_cap: Cap = 20.0) -> Result:
    """The binary KL(π_saved ‖ π) = p log(p/q) + (1 − p) log((1 − p)/(1 − q)), p and q the saved and the new probability."""
    logprobs, saved = batch.logprobs.detach(), batch.saved
    # 1 − exp(0) would be 0, whose logarithm is infinite.
    rest, rest_saved = ((-each.clamp(max=-1e-7).expm1()).log() for each in (logprobs, saved))
    old = saved.exp()
    kl = old * (saved - logprobs) + (1 - old) * (rest_saved - rest)
    up, down = (batch.advantages > 0) & (logprobs > saved), (batch.advantages < 0) & (logprobs < saved)
    return _masked_by_divergence(batch, (up & (kl > clip_high)) | (down & (kl > clip_low)), tis_cap)
