"""The losses of batch RL against their formulas, written again here in float64 with loops over tokens."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymdata.errors import UsageError
from gymdata.train.losses import LOSSES
from gymdata.train.settings import TrainRlConfig
from tests.train.trainers.conftest import start
from tests.train.trainers.experience_files import N, experience_rows, write
from tests.train.trainers.gradients import assert_same, loss_and_gradients

pytestmark = pytest.mark.torch

#: Settings under which some tokens of ``batch`` are limited and others are not.
CHOSEN: dict[str, dict[str, Any]] = {
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.3},
    "cispo": {"clip_low": 0.4, "clip_high": 0.5},
    "tis_reinforce": {"tis_cap": 1.2},
    "tis_sequence": {"tis_cap": 1.2},
    "mis": {"tis_cap": 1.2, "mis_level": "sequence"},
    "icepop": {"clip_low": 0.4, "clip_high": 0.5},
    "gspo": {"clip_low": 0.05, "clip_high": 0.08},
    "gmpo": {"clip_low": 0.3, "clip_high": 0.4},
    "dppo_tv": {"clip_low": 0.02, "clip_high": 0.03, "tis_cap": 1.5},
    "dppo_kl": {"clip_low": 0.01, "clip_high": 0.02, "tis_cap": 1.5},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.5},
    "topr": {},
    "asymre": {"baseline_shift": -0.3},
    "opmd": {"tau": 0.5},
    "dro": {"tau": 0.7},
    "oapl": {"tau": 0.6},
    "awr": {"tau": 0.5, "weight_max": 3.0},
    "filtered_bc": {},
    "gpg": {},
    # A share of 1: all with a covariance within the bounds, so nothing is drawn at random.
    "clip_cov": {"clip_low": 0.2, "clip_high": 0.3, "cov_ratio": 1.0, "cov_low": 0.2, "cov_high": 1.5},
    "kl_cov": {"cov_ratio": 0.1, "kl_weight": 0.7},
}
#: Losses that do not compare the tokens of a batch: a sequence's loss is the same with other sequences beside it.
ALONE = sorted(name for name, loss in LOSSES.items() if not loss.over_batch)
#: With ratio 1 everywhere these are REINFORCE.
ON_POLICY = (
    "ppo_clip", "cispo", "tis_reinforce", "tis_sequence", "mis", "icepop", "gspo", "gmpo", "dppo_tv", "sapo", "topr", "gpg"
)  # fmt: skip


def settings_of(name: str) -> dict[str, Any]:
    """Those of the case here, else the loss's own defaults."""
    return CHOSEN.get(name) or dict(LOSSES[name].settings)


CASES = [*CHOSEN.items(), ("mis", {"tis_cap": 1.2, "mis_level": "token"})]


def batch(seed: int = 0, rows: int = 16, width: int = 9, constant: bool = False) -> dict[str, Any]:
    """Random inputs of a loss, float64; the mask has holes, and one sequence has no trained token. ``constant``: one
    advantage a sequence, as in the sources of losses of whole sequences."""
    import torch

    rng = np.random.default_rng(seed)
    mask = rng.random((rows, width)) < 0.7
    mask[0] = False
    logprobs = -rng.exponential(1.5, (rows, width)) - 0.01
    advantages = rng.normal(size=(rows, 1)) * np.ones(width) if constant else rng.normal(size=(rows, width))
    values = {"logprobs": logprobs, "saved": np.minimum(logprobs + 0.5 * rng.normal(size=mask.shape), -0.001),
              "advantages": advantages, "reference": logprobs + 0.4 * rng.normal(size=mask.shape)}  # fmt: skip
    return {**{name: torch.tensor(array) for name, array in values.items()}, "mask": torch.tensor(mask)}


