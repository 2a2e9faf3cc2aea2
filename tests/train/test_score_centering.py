"""Score centering against sums over a whole vocabulary of 7, in float64, value and gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gymdata.commands.train.losses import LOSSES
from gymdata.losses import score_centering

pytestmark = pytest.mark.torch

VOCABULARY = 7
#: Loss and settings with which some of the ratios below are limited → its weight of a ratio, written again.
WEIGHTS: dict[str, tuple[dict[str, float], Any]] = {
    "gpg": ({}, lambda r: 1.0),
    "tis_reinforce": ({"tis_cap": 1.3}, lambda r: min(r, 1.3)),
    "cispo": ({"clip_low": 1.0, "clip_high": 0.3}, lambda r: min(max(r, 0.0), 1.3)),
    "icepop": ({"clip_low": 0.4, "clip_high": 0.5}, lambda r: r if 0.6 <= r <= 1.5 else 0.0),
}


def weight_of(name: str) -> Any:
    function, settings = LOSSES[name].weight, WEIGHTS[name][0]
    assert function is not None
    return lambda ratio: function(ratio, **settings)


def distributions(seed: int, head: int) -> tuple[Any, Any]:
    """(logits of the policy with gradient, log q of the sampler), 50 positions each; outside of the first ``head`` tokens q
    is ρ·p, as the estimator takes it to be."""
    import torch

    torch.manual_seed(seed)
    logits = torch.randn(50, VOCABULARY, dtype=torch.float64, requires_grad=True)
    p = logits.detach().softmax(-1)
    q = (logits.detach() + 0.6 * torch.randn(50, VOCABULARY, dtype=torch.float64)).softmax(-1)
    rest = 1 - q[:, :head].sum(-1, keepdim=True)
    tail = p[:, head:] * rest / (1 - p[:, :head].sum(-1, keepdim=True)) if head < VOCABULARY else p[:, head:]
    return logits, torch.cat([q[:, :head], tail], dim=1).log()


def test_the_losses_that_can_be_centered_are_these() -> None:
    """−A·ℓ with a weight of the token's ratio, and no other loss, has a weight."""
    assert {name for name, loss in LOSSES.items() if loss.weight is not None} == set(WEIGHTS)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("head", [1, 3, 6, 7])
def test_its_gradient_is_the_mean_weighted_score_of_the_sampler(name: str, head: int) -> None:
    """∇C = Σ_v q(v)·w(v)·∇log p(v) over the vocabulary, one token at a time, where the tail is ρ·p or there is none."""
    import torch

    logits, log_q = distributions(head, head)
    term = score_centering(logits.log_softmax(-1)[:, :head], log_q[:, :head], weight_of(name)).term
    (found,) = torch.autograd.grad(term.sum(), logits)
    p, q = logits.detach().softmax(-1).tolist(), log_q.exp().tolist()
    limited = 0
    for position in range(50):
        expected = [0.0] * VOCABULARY
        for v in range(VOCABULARY):
            weight = WEIGHTS[name][1](p[position][v] / q[position][v])
            limited += weight != p[position][v] / q[position][v]
            for other in range(VOCABULARY):  # ∂ log p(v) / ∂ logit(other)
                expected[other] += q[position][v] * weight * ((v == other) - p[position][other])
        assert found[position].tolist() == pytest.approx(expected, abs=1e-12)
    assert limited


@pytest.mark.parametrize("name", WEIGHTS)
def test_its_value_is_that_of_the_published_form(name: str) -> None:
    """The coefficients m and α as NeMo RL's guide has them for each kind of weight, in plain floats."""
    logits, log_q = distributions(3, 3)
    log_p = logits.detach().log_softmax(-1)
    found = score_centering(log_p[:, :3], log_q[:, :3], weight_of(name))
    for position in range(50):
        p, q = ([math.exp(x) for x in row[position, :3].tolist()] for row in (log_p, log_q))
        rho = (1 - sum(q)) / max(1 - sum(p), 1e-6)
        low, high = {"cispo": (0.0, 1.3), "tis_reinforce": (0.0, 1.3), "icepop": (0.6, 1.5)}.get(name, (0, 0))
        mass, alpha = q, rho
        if name in ("cispo", "tis_reinforce"):
            mass = [min(max(a, low * b), high * b) for a, b in zip(p, q, strict=True)]
            alpha = min(max(1.0, low * rho), high * rho)
        elif name == "icepop":
            mass = [a if low <= a / b <= high else 0.0 for a, b in zip(p, q, strict=True)]
            alpha = 1.0 if low <= 1 / rho <= high else 0.0
        expected = sum((m - alpha * a) * math.log(a) for m, a in zip(mass, p, strict=True))
        assert float(found.term[position]) == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert float(found.rho[position]) == pytest.approx(rho)
        assert float(found.covered[position]) == pytest.approx(sum(q))


