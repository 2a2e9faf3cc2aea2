"""Losses and shaping once more, as slowly as they are defined: float64, with loops over tokens and over groups."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from gymdata.commands.train.losses import LOSSES

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
    from gymdata.commands.train.trainers.policy_loss import PolicyLoss

    loss = PolicyLoss(LOSSES[name].function, s, **{"aggregation": LOSSES[name].aggregation, **more})
    return loss(at["logprobs"], at["saved"], at["advantages"], at["mask"], at["reference"])


def gradient_of(total: Any, at: dict[str, Any]) -> Any:
    import torch

    (found,) = torch.autograd.grad(total, at["logprobs"])
    return found


NAN, INF = math.nan, math.inf
#: The estimators that are defined here.
SLOW = ("grpo", "rloo", "cpgd", "dr-grpo", "reinforce-baseline", "reinforce", "gae", "reinforce++", "remax")


def slow_shape(group: list[float], kind: str) -> list[float]:
    """One group, one reward at a time, straight from the definitions."""
    known = [r for r in group if math.isfinite(r)]
    flat = len(known) < 2 or statistics.pstdev(known) <= 1e-9 * max(map(abs, known))
    result = []
    for r in group:
        if not math.isfinite(r):
            result.append(NAN)
        elif kind in ("reinforce", "gae", "reinforce++", "remax"):
            result.append(r)
        elif flat:
            result.append(0.0)
        elif kind == "rloo":
            result.append(r - (sum(known) - r) / (len(known) - 1))
        else:
            mean = sum(known) / len(known)
            scale = {"grpo": statistics.stdev(known) + 1e-9, "cpgd": statistics.pstdev(known) + 1e-6}.get(kind, 1.0)
            result.append((r - mean) / scale)
    return result
