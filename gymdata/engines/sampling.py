"""Shared by all engines: the sampling settings, the alternatives to a sampled token, and the checks of a generation.

Invariants: every setting is sent explicitly, so that neither a server's nor a checkpoint's own defaults can bend the
distribution that the log-probabilities are recorded under. A generation that passes can be stored, trained and compared with
the model's own log-probabilities; one that does not is a fault of the engine (it may pass, so it may be tried again), and
its message names what was got, what was expected and where.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Literal

import numpy as np

from gymdata.engines.port import Generation
from gymdata.errors import OutsideError, UsageError
from gymdata.rollouts.logprobs import POSITIVE_TOLERANCE, truncations
from gymdata.rollouts.messages import JsonObject

#: vLLM's HTTP routes write this for -inf, which JSON cannot hold; no model gives a sampled token so little, and neither is
#: an alternative.
PLACEHOLDER = -9999.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. The defaults sample the policy itself: log-probabilities are then unbiased. ``more``: any other
    parameters of vLLM's, by its names."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    more: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Sampling:
        """From a mapping of vLLM's names; None means the default. Raises UsageError for a name that is nearly one of those
        above: a server would pass over it."""
        for key in settings:
            if key not in _NAMES and get_close_matches(key, _NAMES, cutoff=0.8):
                raise UsageError.unknown_key(key, _NAMES, "sampling")
        more = {key: value for key, value in settings.items() if value is not None}
        own = {f.name: more.pop(f.name) for f in fields(cls) if f.name in more}
        if "stop_token_ids" in own:
            own["stop_token_ids"] = tuple(own["stop_token_ids"])
        if own.get("top_k", 0) < 0:  # vLLM also spells "off" as -1
            own["top_k"] = 0
        return cls(**own, more=more)

    def changed(self, settings: Mapping[str, Any] | None) -> Sampling:
        """These settings with those of a request."""
        if not settings:
            return self
        return Sampling.of({**self.request_fields(), "top_logprobs": self.top_logprobs, **settings})

    @property
    def processing_matters(self) -> bool:
        """True when the distribution that is sampled differs from the model's own softmax."""
        changed = {key: value for key, value in self.request_fields().items() if value != _NEUTRAL.get(key)}
        return self.temperature not in (0.0, 1.0) or bool(truncations({"sampling": changed}))

    @property
    def reads_text(self) -> bool:
        """Whether the engine must write tokens out while it samples, to find texts that end a generation."""
        return bool(self.more.get("stop"))

    def request_fields(self) -> JsonObject:
        """The settings under the names that vLLM's SamplingParams and its HTTP request share, without log-probs."""
        names = [f.name for f in fields(self) if f.name not in ("top_logprobs", "more")]
        return {
            **{name: getattr(self, name) for name in names},
            "stop_token_ids": list(self.stop_token_ids),
            **self.more,
        }


_NEUTRAL = Sampling().request_fields()
_NAMES = [f.name for f in fields(Sampling) if f.name != "more"]


def best_alternatives(entries: Iterable[tuple[int, float]], k: int) -> list[tuple[int, float]]:
    """The k most probable (id, log-prob) of one position, most probable first, ties by id.

    Engines list the sampled token as well as the best k, so a position has k or k + 1 entries in no promised order.
    """
    possible = {token: value for token, value in entries if value > PLACEHOLDER}
    return sorted(possible.items(), key=lambda item: (-item[1], item[0]))[:k]


Fault = Literal["no_ids", "no_logprobs", "prompt", "shape", "ids", "logprobs", "positive", "length", "model"]
_MOST_IDS = 2**31


class AnswerFaultError(OutsideError):
    """The engine answered, and the answer cannot be stored. ``fault`` names the rule that it breaks."""

    def __init__(self, fault: Fault, message: str, *, hint: str | None = None) -> None:
        super().__init__("engine", message, hint=hint, retryable=True)
        self.fault = fault


def check_generation(
    generation: Generation,
    *,
    max_tokens: int,
    vocab_size: int | None = None,
    sent: Sequence[int] | None = None,
    log_probs: bool = True,
) -> None:
    """Raises AnswerFaultError for a generation that breaks a rule.

    The prompt is the one that was ``sent`` (None: the server decides on it); ids are integers from 0 to ``vocab_size`` − 1
    (None: any int32); at most ``max_tokens`` were sampled; with ``log_probs`` there is one finite number at most 0 for each,
    where rounding may leave it up to ``POSITIVE_TOLERANCE`` above, and no placeholder.
    """
    prompt, ids = generation.prompt_token_ids, generation.token_ids
    if sent is None:
        check_ids(prompt, vocab_size, "prompt")
    elif prompt is not sent and list(prompt) != list(sent):
        index = next(
            (k for k, (a, b) in enumerate(zip(sent, prompt, strict=False)) if a != b), min(len(sent), len(prompt))
        )
        expected, actual = (_short(ids[index]) if index < len(ids) else "nothing" for ids in (sent, prompt))
        sizes = f"{len(sent):,} ids were sent and {len(prompt):,} read"
        difference = f"at position {index} got {actual}, expected {expected}"
        raise AnswerFaultError("prompt", f"another prompt was read than was sent: {sizes}, and {difference}")
    check_ids(ids, vocab_size, "generation")
    if len(ids) > max_tokens:
        raise AnswerFaultError("length", f"{len(ids):,} tokens were generated, expected at most {max_tokens:,}")
    if log_probs:
        _check_log_probs(generation.log_probs, len(ids))
    if generation.top_log_probs is not None:
        n = len(ids)
        if len(generation.top_log_probs) != n:
            raise AnswerFaultError(
                "shape", f"got alternatives for {len(generation.top_log_probs):,} of {n:,} generated ids"
            )
        check_ids([i for row in generation.top_log_probs for i, _ in row], vocab_size, "alternatives")
        values = _numbers(
            [value for row in generation.top_log_probs for _, value in row], "log-probability of an alternative"
        )
        if len(values) and not (np.isfinite(values).all() and values.max() <= POSITIVE_TOLERANCE):
            raise AnswerFaultError("logprobs", "a log-probability of an alternative is not finite, or above 0")