def by_hand(name: str, at: dict[str, Any], s: dict[str, Any]) -> Any:
    """Σ over the batch of each sequence's number (the sum over its tokens; their mean where that is published), one token at
    a time, with torch scalars where there is a gradient."""
    import torch

    total = torch.zeros((), dtype=torch.float64)
    if LOSSES[name].over_batch:
        return covariances_by_hand(name, at, s)
    for i in range(len(at["mask"])):
        tokens = [t for t in range(at["mask"].shape[1]) if at["mask"][i, t]]
        if not tokens:
            continue
        lp = [at["logprobs"][i, t] for t in tokens]
        old = [float(at["saved"][i, t]) for t in tokens]
        ref = [float(at["reference"][i, t]) for t in tokens]
        adv = [float(at["advantages"][i, t]) for t in tokens]
        total = total + SEQUENCE[name](lp, old, adv, ref, s)
    return total


def each(token: Callable[..., Any]) -> Callable[..., Any]:
    """The sum of a loss of tokens over a sequence; a token knows its sequence's ratio as well."""

    def whole(lp: list[Any], old: list[float], adv: list[float], _ref: list[float], s: dict[str, Any]) -> Any:
        sequence = math.exp(sum(float(x.detach()) - o for x, o in zip(lp, old, strict=True)))
        return sum(token(x, math.exp(float(x.detach()) - o), o, a, s, sequence)
                   for x, o, a in zip(lp, old, adv, strict=True))  # fmt: skip

    return whole


def covariances_by_hand(name: str, at: dict[str, Any], s: dict[str, Any]) -> Any:
    """Clip-Cov and KL-Cov over all tokens of the batch."""
    import torch

    tokens = [
        (at["logprobs"][i, t], float(at["saved"][i, t]), float(at["advantages"][i, t])) for i, t in at["mask"].nonzero()
    ]
    n = len(tokens)
    logp, adv = sum(float(x.detach()) for x, _, _ in tokens) / n, sum(a for _, _, a in tokens) / n
    covariances = [(float(x.detach()) - logp) * (a - adv) for x, _, a in tokens]
    largest = sorted(covariances, reverse=True)[max(int(s["cov_ratio"] * n), 1) - 1]
    total = torch.zeros((), dtype=torch.float64)
    for (x, o, a), covariance in zip(tokens, covariances, strict=True):
        ratio = torch.exp(x - o)
        if name == "kl_cov":
            total = total - ratio * a + (s["kl_weight"] * abs(x - o) if covariance >= largest else 0.0)
        else:  # what the clip limits already is not drawn, and keeps its constant
            limited = float((surrogate(ratio, a, s) + ratio * a).detach()) > 0
            drawn = s["cov_low"] < covariance < s["cov_high"] and not limited
            total = total + (0.0 if drawn else surrogate(ratio, a, s))
    return total


def clip(x: Any, low: float, high: float) -> Any:
    return min(max(x, low), high)


def surrogate(ratio: Any, a: float, s: dict[str, Any]) -> Any:
    return -min(ratio * a, clip(ratio, 1 - s["clip_low"], 1 + s["clip_high"]) * a)


def ppo(x: Any, _r: float, o: float, a: float, s: dict[str, Any], _whole: float) -> Any:
    import torch

    return surrogate(torch.exp(x - o), a, s)


def soft_gate(x: Any, _r: float, o: float, a: float, s: dict[str, Any], _whole: float) -> Any:
    import torch

    tau = s["tau_positive"] if a > 0 else s["tau_negative"]
    return -4 / tau / (1 + torch.exp(-tau * (torch.exp(x - o) - 1))) * a


def total_variation(x: Any, r: float, o: float, a: float, s: dict[str, Any], _whole: float) -> Any:
    apart = abs(math.exp(float(x.detach())) - math.exp(o))
    away = (a > 0 and r > 1 and apart > s["clip_high"]) or (a < 0 and r < 1 and apart > s["clip_low"])
    return 0 * x if away else -min(r, s["tis_cap"]) * a * x


def binary_kl(x: Any, r: float, o: float, a: float, s: dict[str, Any], _whole: float) -> Any:
    p, q = math.exp(o), math.exp(float(x.detach()))
    kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    away = (a > 0 and r > 1 and kl > s["clip_high"]) or (a < 0 and r < 1 and kl > s["clip_low"])
    return 0 * x if away else -min(r, s["tis_cap"]) * a * x


def gspo(lp: list[Any], old: list[float], adv: list[float], _ref: list[float], s: dict[str, Any]) -> Any:
    import torch

    ratio = torch.exp(sum(x - o for x, o in zip(lp, old, strict=True)) / len(lp))
    return surrogate(ratio, adv[0], s)


