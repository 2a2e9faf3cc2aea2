"""How far one model is from the one that sampled: the ratio of probabilities, token by token.

Invariants: both log-probabilities of a token are of the same temperature; sums run in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from gymdata.errors import abridged

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
#: Those of them that leave ids out and change nothing else: the policy over what they keep is the sampler.
CUTS = ("top_p", "top_k", "min_p")
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


def sampling_biases(
    settings: Mapping[str, Any], temperatures: Iterable[float] | None = None, *, kept_sets: bool = False
) -> list[str]:
    """L304: why log-probabilities sampled with these settings are biased; empty when they are not.

    ``settings``: of a run's identity, or of a request; absent ones are neutral. ``temperatures``: those that were used,
    where the settings do not have them. ``kept_sets``: see ``truncations``.
    """
    return temperature_biases(settings, temperatures) + truncations(settings, kept_sets=kept_sets)


def temperature_biases(settings: Mapping[str, Any], temperatures: Iterable[float] | None = None) -> list[str]:
    """The part of ``sampling_biases`` that temperatures make: greedy decoding, raw log-probabilities when they are not 1."""
    temperature = settings.get("temperature")
    used = sorted(set([temperature] if temperatures is None and _is_number(temperature) else temperatures or ()))
    reasons = ["greedy decoding (temperature 0)"] if 0 in used else []
    other = [f"{value:g}" for value in used if value not in (0, 1)]
    if other and str(settings.get("logprobs_mode")).startswith("raw"):
        reasons.append(f"raw log-probabilities at temperature {abridged(other)}")
    return reasons


def truncations(settings: Mapping[str, Any], *, kept_sets: bool = False) -> list[str]:
    """The part of ``sampling_biases`` under which log-probabilities are not those of the whole distribution. A parameter of
    ``sampling`` that is not known is taken to change it. ``kept_sets``: without ``CUTS`` where log-probs are said to be
    processed, which are no bias where each saved head is the set of ids that they keep."""
    flat, nested = dict(settings), dict[str, Any]()
    for inner in ("penalties", "sampling"):
        if isinstance(more := settings.get(inner), Mapping):
            flat |= more
            nested |= more
    passed = CUTS if kept_sets and flat.get("logprobs_mode") == "processed_logprobs" else ()
    reasons = [
        f"{name} {flat[name]}"
        for name, changes in BIASES.items()
        if name not in passed and _is_number(flat.get(name)) and changes(flat[name])
    ]
    reasons += [f"{name} {nested[name]}" for name in nested if name not in BIASES and name not in _HARMLESS]
    mode = flat.get("logprobs_mode")
    return reasons + ([f"logprobs_mode {mode}"] if isinstance(mode, str) and mode not in _LOGPROBS else [])


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float))


Array = npt.NDArray[Any]

#: Ratios of tokens are called "near 1" within these bounds; a model that sampled the file has nearly all there.
NEAR = (0.9, 1.1)
#: E r is 1 whichever model sampled: with a mean outside of these bounds the numbers are those of no model that sampled.
MEANS = (0.5, 2.0)
#: Nats: a count of tokens that a share explains with less than e^-16 (1e-7) is more than that share.
_IMPROBABLE = 16.0
#: Tokens that are ``Rounding.token`` apart or more which no mean and no effective sample size counts.
_OUTLIERS = 2


class Rounding(NamedTuple):
    """What rounding leaves at most between two computations of one model's log-probs.

    ``mean``: mean |Δ|; ``token``: |Δ| that the share ``far`` of the tokens exceeds; ``outside``: share of ratios outside of
    ``NEAR``; ``effective``: least effective sample size; ``ratio``: distance of the mean ratio from 1, besides four
    standard errors. For the mean |Δ|, the mean ratio and the effective sample size a token counts as at most ``token``
    apart, so that no single one decides.
    """

    mean: float
    token: float
    far: float
    outside: float
    effective: float
    ratio: float

    @classmethod
    def of(cls, *formats: object) -> Rounding:
        """That of the coarsest of the number formats in which log-probs were computed; one that is not known counts as
        bfloat16."""
        names = [str(name).removeprefix("torch.") for name in formats]
        coarsest = max(names, key=lambda name: [*ROUNDING].index(name) if name in ROUNDING else len(ROUNDING))
        return ROUNDING.get(coarsest, ROUNDING["bfloat16"])

    def tolerating(self, token: float) -> Rounding:
        """With a limit of the user's on the |Δ| of a token, of which a tenth is allowed in the mean."""
        return Rounding(token / 10, token, self.far, outside=1.0, effective=0.0, ratio=math.inf)


