"""Parses a server's answers: generations with their evidence, or the reason why an answer has none.

Invariants: a choice becomes a generation only with prompt ids, sampled ids and one log-probability for each, all of
them checked; any other answer is the engine's fault, which may pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

from gymdata.engines.port import FinishReason, Generation
from gymdata.engines.sampling import AnswerFaultError, best_alternatives, check_generation
from gymdata.errors import OutsideError
from gymdata.rollouts.messages import JsonObject

_NO_IDS = (
    "it takes a vLLM server of version 0.10.2 or later, called directly: a proxy must pass `return_token_ids` through"
)
_NO_LOGPROBS = "start the server without --max-logprobs 0"


class Evidence(NamedTuple):
    """The parts of one choice as they came; None: not there. ``alternatives``: {token name: log-prob} a position."""

    prompt: Any
    ids: Any
    log_probs: Any
    alternatives: Any
    finish_reason: Any
    weights: Any

    @classmethod
    def of(cls, choice: JsonObject) -> Evidence:
        """The evidence in a choice."""
        log_probs = choice.get("logprobs") or {}
        return cls(
            choice.get("prompt_token_ids"),
            choice.get("token_ids"),
            log_probs.get("token_logprobs"),
            log_probs.get("top_logprobs"),
            choice.get("finish_reason"),
            choice.get("weight_versions"),
        )


#: vLLM's default name for a weight version.
_UNNAMED = "default"


def generations(answer: JsonObject, body: JsonObject, *, vocab_size: int | None) -> list[Generation]:
    """The ``body["n"]`` generations of an answer, in the order of their indexes, each checked (``check_generation``).

    Raises AnswerFaultError for an answer without ids or log-probabilities or with wrong ones, OutsideError for one in no
    known shape; both may pass.
    """
    choices = answer.get("choices")
    n, k = body["n"], body["logprobs"]
    if not isinstance(choices, list) or len(choices) != n or not all(isinstance(c, dict) for c in choices):
        raise garbage(f"an answer with {n} choices", answer)
    out: list[Generation | None] = [None] * n
    for choice in choices:
        try:
            evidence = Evidence.of(choice)
        except (AttributeError, TypeError) as error:
            raise garbage("one with log-probabilities in a known shape", choice) from error
        if evidence.ids is None or evidence.prompt is None:
            raise AnswerFaultError("no_ids", "the server does not return token ids", hint=_NO_IDS)
        if evidence.log_probs is None:
            raise AnswerFaultError("no_logprobs", "the server does not return log-probabilities", hint=_NO_LOGPROBS)
        index = choice.get("index")
        lists = all(isinstance(part, list) for part in (evidence.ids, evidence.prompt, evidence.log_probs))
        if not lists or type(index) is not int or not 0 <= index < n or out[index] is not None:
            raise garbage("ids with one log-probability each", choice)
        generation = Generation(
            prompt_token_ids=evidence.prompt,
            token_ids=evidence.ids,
            log_probs=evidence.log_probs,
            finish_reason=evidence.finish_reason if evidence.finish_reason in get_args(FinishReason) else "abort",
            stop_reason=choice.get("stop_reason"),
            top_log_probs=_alternatives(evidence.alternatives, k) if k else None,
            weight_versions=_weights(evidence.weights, len(evidence.ids)),
        )
        check_generation(generation, max_tokens=body["max_tokens"], vocab_size=vocab_size, sent=body["prompt"])
        out[index] = generation
    return [g for g in out if g is not None]


def _alternatives(positions: Any, k: int) -> list[list[tuple[int, float]]]:
    try:
        return [
            best_alternatives(((int(name.removeprefix("token_id:")), value) for name, value in (row or {}).items()), k)
            for row in positions
        ]
    except (TypeError, ValueError, AttributeError) as error:
        raise garbage("alternatives named token_id:N", positions) from error


def _weights(spans: Any, n: int) -> list[tuple[str, int, int]] | None:
    """The spans of weight versions; None where the engine names none, or no weights but those it started with."""
    if not spans:
        return None
    try:
        versions = [(str(span["version"]), int(span["start"]), int(span["end"])) for span in spans]
    except (TypeError, KeyError, ValueError) as error:
        raise garbage("spans of weight versions", spans) from error
    if [span[1] for span in versions] != [0, *(span[2] for span in versions[:-1])] or versions[-1][2] != n:
        raise garbage(f"spans of weight versions that cover {n} tokens", spans)
    return None if {version for version, *_ in versions} == {_UNNAMED} else versions


def garbage(expected: str, got: object) -> OutsideError:
    """An answer in no known shape; another try may be better."""
    return OutsideError("engine", f"the server's answer is not {expected}: got {str(got)[:200]!r}", retryable=True)