@pytest.mark.parametrize("name", WEIGHTS)
def test_with_it_the_mean_score_of_a_position_is_nothing(name: str) -> None:
    """Σ_v q(v)·∇(loss of v + C) = 0 with one advantage for all tokens: what does not depend on them has no gradient."""
    import torch

    logits, log_q = distributions(5, 4)
    log_p = logits.log_softmax(-1)
    ratio, weight = (log_p.detach() - log_q).exp(), weight_of(name)
    loss = -weight(ratio) * log_p + score_centering(log_p[:, :4], log_q[:, :4], weight).term[:, None]
    (drift,) = torch.autograd.grad((log_q.exp() * loss).sum(), logits)
    (before,) = torch.autograd.grad((log_q.exp() * -weight(ratio) * logits.log_softmax(-1)).sum(), logits)
    assert float(drift.abs().max()) < 1e-12 < 1e-3 < float(before.abs().max())


def test_untruncated_weights_have_nothing_to_center() -> None:
    """f(r) = r: the mean of q·(p/q)·∇log p is that of p, which is 0."""
    import torch

    logits, log_q = distributions(6, 3)
    term = score_centering(logits.log_softmax(-1)[:, :3], log_q[:, :3], lambda ratio: ratio).term
    assert float(torch.autograd.grad(term.sum(), logits)[0].abs().max()) < 1e-12


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_kept_set_has_no_tail(name: str) -> None:
    """p over the kept set: the gradient is Σ_H q·w·∇log p, whatever rounding leaves of 1 − Σ_H q."""
    import torch

    logits, log_q = distributions(7, 7)
    log_q = log_q + math.log(1 - 5e-4)  # within the 1e-3 by which a kept set is told
    term = score_centering(logits.log_softmax(-1), log_q, weight_of(name), kept_set=True).term
    weights = weight_of(name)((logits.detach().log_softmax(-1) - log_q).exp())
    expected = torch.autograd.grad((log_q.exp() * weights * logits.log_softmax(-1)).sum(), logits, retain_graph=True)[0]
    found = torch.autograd.grad(term.sum(), logits)[0]
    assert float((found - expected).abs().max()) < 1e-12


@pytest.mark.parametrize("name", WEIGHTS)
def test_what_is_not_in_the_head_changes_nothing(name: str) -> None:
    """Entries of −inf, whatever the policy's number there, have no part and no gradient; a position of none has C = 0."""
    import torch

    logits, log_q = distributions(8, 4)
    log_p = logits.log_softmax(-1)
    plain = score_centering(log_p[:, :4], log_q[:, :4], weight_of(name))
    none = torch.full_like(log_q[:, :2], -math.inf)
    beside = torch.cat([log_p[:, :4], torch.tensor([[math.nan, 0.0]], dtype=torch.float64).expand(50, 2)], dim=1)
    padded = score_centering(beside, torch.cat([log_q[:, :4], none], dim=1), weight_of(name))
    assert torch.allclose(padded.term, plain.term, rtol=1e-12)
    assert torch.allclose(padded.rho, plain.rho)
    empty = score_centering(beside[:, 4:], none, weight_of(name))
    assert (empty.term == 0).all()
    assert torch.autograd.grad(padded.term.sum(), logits)[0].isfinite().all()


@pytest.mark.parametrize("name", WEIGHTS)
def test_in_float32_nothing_is_infinite(name: str) -> None:
    """Log-probs of −1e4 on either side, and heads of all the mass."""
    import torch

    far = torch.tensor([[0.0, -1e4], [-1e4, 0.0], [-80.0, -1e-7], [-0.7, -0.7]])
    for log_p, log_q in ((far, far.flip(1)), (far, far), (far.flip(1), far)):
        found = score_centering(log_p, log_q, weight_of(name))
        assert all(part.isfinite().all() for part in found)