def gmpo(lp: list[Any], old: list[float], adv: list[float], _ref: list[float], s: dict[str, Any]) -> Any:
    """Π of min(r·sign, clip(r)·sign) to the power 1/n, as the source writes it: in the ratio, not in its logarithm."""
    import torch

    product = torch.ones((), dtype=torch.float64)
    for x, o, a in zip(lp, old, adv, strict=True):
        ratio, sign = torch.exp(x - o), 1 if a > 0 else -1
        limited = clip(ratio, math.exp(-s["clip_low"]), math.exp(s["clip_high"]))
        product = product * (min(sign * ratio, sign * limited) * sign)
    return -(product ** (1 / len(lp))) * sum(adv) / len(adv)


def topr(lp: list[Any], old: list[float], adv: list[float], _ref: list[float], _s: dict[str, Any]) -> Any:
    ratio = math.exp(sum(float(x.detach()) - o for x, o in zip(lp, old, strict=True)))
    return -(1.0 if adv[0] >= 0 else min(ratio, 1.0)) * adv[0] * sum(lp)


def dro(lp: list[Any], _old: list[float], adv: list[float], ref: list[float], s: dict[str, Any]) -> Any:
    return -adv[0] * sum(lp) + s["tau"] / 2 * (sum(lp) - sum(ref)) ** 2


def oapl(lp: list[Any], old: list[float], adv: list[float], _ref: list[float], s: dict[str, Any]) -> Any:
    return (s["tau"] * (sum(lp) - sum(old)) - adv[0]) ** 2


SEQUENCE: dict[str, Callable[..., Any]] = {
    "ppo_clip": each(ppo),
    "cispo": each(lambda x, r, _o, a, s, _w: -clip(r, 1 - s["clip_low"], 1 + s["clip_high"]) * a * x),
    "tis_reinforce": each(lambda x, r, _o, a, s, _w: -min(r, s["tis_cap"]) * a * x),
    "tis_sequence": each(lambda x, _r, _o, a, s, w: -min(w, s["tis_cap"]) * a * x),
    "mis": each(
        lambda x, r, _o, a, s, w: (
            0 * x
            if (w if s["mis_level"] == "sequence" else r) > s["tis_cap"]
            else -(w if s["mis_level"] == "sequence" else r) * a * x
        )
    ),
    "icepop": each(lambda x, r, _o, a, s, _w: -r * a * x if 1 - s["clip_low"] <= r <= 1 + s["clip_high"] else 0 * x),
    "dppo_tv": each(total_variation),
    "dppo_kl": each(binary_kl),
    "sapo": lambda lp, old, adv, ref, s: each(soft_gate)(lp, old, adv, ref, s) / len(lp),
    "gpg": each(lambda x, _r, _o, a, _s, _w: -a * x),
    "opmd": each(lambda x, _r, _o, a, s, _w: -a * x / (1 + s["tau"])),
    "awr": each(lambda x, _r, _o, a, s, _w: -min(math.exp(a / s["tau"]), s["weight_max"]) * x),
    "filtered_bc": each(lambda x, _r, _o, a, _s, _w: -x if a > 0 else 0 * x),
    "asymre": each(lambda x, _r, _o, a, s, _w: -(a - s["baseline_shift"]) * x),
    "gspo": gspo,
    "gmpo": gmpo,
    "topr": topr,
    "dro": dro,
    "oapl": oapl,
}


def values(name: str, at: dict[str, Any], s: dict[str, Any], **more: Any) -> tuple[Any, Any]:
    """Loss and limited tokens, with the aggregation as published unless ``more`` has another."""
    from gymdata.train.trainers.policy_loss import PolicyLoss

    loss = PolicyLoss(LOSSES[name].function, s, **{"aggregation": LOSSES[name].aggregation, **more})
    return loss(at["logprobs"], at["saved"], at["advantages"], at["mask"], at["reference"])


