"""The losses of batch RL against their formulas, written again here in float64 with loops over tokens."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymdata.commands.train.losses import LOSSES
from tests.formulas import ALONE, CASES, CHOSEN, batch, by_hand, gradient_of, settings_of, values

pytestmark = pytest.mark.torch

#: With ratio 1 everywhere these are REINFORCE.
ON_POLICY = (
    "ppo_clip", "cispo", "tis_reinforce", "tis_sequence", "mis", "icepop", "gspo", "gmpo", "dppo_tv", "sapo", "topr", "gpg"
)  # fmt: skip


@pytest.mark.parametrize(("name", "chosen"), CASES, ids=lambda each: each if isinstance(each, str) else "")
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_are_those_of_the_formula(name: str, chosen: dict[str, Any], seed: int) -> None:
    """Sum over the batch and gradient at every token, to 1e-12 in float64; each batch has limited tokens and others."""
    at = batch(seed, constant=LOSSES[name].aggregation.startswith("sequence"))
    at["logprobs"].requires_grad_()
    loss, limited = values(name, at, chosen)
    expected = by_hand(name, at, chosen)
    assert loss.shape == limited.shape == at["mask"].shape
    assert float(loss.sum().detach()) == pytest.approx(float(expected.detach()), rel=1e-12, abs=1e-12)
    apart = gradient_of(loss.sum(), at) - gradient_of(expected, at)
    assert float(apart.abs().max()) <= 1e-12
    if "clip_low" in chosen or "tis_cap" in chosen or name in ("awr", "filtered_bc"):
        assert 0 < int(limited.sum()) < int(at["mask"].sum())


def test_every_loss_is_tested_and_has_a_source() -> None:
    """Each registered loss is among the cases here with exactly its settings, or has a file ``test_loss_NAME.py``; its
    source is a paper's number."""
    for name, loss in LOSSES.items():
        assert name in CHOSEN or Path(__file__).with_name(f"test_loss_{name}.py").is_file()
        assert set(settings_of(name)) == set(loss.settings)
        assert re.search(r"arXiv \d{4}\.\d{5}$", loss.source)


def test_a_setting_has_the_same_meaning_in_every_loss() -> None:
    """Losses that share a setting share its type, its limits and its description."""
    seen: dict[str, str] = {}
    for loss in LOSSES.values():
        for name, (kind, _) in loss.options.items():
            assert repr(kind) == seen.setdefault(name, repr(kind))


def mean_by_hand(tokens: list[list[float]], aggregation: str, constant: float) -> float:
    """The mean of sequences of token losses."""
    sums = [sum(sequence) for sequence in tokens]
    return {
        "token": sum(sums) / sum(map(len, tokens)),
        "sequence-sum": sum(sums) / len(tokens),
        "sequence-mean": sum(s / len(sequence) for s, sequence in zip(sums, tokens, strict=True)) / len(tokens),
        "constant": sum(sums) / (len(tokens) * constant),
    }[aggregation]


@pytest.mark.parametrize("aggregation", ["token", "sequence-sum", "sequence-mean", "constant"])
@pytest.mark.parametrize("name", ["ppo_clip", "sapo"])
def test_any_loss_has_any_mean(name: str, aggregation: Any) -> None:
    """With --loss-aggregation the loss of a batch is that mean of its tokens' losses; an empty sequence counts nowhere."""
    from gymdata.commands.train.trainers.policy_loss import PolicyLoss

    at = batch(5)
    loss = PolicyLoss(LOSSES[name].function, CHOSEN[name], aggregation, constant=7.0)
    plain = values(name, at, CHOSEN[name], aggregation="token")[0]
    tokens = [row[mask].tolist() for row, mask in zip(plain, at["mask"], strict=True) if mask.any()]
    found = loss(at["logprobs"], at["saved"], at["advantages"], at["mask"])[0].sum() / loss.count(at["mask"])
    assert float(found) == pytest.approx(mean_by_hand(tokens, aggregation, 7.0), rel=1e-12)


def test_the_mean_of_sapo_is_over_sequences() -> None:
    """Gao et al. 2025: 1/G Σ 1/|y| Σ; a long sequence weighs no more than a short one."""
    import torch

    zeros = torch.zeros(2, 3, dtype=torch.float64)
    mask = torch.tensor([[True, False, False], [True, True, True]])
    at = {"logprobs": zeros, "saved": zeros, "reference": zeros, "mask": mask}
    at["advantages"] = torch.tensor([[1.0], [-1.0]], dtype=torch.float64).expand(2, 3)
    loss, _ = values("sapo", at, CHOSEN["sapo"])
    # σ(0)·4/τ = 2/τ: 2 for A > 0, 2/1.5 for A < 0.
    assert float(loss.sum()) / 2 == pytest.approx((-2 + 2 / 1.5) / 2)
    assert LOSSES["sapo"].aggregation == "sequence-mean"