#: By number format, the finest first. Measured in tests/benchmarks/RESULTS.md, "Number formats".
ROUNDING = {
    "float32": Rounding(mean=1e-4, token=1e-3, far=1e-5, outside=1e-3, effective=0.9999, ratio=5e-4),
    "float16": Rounding(mean=0.01, token=0.1, far=0.005, outside=0.01, effective=0.999, ratio=5e-3),
    "bfloat16": Rounding(mean=0.045, token=0.5, far=0.003, outside=0.13, effective=0.994, ratio=0.01),
}


def more_than(count: npt.ArrayLike, tokens: npt.ArrayLike, share: float) -> npt.NDArray[np.bool_]:
    """Whether ``count`` of ``tokens`` is more than ``share`` of them by more than chance (Chernoff's bound of the binomial
    tail), bool, of their shape."""
    n = np.maximum(np.asarray(tokens, np.float64), 1.0)
    rate = np.asarray(count, np.float64) / n
    with np.errstate(divide="ignore", invalid="ignore"):
        nats = rate * np.log(rate / share) + np.where(rate < 1, (1 - rate) * np.log((1 - rate) / (1 - share)), 0.0)
    return np.asarray((rate > share) & (n * nats > _IMPROBABLE))


def sampled_at(temperature: Array) -> Array:
    """The temperature to score at: greedy rows (0) have no distribution of their own and are scored at 1."""
    return np.where(temperature > 0, temperature, 1.0)


#: Fewer tokens than this may be alike by chance; of one rollout, of which a sampler is not certain of each, these.
LEAST_TOKENS, LEAST_OF_ROLLOUT = 64, 8
#: Nats: below the least normal float32 probability nothing is drawn. Sentinels are there: −100, −9999, −1e9.
LEAST_LOG_PROB = float(np.log(np.finfo(np.float32).tiny))


def all_alike(logprobs: Array, lengths: Array) -> npt.NDArray[np.bool_]:
    """(n,) which of n rollouts have ``LEAST_OF_ROLLOUT`` log-probs or more, all of them equal: a sampler's differ.
    ``logprobs``: float, those of all rollouts; ``lengths``: int (n,), how many each has."""
    alike, long = np.zeros(len(lengths), np.bool_), np.flatnonzero(lengths >= LEAST_OF_ROLLOUT)
    last = np.cumsum(lengths)[long] - 1
    changes = np.append(0, np.cumsum(logprobs[1:] != logprobs[:-1]))
    usable = np.isfinite(logprobs[last]) & (logprobs[last] <= POSITIVE_TOLERANCE)
    alike[long] = usable & (changes[last] == changes[last - lengths[long] + 1])
    return alike


@dataclass(slots=True)
class SampledLogProbs:
    """Whether the log-probs of a file, which come in parts, can be a sampler's (L306). NaN, infinite and positive ones have
    codes of their own and are not counted.

    ``filled``: tokens of rollouts in which all are alike (``all_alike``); ``followers``: tokens after another of their turn;
    ``alike``: those of them that have its log-prob; ``rounded``: tokens whose log-prob has at most two decimals.
    """

    tokens: int = 0
    filled: int = 0
    sentinels: int = 0
    rounded: int = 0
    followers: int = 0
    alike: int = 0
    low: float = math.inf
    high: float = -math.inf

    def add(self, logprobs: Array, follows: npt.NDArray[np.bool_], lengths: Array) -> None:
        """Log-probs of further tokens, float (n,); ``follows``, bool (n,): the token before is of the same turn;
        ``lengths``: how many of them each of the rollouts has."""
        if not len(logprobs):
            return
        self.filled += int(lengths[all_alike(logprobs, lengths)].sum())
        low, high = logprobs.min(), logprobs.max()
        if self.rounded < self.tokens and self.alike < self.followers and low >= LEAST_LOG_PROB and high <= 0:
            self.tokens += len(logprobs)  # neither rounded nor alike, whatever these are
            return
        usable = np.isfinite(logprobs) & (logprobs <= POSITIVE_TOLERANCE)
        values = logprobs[usable]
        follows = follows[1:] & usable[1:] & usable[:-1]
        self.tokens += len(values)
        self.sentinels += int((values < LEAST_LOG_PROB).sum())
        self.rounded += int((np.round(values.astype(np.float64), 2).astype(values.dtype) == values).sum())
        self.followers += int(follows.sum())
        self.alike += int((follows & (logprobs[1:] == logprobs[:-1])).sum())
        self.low = min(self.low, float(values.min(initial=math.inf)))
        self.high = max(self.high, float(values.max(initial=-math.inf)))

    def fault(self) -> str:
        """Why they cannot be, with the count; empty where they can, and where there are fewer than ``LEAST_TOKENS``."""
        if self.tokens < LEAST_TOKENS:
            return ""
        if self.sentinels:
            share = f"{self.sentinels:,} of {self.tokens:,} log-probabilities"
            return f"{share} are below {LEAST_LOG_PROB:.1f} (least: {self.low:g}), less than float32 can sample"
        if self.low == self.high:
            return f"all {self.tokens:,} log-probabilities are {self.low + 0.0:g}"
        if self.alike == self.followers >= LEAST_TOKENS // 2:
            return f"all log-probabilities of a turn are equal, in every turn ({self.tokens:,} tokens)"
        if self.rounded == self.tokens:
            return f"all {self.tokens:,} log-probabilities have at most two decimals"
        share = f"{self.filled:,} of {self.tokens:,} log-probabilities are of rollouts in which all are equal"
        return share * (self.filled >= LEAST_TOKENS)


