"""Squared distances between log-ratios of sequences and rewards."""

from __future__ import annotations

from gymdata.commands.train.losses._registry import Result, Tau, Tokens, loss


@loss(
    "−A·L + tau/2·(L − L_ref)²",
    "DRO, arXiv 2405.19107",
    "sequence-sum",
    needs="reference",
    at_zero=True,
    of_ratios=False,
)
def dro(batch: Tokens, *, tau: Tau = 1.0) -> Result:
    """Richemond et al. 2024; A: reward − value."""
    assert batch.reference is not None
    distance = (batch.logprobs - batch.reference).sum(dim=1, keepdim=True)
    lengths = batch.mask.sum(dim=1, keepdim=True).clamp(min=1)
    return -batch.advantages * batch.logprobs + tau / 2 * distance**2 / lengths, batch.unlimited


@loss(
    "(tau·(L − L_saved) − (reward − optimal_value))²",
    "OAPL, arXiv 2602.19362; A*-PO, arXiv 2505.20686",
    "sequence-mean",
    needs="optimal_value",
    at_zero=True,
)
def oapl(batch: Tokens, *, tau: Tau = 1e-3) -> Result:
    """A: reward − V*, V* = β·log mean exp(reward/β) over the group. The policy that V* is an average over is the sampler,
    so the regression is to the sampler as well."""
    distance = (batch.logprobs - batch.saved).sum(dim=1, keepdim=True)
    return (tau * distance - batch.mean(batch.advantages)) ** 2 * batch.mask, batch.unlimited
