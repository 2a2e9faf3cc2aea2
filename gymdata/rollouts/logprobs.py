"""How far one model is from the one that sampled: the ratio of probabilities, token by token.

Invariants: both log-probabilities of a token are of the same temperature; sums run in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt


def truncations(identity: Mapping[str, Any]) -> list[str]:
    """Settings of a run under which its log-probabilities are not those of the whole distribution."""
    neutral: dict[str, tuple[object, ...]] = {
        "top_p": (None, 1),
        "top_k": (None, 0, -1),
        "min_p": (None, 0),
        "repetition_penalty": (None, 1),
        "presence_penalty": (None, 0),
        "frequency_penalty": (None, 0),
        "logprobs_mode": (None, "processed_logprobs", "raw_logprobs"),
    }
    settings = {**identity, **(identity.get("penalties") or {}), **(identity.get("sampling") or {})}
    return [f"{k} {settings[k]}" for k, fine in neutral.items() if settings.get(k) not in fine]


def sampling_bias(settings: Mapping[str, Any]) -> str | None:
    """Why log-probabilities sampled with these settings are biased, or None. Absent settings are neutral."""

    def number(name: str, neutral: float) -> float:
        value = settings.get(name)
        return float(value) if isinstance(value, (int, float)) else neutral

    penalties = settings.get("penalties")
    flat = {**settings, **(penalties if isinstance(penalties, Mapping) else {})}
    temperature = number("temperature", 1.0)
    reasons = []
    if temperature == 0:
        reasons.append("greedy decoding (temperature 0)")
    elif temperature != 1 and str(settings.get("logprobs_mode", "processed_logprobs")).startswith("raw"):
        reasons.append(f"raw log-probabilities at temperature {temperature:g}")
    if number("top_p", 1.0) < 1:
        reasons.append(f"top_p {settings['top_p']}")
    if number("top_k", 0) > 0:
        reasons.append(f"top_k {settings['top_k']}")
    if number("min_p", 0.0) > 0:
        reasons.append(f"min_p {settings['min_p']}")
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    for name, calm in neutral.items():
        value = flat.get(name)
        if isinstance(value, (int, float)) and value != calm:
            reasons.append(f"{name} {value}")
    return ", ".join(reasons) or None


Array = npt.NDArray[Any]

#: Ratios of tokens are called "near 1" within these bounds; a model that sampled the file has nearly all there.
NEAR = (0.9, 1.1)


def sampled_at(temperature: Array) -> Array:
    """The temperature to score at: greedy rows (0) have no distribution of their own and are scored at 1."""
    return np.where(temperature > 0, temperature, 1.0)


def ratio_facts(logps: Array, saved: Array) -> dict[str, float]:
    """How far a model is from the one that sampled: both float (n,), log-probs of the same tokens.

    Effective sample size is (Σr)² / Σr² as a share of n.
    """
    apart = logps.astype(np.float64) - saved.astype(np.float64)
    with np.errstate(over="ignore"):
        ratio = np.exp(apart)
    outside = float(((ratio < NEAR[0]) | (ratio > NEAR[1])).mean())
    with np.errstate(over="ignore"):
        square = float(np.square(ratio).sum())
    effective = float(ratio.sum()) ** 2 / square / len(ratio) if square and math.isfinite(square) else 0.0
    return {
        "tokens": len(ratio), "mean": float(ratio.mean()), "max": float(ratio.max()), "min": float(ratio.min()),
        "share_outside": outside, "effective_sample_size": effective, "max_abs_difference": float(np.abs(apart).max()),
    }  # fmt: skip


def ratio_text(facts: dict[str, float]) -> str:
    """The facts as a line for people."""
    return (
        f"ratio to the sampler over {facts['tokens']:,} tokens: mean {facts['mean']:.6f}, max {facts['max']:.6g}, outside "
        f"[{NEAR[0]}, {NEAR[1]}] {facts['share_outside']:.2%}, effective sample size "
        f"{facts['effective_sample_size']:.1%}, max |Δ log p| {facts['max_abs_difference']:.3g}"
    )