def test_clip_cov_draws_among_the_covariances() -> None:
    """A share of 0.1 of about 100 tokens: so many of those that qualify are left out, by the seed of torch."""
    import torch

    at = batch(1, rows=20)
    n = int(at["mask"].sum())
    settings = {**CHOSEN["clip_cov"], "clip_low": 1.0, "clip_high": 100.0}
    every = values("clip_cov", at, settings)[1]
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(values("clip_cov", at, {**settings, "cov_ratio": 0.1})[1])
    assert int(every.sum()) > int(drawn[0].sum()) == int(0.1 * n)
    assert not bool((drawn[0] & ~every).any())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_what_is_masked_changes_nothing(name: str) -> None:
    """NaN and infinity at masked positions: the same loss there and elsewhere, 0 where masked, and no gradient."""
    import torch

    at = batch(3)
    at["logprobs"].requires_grad_()
    loss, limited = values(name, at, settings_of(name))
    gradient = gradient_of(loss.sum(), at)
    dirty = {key: torch.where(at["mask"], value, math.nan) for key, value in at.items() if key != "mask"}
    dirty["logprobs"] = torch.where(at["mask"], at["logprobs"].detach(), math.inf).requires_grad_()
    dirty["mask"] = at["mask"]
    again, limited_again = values(name, dirty, settings_of(name))
    assert torch.equal(loss, again)
    assert torch.equal(limited, limited_again)
    assert not bool(limited[~at["mask"]].any())
    found = gradient_of(again.sum(), dirty)
    assert torch.equal(found, gradient)
    assert float(found[~at["mask"]].abs().sum()) == 0


@given(seed=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy_the_gradient_is_that_of_reinforce(name: str, seed: int) -> None:
    """With ratio 1 everywhere: −A at every trained token, −A/length for means over a sequence; nothing is limited."""
    import torch

    at = batch(seed, constant=True)
    at["saved"] = at["logprobs"].clone()
    at["logprobs"].requires_grad_()
    defaults = dict(LOSSES[name].settings)
    loss, limited = values(name, at, defaults)
    lengths = at["mask"].sum(dim=1, keepdim=True).clamp(min=1) if LOSSES[name].aggregation == "sequence-mean" else 1
    expected = torch.where(at["mask"], -at["advantages"] / lengths, 0.0)
    assert torch.allclose(gradient_of(loss.sum(), at), expected, rtol=1e-9, atol=1e-12)
    assert not bool(limited.any())


@given(seed=st.integers(0, 10_000), row=st.integers(0, 15))
@settings(max_examples=20, deadline=None)
@pytest.mark.parametrize("name", ALONE)
def test_a_sequence_knows_no_other(name: str, seed: int, row: int) -> None:
    """A batch's losses are those of its sequences alone, so any split into batches gives the same sum."""
    import torch

    at = batch(seed)
    alone = {key: value[row : row + 1] for key, value in at.items()}
    together, single = values(name, at, settings_of(name))[0], values(name, alone, settings_of(name))[0]
    assert torch.allclose(together[row : row + 1], single, rtol=1e-12, atol=1e-14)


def test_far_sequences_leave_their_negative_tokens_out() -> None:
    """mean(saved − logp) of 0.9 and 0.1 with δ 0.5: tokens with A < 0 of the first have no loss, all others keep theirs."""
    import torch

    from gymdata.commands.train.trainers.policy_loss import PolicyLoss

    logprobs = torch.tensor([[-2.0, -1.0, -9.0], [-2.0, -1.0, -9.0]], dtype=torch.float64)
    saved = logprobs + torch.tensor([[1.3, 0.5, 99.0], [0.1, 0.1, 99.0]])
    advantages = torch.tensor([[-1.0, 2.0, -1.0], [-1.0, 2.0, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, False]])
    plain, _ = PolicyLoss()(logprobs, saved, advantages, mask)
    loss, limited = PolicyLoss(sequence_mask=0.5)(logprobs, saved, advantages, mask)
    assert loss.tolist() == [[0.0, plain[0, 1], 0.0], plain[1].tolist()]
    assert limited[:, :2].tolist() == [[True, False], [False, False]]