def gradient_of(total: Any, at: dict[str, Any]) -> Any:
    import torch

    (found,) = torch.autograd.grad(total, at["logprobs"])
    return found


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
    seen: dict[str, Any] = {}
    for loss in LOSSES.values():
        for name, option in loss.options.items():
            first = seen.setdefault(name, option)
            assert (option.kind, repr(option.field)) == (first.kind, repr(first.field))


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
    from gymdata.train.trainers.policy_loss import PolicyLoss

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

    from gymdata.train.trainers.policy_loss import PolicyLoss

    logprobs = torch.tensor([[-2.0, -1.0, -9.0], [-2.0, -1.0, -9.0]], dtype=torch.float64)
    saved = logprobs + torch.tensor([[1.3, 0.5, 99.0], [0.1, 0.1, 99.0]])
    advantages = torch.tensor([[-1.0, 2.0, -1.0], [-1.0, 2.0, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, False]])
    plain, _ = PolicyLoss()(logprobs, saved, advantages, mask)
    loss, limited = PolicyLoss(sequence_mask=0.5)(logprobs, saved, advantages, mask)
    assert loss.tolist() == [[0.0, plain[0, 1], 0.0], plain[1].tolist()]
    assert limited[:, :2].tolist() == [[True, False], [False, False]]


Assemble = Callable[..., Any]


@pytest.fixture
def assemble_rl(policy: Path, tmp_path: Path) -> Assemble:
    def build(rows: list[dict[str, Any]], given: dict[str, Any] | None = None, **job: Any) -> Any:
        given = {"learning_rate": 0.1, **(given or {})}
        return start("rl", write(tmp_path, rows), policy, tmp_path / "out", given, **job)[0]

    return build


def weighted_rows(policy: Path) -> list[dict[str, Any]]:
    """Rows with an optimal value, and a token whose weights differ in each component."""
    rows = experience_rows(policy)
    for i, row in enumerate(rows):
        row["optimal_value"] = 0.3 + 0.1 * i
        n = len(row["input_ids"])
        kinds = [(j + i) % 3 for j in range(n)]
        masked = row["loss_mask"]
        row["rl_weight"] = [float(m * (k != 1)) for m, k in zip(masked, kinds, strict=True)]
        row["ce_weight"] = [0.5 * m * (k == 1) for m, k in zip(masked, kinds, strict=True)]
        row["ref_kl_weight"] = [0.25 * m * (k == 2) for m, k in zip(masked, kinds, strict=True)]
    return rows


@pytest.mark.matrix("ppo_clip-True", "gspo-False")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ALONE)
def test_eight_are_four_and_four(policy: Path, assemble_rl: Assemble, name: str, weighted: bool) -> None:
    """Loss and gradient of a step do not depend on how its sequences are split into batches, with and without weights."""
    rows = weighted_rows(policy)
    if not weighted:
        rows = [{k: v for k, v in row.items() if not k.endswith("_weight")} for row in rows]
    whole, split = (
        loss_and_gradients(assemble_rl(rows, {"per_device_train_batch_size": size}, loss=name, sequence_mask=0.1))
        for size in (N, 2)
    )
    assert_same(split, whole, 1e-5)


def test_components_are_means_over_their_own_tokens(policy: Path, assemble_rl: Assemble) -> None:
    """Σ over rl, ce and ref_kl of Σ w·ℓ / Σ [w ≠ 0], each over the whole file, by hand from float64 log-probs."""
    from tests.train.trainers.experience_files import reference_logps

    rows = weighted_rows(policy)
    sums, counts = {}, {}
    for row in rows:
        _, found = reference_logps(policy, row)
        logps = [0.0, *(float(x) for x in found.detach())]
        for t in range(1, len(logps)):
            ratio = math.exp(logps[t] - row["logprobs"][t])
            d = logps[t] - row["ref_logprobs"][t]
            parts = {
                "rl": -min(ratio * row["advantages"][t], clip(ratio, 0.8, 1.2) * row["advantages"][t]),
                "ce": -logps[t],
                "ref_kl": math.exp(-d) - 1 + d,
            }
            for part, value in parts.items():
                weight = row[f"{part}_weight"][t]
                sums[part] = sums.get(part, 0.0) + row["weight"] * weight * value
                counts[part] = counts.get(part, 0) + (weight != 0)
    assert min(counts.values()) > 5
    expected = sum(sums[part] / counts[part] for part in sums)
    assert loss_and_gradients(assemble_rl(rows))[0] == pytest.approx(expected, rel=1e-5)


