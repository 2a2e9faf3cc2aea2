"""What both engines share: the sampling settings, and the alternatives to a sampled token.

Invariants: every setting is sent explicitly, so that neither a server's nor a checkpoint's own defaults can bend the
distribution that the log-probabilities are recorded under.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from gymdata.errors import UsageError

#: Engines write impossible tokens as -inf or as this, depending on the transport; neither is an alternative.
_IMPOSSIBLE = -9999.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. The defaults sample the policy itself: log-probabilities are then unbiased."""

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

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Sampling:
        """From a mapping of the field names above; None means the default. Raises UsageError on an unknown name."""
        known = [f.name for f in fields(cls)]
        for key in settings:
            if key not in known:
                raise UsageError.unknown_key(key, known, "sampling")
        given = {key: value for key, value in settings.items() if value is not None}
        if "stop_token_ids" in given:
            given["stop_token_ids"] = tuple(given["stop_token_ids"])
        if given.get("top_k", 0) < 0:  # vLLM also spells "off" as -1
            given["top_k"] = 0
        return cls(**given)

    @property
    def processing_matters(self) -> bool:
        """True when the distribution that is sampled differs from the model's own softmax."""
        truncated = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        penalised = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return self.temperature not in (0.0, 1.0) or truncated or penalised

    def request_fields(self) -> dict[str, Any]:
        """The settings under the names that vLLM's SamplingParams and its HTTP request share, without log-probs."""
        names = [f.name for f in fields(self) if f.name not in ("top_logprobs", "stop_token_ids")]
        return {**{name: getattr(self, name) for name in names}, "stop_token_ids": list(self.stop_token_ids)}


def best_alternatives(entries: Iterable[tuple[int, float]], k: int) -> list[tuple[int, float]]:
    """The k most probable (id, log-prob) of one position, most probable first, ties by id.

    Engines list the sampled token as well as the best k, so a position has k or k + 1 entries in no promised order.
    """
    possible = {token: value for token, value in entries if value > _IMPOSSIBLE}
    return sorted(possible.items(), key=lambda item: (-item[1], item[0]))[:k]
