"""Terms of policy losses that read more of the sampler's distribution than the sampled token.

Tensors are used by their methods only: those of torch, of any leading shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

#: torch's, which is not imported here.
Tensor = Any

#: The least probability that the policy's tail counts as.
LEAST_TAIL = 1e-6
#: Beyond, exp() of a log-ratio is infinite in float32.
_LARGEST = 80.0


class ScoreCentering(NamedTuple):
    """Of each position: the term C, Σ_H q (``covered``) and ρ; the last two without gradient."""

    term: Tensor
    covered: Tensor
    rho: Tensor


def score_centering(
    logprobs: Tensor,
    head_logprobs: Tensor,
    weight: Callable[[Tensor], Tensor] | None = None,
    *,
    kept_set: bool = False,
) -> ScoreCentering:
    """The score-centering term C of each position (Marek and Ryabinin 2026, arXiv 2609.20807, Eq. 14): a loss
    −sg(f(r))·A·ℓ becomes −sg(f(r))·A·ℓ + A·C.

    Where the sampler q and the policy p differ, E_q[f·A·∇log p] has the drift E_q[A]·E_q[f·∇log p]; A·C takes it away. With
    the sampler's head H, its most likely tokens, and its tail modelled as q ≈ ρ·p:

        ρ = (1 − Σ_H q) / max(1 − Σ_H p, 1e-6)
        α = ρ·f(1/ρ)
        C = Σ_{v∈H} sg(q(v)·f(p(v)/q(v)) − α·p(v))·log p(v)

    Its gradient is Σ_v q(v)·f(p(v)/q(v))·∇log p(v) over the vocabulary: exact where H is all of it, or the tail is ρ·p.

    ``logprobs`` (…, K), with gradient: the policy's log p at the ids of H, normalized over the whole vocabulary;
    ``head_logprobs`` (…, K): the sampler's log q, −inf for no entry; a position without any has C = 0. ``weight``: f on
    ratios of any shape (default: 1); the untruncated f(r) = r has C = 0 but for what does not train. ``kept_set``: H is all
    that could be sampled and p is normalized over it, so there is no tail.
    """
    none = head_logprobs == -math.inf
    logprobs, q = logprobs.masked_fill(none, 0.0), head_logprobs.exp()
    log_ratio = logprobs.detach() - head_logprobs.masked_fill(none, 0.0)
    p = logprobs.detach().exp().masked_fill(none, 0.0)
    covered = q.sum(-1)
    rho = (1 - covered).clamp(min=0.0) / (1 - p.sum(-1)).clamp(min=LEAST_TAIL)
    if kept_set:
        rho = rho.new_zeros(rho.shape)
    mass, alpha = q, rho
    if weight is not None:
        mass = q * weight(log_ratio.clamp(max=_LARGEST).exp())
        alpha = rho * weight(rho.clamp(min=math.exp(-_LARGEST)).reciprocal())
    coefficients = (mass - alpha.unsqueeze(-1) * p).detach()
    return ScoreCentering((coefficients * logprobs).sum(-1), covered, rho)