def cut_at_stop(generation: Generation, decode: Callable[[Sequence[int]], str], min_tokens: int) -> Generation:
    """The generation up to the token that completes the stop string it ended with, and how many ids were cut: an engine with
    speculative decoding returns those behind it, too. Stop strings within the first ``min_tokens`` tokens end nothing."""
    stop, ids = generation.stop_reason, generation.token_ids
    if generation.finish_reason != "stop" or not isinstance(stop, str) or not stop:
        return generation
    begins = max(0, len(decode(ids[:min_tokens])) - len(stop) + 1) if min_tokens else 0

    def complete(n: int) -> bool:
        return decode(ids[:n]).find(stop, begins) >= 0

    if len(ids) <= min_tokens or not complete(len(ids) - 1):
        return generation
    n = bisect_left(range(len(ids) - 1), True, lo=min_tokens, key=complete)
    spans = generation.weight_versions
    return replace(
        generation,
        token_ids=ids[:n],
        log_probs=generation.log_probs[:n],
        top_log_probs=None if generation.top_log_probs is None else generation.top_log_probs[:n],
        weight_versions=None if spans is None else [(v, start, min(end, n)) for v, start, end in spans if start < n],
        n_cut=len(ids) - n,
    )


def check_ids(ids: Sequence[int], vocab_size: int | None, where: str) -> None:
    if not len(ids):
        return
    limit = vocab_size if vocab_size is not None else _MOST_IDS
    # Python's own loops over lists: the numbers may be too large for any array.
    if set(map(type, ids)) != {int}:
        index, value = next((k, i) for k, i in enumerate(ids) if type(i) is not int)
        raise AnswerFaultError("ids", f"{where}: the id at position {index}: got {_short(value)}, expected an integer")
    if min(ids) < 0 or max(ids) >= limit:
        index, value = next((k, i) for k, i in enumerate(ids) if not 0 <= i < limit)
        raise AnswerFaultError(
            "ids",
            f"{where}: the id at position {index} is not in the vocabulary: got {_short(value)}, expected 0 to {limit - 1}",
        )


def _check_log_probs(log_probs: Sequence[float], n: int) -> None:
    if len(log_probs) != n:
        raise AnswerFaultError(
            "shape", f"got {len(log_probs):,} log-probabilities for {n:,} generated ids, expected one each"
        )
    # The sum is not finite if any number is not. For so few numbers Python's functions are faster than numpy's.
    plain = n > 0 and set(map(type, log_probs)) == {float} and math.isfinite(sum(log_probs))
    if plain and min(log_probs) > PLACEHOLDER and max(log_probs) <= POSITIVE_TOLERANCE:
        return
    values = _numbers(log_probs, "log-probability")
    if not n or (values.min() > PLACEHOLDER and values.max() <= POSITIVE_TOLERANCE):  # False where any is NaN
        return
    finite = np.isfinite(values)
    bad = ~finite | (values > POSITIVE_TOLERANCE) | (values <= PLACEHOLDER)
    token_index = int(np.flatnonzero(bad)[0])
    got = f"the log-probability of token {token_index} is {values[token_index]:g}"
    if not finite[token_index]:
        raise AnswerFaultError("logprobs", f"{got}, expected a finite number")
    if values[token_index] > 0:
        raise AnswerFaultError(
            "positive", f"{got}, expected at most 0 (more than {POSITIVE_TOLERANCE:g} is no rounding)"
        )
    raise AnswerFaultError(
        "logprobs", f"{got}, a placeholder for an impossible token, expected that of the sampled token"
    )


def _numbers(values: Sequence[float], what: str) -> np.ndarray:
    """float64 of plain numbers only."""
    if not set(map(type, values)) <= {float, int}:
        index, value = next((k, v) for k, v in enumerate(values) if type(v) not in (float, int))
        raise AnswerFaultError("shape", f"{what} {index}: got {_short(value)}, expected a number")
    try:
        return np.array(values, np.float64)
    except OverflowError as error:
        raise AnswerFaultError("logprobs", f"{what}: an integer beyond any float, expected a finite number") from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