def test_tool_output_trains_where_its_mask_is_1(policy: Path, assemble_rl: Assemble) -> None:
    """Tool tokens with mask 1, ce_weight 1 and rl_weight 0: the loss is their cross-entropy, the ratio is of sampled tokens
    alone; a weight at a masked token is refused and says what to do."""
    import torch

    rows = experience_rows(policy, noise=0.0)
    for row in rows:
        row["rl_weight"] = [float(m) for m in row["loss_mask"]]
        first = row["loss_mask"].index(1)
        row["ce_weight"] = [float(not m and t > first) for t, m in enumerate(row["loss_mask"])]
    with pytest.raises(Exception, match=r"ce_weight of token \d+ of rollout-0/0 is 1, but its loss_mask is 0"):
        assemble_rl(rows)
    for row in rows:
        row["loss_mask"] = [int(m or c) for m, c in zip(row["loss_mask"], row["ce_weight"], strict=True)]
        row["advantages"] = [0.0] * len(row["loss_mask"])
    trainer = assemble_rl(rows, {"per_device_train_batch_size": N})
    assert trainer.compare(refuse=True)["mean"] == pytest.approx(1.0, abs=1e-6)
    (batch,) = trainer.get_train_dataloader()
    logps = trainer.outputs(trainer.model, batch)
    tool = batch["ce_weight"] != 0
    expected = -(logps * tool * batch["weight"][:, None]).sum() / tool.sum()
    loss = trainer.compute_loss(trainer.model, batch)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert int(tool.sum()) == 3 * N
    assert torch.isfinite(loss)


def test_oapl_needs_its_column(policy: Path, assemble_rl: Assemble) -> None:
    """Without optimal_value the error names the flag that writes it; with it the advantage is reward − optimal_value."""
    rows = weighted_rows(policy)
    bare = [{k: v for k, v in row.items() if k != "optimal_value"} for row in rows]
    with pytest.raises(UsageError, match="optimal_value") as told:
        assemble_rl(bare, loss="oapl")
    assert "--optimal-value-beta" in str(told.value.hint)
    trainer = assemble_rl(rows, loss="oapl")
    assert trainer.data.advantages[2].tolist() == pytest.approx([1.0 - 0.5] * len(rows[2]["input_ids"]))


def config(**settings: Any) -> TrainRlConfig:
    return TrainRlConfig.load(None, {"model": "m", "output": "o", **settings})


def test_settings_belong_to_their_loss() -> None:
    """Defaults are the loss's own; a setting that the loss does not have is refused and names those that have it."""
    assert config(loss="gspo").loss_settings == {"clip_low": 3e-4, "clip_high": 4e-4}
    assert config(loss="icepop", clip_high=1.0).loss_settings == {"clip_low": 0.5, "clip_high": 1.0}
    with pytest.raises(
        UsageError, match=r"tis_cap: got 3\.0, which has no effect without loss=dppo_kl, dppo_tv, mis, tis_r"
    ):
        config(loss="gspo", tis_cap=3.0)
    with pytest.raises(UsageError, match="clip_low"):
        config(loss="a.py:f", clip_low=0.1)
    with pytest.raises(
        UsageError, match=r"loss_constant: got 5\.0, which has no effect without loss_aggregation=.const"
    ):
        config(loss_constant=5.0)
    with pytest.raises(UsageError, match="got 'gsop', expected one of ppo_clip") as told:
        config(loss="gsop")
    assert told.value.hint == "did you mean 'gspo'?"


@pytest.mark.parametrize(
    ("ours", "verls"),
    [
        ("token", "token-mean"),
        ("sequence-sum", "seq-mean-token-sum"),
        ("sequence-mean", "seq-mean-token-mean"),
        ("constant", "seq-mean-token-sum-norm"),
    ],
)
def test_the_names_that_verl_has_for_means_are_accepted(ours: str, verls: str) -> None:
    """Each of them, as well as ours, and the page of batch RL has both in one row."""
    assert [config(loss_aggregation=name).loss_aggregation for name in (ours, verls)] == [ours, ours]
    page = Path(__file__).parents[3] / "gymdata" / "docs" / "batch-rl.md"
    assert re.search(rf"^\| `{ours}` \|[^|]*\| `{verls}`", page.read_text(), re.MULTILINE)


