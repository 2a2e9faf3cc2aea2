"""How far one model is from the one that sampled: the ratio of probabilities, token by token.

Invariants: both log-probabilities of a token are of the same temperature; sums run in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

#: Rounding in a log-softmax can end this far above zero.
POSITIVE_TOLERANCE = 1e-6

_LOGPROBS = ("processed_logprobs", "raw_logprobs")
#: Setting → whether a value of it takes tokens out of the distribution, or changes it.
BIASES: dict[str, Callable[[float], bool]] = {
    "top_p": lambda value: value < 1,
    "top_k": lambda value: value > 0,
    "min_p": lambda value: value > 0,
    "repetition_penalty": lambda value: value != 1,
    "presence_penalty": lambda value: value != 0,
    "frequency_penalty": lambda value: value != 0,
}
#: Other sampling parameters that end or describe a generation, and leave the distribution of its tokens alone.
_HARMLESS = frozenset(
    (
        "temperature",
        "max_tokens",
        "max_turns",
        "max_context",
        "time_limit",
        "seed",
        "n",
        "logprobs",
        "top_logprobs",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "repetition_detection",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "detokenize",
        "skip_reading_prefix_cache",
        "priority",
    )
)


def sampling_biases(settings: Mapping[str, Any], temperatures: Iterable[float] | None = None) -> list[str]:
    """L304: why log-probabilities sampled with these settings are biased; empty when they are not.

    ``settings``: of a run's identity, or of a request; absent ones are neutral. ``temperatures``: those that were used,
    where the settings do not have them.
    """
    return temperature_biases(settings, temperatures) + truncations(settings)


def temperature_biases(settings: Mapping[str, Any], temperatures: Iterable[float] | None = None) -> list[str]:
    """The part of ``sampling_biases`` that temperatures make: greedy decoding, raw log-probabilities when they are not 1."""
    given = settings.get("temperature")
    used = sorted(set([given] if temperatures is None and _is_number(given) else temperatures or ()))
    reasons = ["greedy decoding (temperature 0)"] if 0 in used else []
    other = [f"{value:g}" for value in used if value not in (0, 1)]
    if other and str(settings.get("logprobs_mode")).startswith("raw"):
        reasons.append(f"raw log-probabilities at temperature {', '.join(other)}")
    return reasons


def truncations(settings: Mapping[str, Any]) -> list[str]:
    """The part of ``sampling_biases`` under which log-probabilities are not those of the whole distribution. A parameter of
    ``sampling`` that is not known is taken to change it."""
    flat, others = dict(settings), dict[str, Any]()
    for inner in ("penalties", "sampling"):
        if isinstance(more := settings.get(inner), Mapping):
            flat |= more
            others |= more
    reasons = [
        f"{name} {flat[name]}" for name, changes in BIASES.items() if _is_number(flat.get(name)) and changes(flat[name])
    ]
    reasons += [f"{name} {others[name]}" for name in others if name not in BIASES and name not in _HARMLESS]
    mode = flat.get("logprobs_mode")
    return reasons + ([f"logprobs_mode {mode}"] if isinstance(mode, str) and mode not in _LOGPROBS else [])


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float))


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
    ratios = Ratios()
    ratios.add(logps, saved)
    return ratios.facts()


@dataclass
class Ratios:
    """``ratio_facts`` of tokens that come in parts."""

    tokens: int = 0
    total: float = 0.0
    squares: float = 0.0
    outside: int = 0
    low: float = math.inf
    high: float = -math.inf
    apart: float = 0.0

    def add(self, logps: Array, saved: Array) -> None:
        """Log-probs of further tokens, both float (n,)."""
        if not len(logps):
            return
        apart = logps.astype(np.float64) - saved.astype(np.float64)
        with np.errstate(over="ignore"):
            ratio = np.exp(apart)
            self.squares += float(np.square(ratio).sum())
            self.total += float(ratio.sum())
        self.tokens += len(ratio)
        self.outside += int(((ratio < NEAR[0]) | (ratio > NEAR[1])).sum())
        # numpy's, so that a NaN stays one.
        self.low, self.high = float(np.minimum(self.low, ratio.min())), float(np.maximum(self.high, ratio.max()))
        self.apart = float(np.maximum(self.apart, np.abs(apart).max()))

    def facts(self) -> dict[str, float]:
        n = self.tokens
        usable = self.squares and math.isfinite(self.squares)
        return {
            "tokens": n, "mean": self.total / n, "max": self.high, "min": self.low, "share_outside": self.outside / n,
            "effective_sample_size": self.total**2 / self.squares / n if usable else 0.0, "max_abs_difference": self.apart,
        }  # fmt: skip


def ratio_text(facts: dict[str, float]) -> str:
    """The facts as a line for people."""
    return (
        f"ratio to the sampler over {facts['tokens']:,} tokens: mean {facts['mean']:.6f}, max {facts['max']:.6g}, outside "
        f"[{NEAR[0]}, {NEAR[1]}] {facts['share_outside']:.2%}, effective sample size "
        f"{facts['effective_sample_size']:.1%}, max |Δ log p| {facts['max_abs_difference']:.3g}"
    )