@dataclass
class Ratios:
    """How far a model is from the one that sampled, of tokens that come in parts.

    Effective sample size is (Σr)² / Σr² as a share of n.
    """

    rounding: Rounding
    tokens: int = 0
    total: float = 0.0
    squares: float = 0.0
    outside: int = 0
    beyond: int = 0
    low: float = math.inf
    high: float = -math.inf
    apart: float = 0.0
    absolute: float = 0.0
    #: Sums of |Δ|, ratios and their squares in which a token is at most ``rounding.token`` apart.
    limited: tuple[float, float, float] = (0.0, 0.0, 0.0)

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
        self.beyond += int((np.abs(apart) > self.rounding.token).sum())
        self.absolute += float(np.abs(apart).sum())
        # numpy's, so that a NaN stays one.
        self.low, self.high = float(np.minimum(self.low, ratio.min())), float(np.maximum(self.high, ratio.max()))
        self.apart = float(np.maximum(self.apart, np.abs(apart).max()))
        near = np.clip(apart, -self.rounding.token, self.rounding.token)
        a, b, c = self.limited
        self.limited = a + float(np.abs(near).sum()), b + float(np.exp(near).sum()), c + float(np.exp(2 * near).sum())

    def facts(self) -> dict[str, float]:
        n = self.tokens
        usable = self.squares and math.isfinite(self.squares)
        return {
            "tokens": n,
            "mean": self.total / n,
            "max": self.high,
            "min": self.low,
            "share_outside": self.outside / n,
            "effective_sample_size": self.total**2 / self.squares / n if usable else 0.0,
            "max_abs_difference": self.apart,
            "mean_abs_difference": self.absolute / n,
            "share_beyond": self.beyond / n,
        }

    def departures(self) -> list[str]:
        """What shows, beyond rounding, that the saved log-probs are not the model's; empty where nothing does."""
        n, limit = self.tokens, self.rounding
        absolute, total, squares = self.limited
        mean, ratio, effective = absolute / n, total / n, total**2 / squares / n
        capped = f" with tokens counted as at most {limit.token:g} apart" if self.beyond else ""
        departures = []
        if more_than(self.beyond, n, limit.far):
            departures.append(
                f"{self.beyond / n:.2%} of the tokens are more than {limit.token:g} apart (rounding: {100 * limit.far:g}%)"
            )
        if more_than(self.outside, n, limit.outside):
            departures.append(
                f"{self.outside / n:.1%} of the ratios are outside {list(NEAR)} (rounding: {limit.outside:.1%})"
            )
        if not mean <= limit.mean + _OUTLIERS * limit.token / n:
            departures.append(f"mean |Δ log p| {mean:.3g}{capped} (rounding: {limit.mean:g})")
        error = ratio * math.sqrt(max(0.0, 1 / effective - 1) / n) if effective > 0 else 0.0
        if not abs(ratio - 1) <= limit.ratio + 4 * error:
            departures.append(f"mean ratio {ratio:.4f}{capped} (rounding: 1 ± {limit.ratio + 4 * error:.2g})")
        outliers = _OUTLIERS * math.expm1(limit.token) ** 2 / n
        if not effective >= limit.effective / (1 + limit.effective * outliers):
            departures.append(f"effective sample size {effective:.1%}{capped} (rounding: {limit.effective:.1%})")
        return departures


def ratio_text(facts: dict[str, float]) -> str:
    """The facts as a line for people."""
    return (
        f"ratio to the sampler over {facts['tokens']:,} tokens: mean {facts['mean']:.6f}, max {facts['max']:.6g}, outside "
        f"[{NEAR[0]}, {NEAR[1]}] {facts['share_outside']:.2%}, effective sample size "
        f"{facts['effective_sample_size']:.1%}, mean |Δ log p| {facts['mean_abs_difference']:.3g}, max "
        f"{facts['max_abs_difference']:.3g}"
    )


def ratio_of_version(facts: Mapping[str, float]) -> str:
    """The facts of one policy version as a line for people; ``clipped``: those that the loss limits, where it is known."""
    text = f"{facts['tokens']:,} tokens, mean ratio {facts['mean']:.4f}, effective sample size "
    return (
        text
        + f"{facts['effective_sample_size']:.1%}"
        + (f", clipped {facts['clipped']:.1%}" if "clipped" in facts else "")
    )