MINE = """
import torch

def plain(logprobs, saved, advantages, mask, reference=None):
    assert reference is not None
    ratio = torch.exp(logprobs - saved)
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)

def mean(logprobs, saved, advantages, mask, reference=None):
    return logprobs.mean()

def infinite(logprobs, saved, advantages, mask, reference=None):
    return logprobs / 0

def broken(logprobs, saved, advantages, mask, reference=None):
    return {}["no"]

def whole(logprobs, saved, advantages, mask, reference=None):
    return -advantages * logprobs, advantages > 0

whole.aggregation = "sequence"
"""


def test_a_loss_of_ones_own(policy: Path, assemble_rl: Assemble, tmp_path: Path) -> None:
    """path.py:function trains as the same loss of the table does; what is no loss of tokens is named with its place."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    rows = experience_rows(policy)
    assert_same(
        loss_and_gradients(assemble_rl(rows, loss=f"{file}:plain")), loss_and_gradients(assemble_rl(rows)), 1e-6
    )
    whole = assemble_rl(rows, loss=f"{file}:whole")
    assert loss_and_gradients(whole)[0] == pytest.approx(
        loss_and_gradients(assemble_rl(rows, loss="asymre", baseline_shift=0.0))[0], rel=1e-6
    )
    for name, message in (
        ("mean", r"got a loss of shape \(\), expected \(4, \d+\), one number per token"),
        ("infinite", r"got -?inf for token \d+ of sequence \d+ of a batch"),
        ("broken", r"raised KeyError: 'no' \(.*mine.py:16"),
        ("missing", "missing"),
    ):
        with pytest.raises(UsageError, match=message):
            loss_and_gradients(assemble_rl(rows, loss=f"{file}:{name}"))


TWO = """
import os, sys, pickle, torch
from pathlib import Path
from gymdata.train.losses import LOSSES
from tests.train.trainers.conftest import start
from tests.train.trainers.gradients import loss_and_gradients

file, policy, out, size = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
found = {}
for name in (name for name, loss in sorted(LOSSES.items()) if not loss.over_batch):
    given = {"per_device_train_batch_size": size, "use_cpu": True}
    if "RANK" in os.environ:
        given["ddp_backend"] = "gloo"
    trainer, _ = start("rl", file, policy, out / name, given, loss=name, sequence_mask=0.1)
    loss, gradients = loss_and_gradients(trainer)
    world = trainer.args.world_size
    parts = [torch.tensor(loss, dtype=torch.float64), *gradients.values()]
    if world > 1:
        for part in parts:
            torch.distributed.all_reduce(part)
    found[name] = float(parts[0]) / world, {k: p / world for k, p in zip(gradients, parts[1:])}
    rank = trainer.args.process_index
if rank == 0:
    (out / f"found-{world}.pickle").write_bytes(pickle.dumps(found))
"""


@pytest.mark.full
def test_two_processes_are_one(policy: Path, tmp_path: Path) -> None:
    """Loss and gradient of a step in two processes, averaged as DDP does it, are those of one process, for every loss."""
    import os
    import pickle
    import socket

    file, script = write(tmp_path, weighted_rows(policy)), tmp_path / "two.py"
    script.write_text(TWO)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    root = str(Path(__file__).parents[3])
    common = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    words = [sys.executable, str(script), str(file), str(policy), str(tmp_path)]
    subprocess.run([*words, str(N + 1)], env=common, check=True, cwd=root)
    ranks = [
        subprocess.Popen([*words, "4"], cwd=root,
                         env={**common, "WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]  # fmt: skip
    assert [process.wait() for process in ranks] == [0, 0]
    one, two = (pickle.loads((tmp_path / f"found-{world}.pickle").read_bytes()) for world in (1, 2))
    assert sorted(one) == ALONE
    for name in ALONE:
        assert_same(two[name], one[name], 1e-5)
