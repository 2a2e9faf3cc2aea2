"""Sequences of token ids with a mask of who wrote which token, as most trainers dump them: turns again.

Invariant: what the mask says that was sampled is generated, span by span, and everything before a span is its prompt; a mask
that contradicts the log-probabilities is an error with its first position.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gymdata.formats.conversion.importing import BadItem
from gymdata.rollouts.turns import Call, TopLogProb, TurnEncoder, WeightSpan


def group_of_ids(prompt: Sequence[int]) -> str:
    """Names a prompt by its ids, for a source that has no name for it."""
    return "prompt-" + hashlib.blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Masked:
    """``prompt``: ids that were given; ``response``: ids that follow, sampled where ``mask`` is 1 (None: all were);
    ``log_probs``: one for each token of the response, 0 where none was sampled; None where they are not known. ``names``:
    the columns of the response, its mask and its log-probabilities; ``first``: where the response begins in these.
    ``heads``: the sampler's head of each token of the response, where there are any."""

    prompt: Sequence[int]
    response: Sequence[int]
    mask: Sequence[float] | None
    log_probs: Sequence[float] | None
    names: tuple[str, str, str]
    first: int = 0
    heads: Sequence[list[TopLogProb]] | None = None

    @property
    def group(self) -> str:
        return group_of_ids(self.prompt)

    def turns(self, *, truncated: bool = False, versions: Sequence[str] = ()) -> TurnEncoder:
        """A turn per span that was sampled. ``truncated``: a limit ended the last; ``versions``: of the weights, one for all
        spans or one for each, else they are not known. Raises BadItem."""
        spans = self._spans()
        if not self.prompt and spans[0][0] == 0:
            raise BadItem("T205", "the prompt has no token ids")
        versions = versions if len(versions) == len(spans) else [*dict.fromkeys(versions)] * len(spans)
        known = len(versions) == len(spans)
        encoder, before = TurnEncoder(), 0
        whole = np.array(self.response, np.int32)
        log_probs = np.full(len(whole), math.nan) if self.log_probs is None else np.array(self.log_probs, np.float64)
        for n, (start, end) in enumerate(spans):
            given = whole[before:start] if n else np.concatenate((np.array(self.prompt, np.int32), whole[:start]))
            with np.errstate(over="ignore"):
                numbers = log_probs[start:end].astype(np.float32)
            finish = "length" if truncated and n == len(spans) - 1 else "stop"
            weights: list[WeightSpan] = [{"version": versions[n], "start": 0, "end": end - start}] if known else []
            heads = None if self.heads is None or not any(self.heads[start:end]) else [*self.heads[start:end]]
            call = Call(given, whole[start:end], numbers, finish, top_log_probs=heads, weight_versions=weights or None)
            encoder.add(call, continues=n > 0)
            before = end
        return encoder

    def _spans(self) -> list[tuple[int, int]]:
        """Where each span of sampled tokens begins and ends in the response."""
        response, of_mask, of_log_probs = self.names
        n = len(self.response)
        mask = [1] * n if self.mask is None else self.mask
        for name, values in ((of_mask, mask), (of_log_probs, self.log_probs)):
            if values is not None and len(values) != n:
                raise BadItem("L301", f"{name}: got {len(values)}, expected {n}, one per token of {response}")
        if (odd := next((i for i, value in enumerate(mask) if value not in (0, 1)), None)) is not None:
            raise BadItem.value(f"{of_mask}[{self.first + odd}]", mask[odd], "0 or 1")
        for i, value in enumerate(self.log_probs or ()):
            if not mask[i] and value != 0 and not math.isnan(value):
                why = f"the log-probability {value:.6g} says that it was sampled"
                at = self.first + i
                raise BadItem("S102", f"{of_mask}[{at}]: got 0, but {of_log_probs}[{at}]: {why}")
        begins = [0, *itertools.accumulate(len(list(group)) for _, group in itertools.groupby(mask))]
        spans = [(start, end) for start, end in itertools.pairwise(begins) if mask[start]]
        if not spans:
            raise BadItem("S103", f"{of_mask}: no token is marked as sampled")
        return spans


def shared_value(values: Sequence[float | None] | None, mask: Sequence[float]) -> float | None:
    """The number that all sampled tokens have, as an advantage within a group; None where they differ, or have none."""
    shared = {value for value, sampled in zip(values or (), mask, strict=False) if sampled}
    return shared.pop() if len(shared) == 1 else None


def listed(value: Any) -> Any:
    """A value with arrays and numbers of NumPy as JSON has it, and anything else that JSON has not as text."""
    return json.loads(json.dumps(value, default=lambda odd: odd.tolist() if hasattr(odd, "tolist") else str(odd)))
