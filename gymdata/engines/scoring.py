"""Tokens to be scored by a model's forward pass, flat, and where their scores belong.

Invariant: scores come back in the order in which the tokens were sampled, whatever the order of the sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gymdata.errors import RefusedError
from gymdata.rollouts.logprobs import sampled_at
from gymdata.rollouts.sequences import Stitched

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ToScore:
    """n sequences, flat: sequence i is ``ids[starts[i]:starts[i + 1]]`` (int32), its tokens with ``mask`` (bool) are scored
    at ``temperature[i]`` (above 0)."""

    ids: Array
    starts: Array
    mask: Array
    temperature: Array

    @classmethod
    def of(cls, part: Stitched, temperature: Array) -> ToScore:
        """The sequences of ``part``; ``temperature`` has one entry a rollout of its batch, as the rows say it."""
        starts = part.starts - part.starts[0] if len(part.starts) else np.zeros(1, np.int64)
        return cls(part.ids, starts, part.mask, sampled_at(temperature[part.rollout]).astype(np.float64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def lengths(self) -> Array:
        return np.diff(self.starts)

    @cached_property
    def scored_starts(self) -> Array:
        """Where each sequence's scores begin among all scores, int64 (n + 1,)."""
        running = np.concatenate(([0], np.cumsum(self.mask, dtype=np.int64)))
        return running[self.starts]

    @cached_property
    def n_scored(self) -> int:
        return int(self.scored_starts[-1])

    def span(self, i: int) -> slice:
        return slice(int(self.starts[i]), int(self.starts[i + 1]))

    def scored_span(self, i: int) -> slice:
        return slice(int(self.scored_starts[i]), int(self.scored_starts[i + 1]))

    def take(self, rows: Array) -> ToScore:
        """The sequences at ``rows`` (int), in that order."""
        spans = [self.span(int(i)) for i in rows]
        bounds = np.concatenate(([0], np.cumsum([s.stop - s.start for s in spans], dtype=np.int64))).astype(np.int64)
        none = np.empty(0, np.int32)
        ids = np.concatenate([self.ids[s] for s in spans]) if spans else none
        mask = np.concatenate([self.mask[s] for s in spans]) if spans else none.astype(np.bool_)
        return ToScore(ids, bounds, mask, self.temperature[rows])

    def batches(self, max_tokens: int) -> Iterator[Array]:
        """Row numbers of sequences with something to score, the longest first, at most ``max_tokens`` with padding a
        batch; a longer sequence goes alone."""
        order = np.argsort(-self.lengths, kind="stable")
        order = order[np.diff(self.scored_starts)[order] > 0]
        at = 0
        while at < len(order):
            size = max(1, max_tokens // int(self.lengths[order[at]]))
            yield order[at : at + size]
            at += size

    def refuse_unscorable(self, vocab_size: int, max_length: int | None, model: str) -> None:
        """Raises RefusedError for what ``model`` cannot read: an id that is not in its vocabulary (T206), a sequence that
        is longer than it reads, or a scored token that nothing stands before (T205)."""
        if not len(self.ids):
            return
        low, high = int(self.ids.min()), int(self.ids.max())
        if low < 0 or high >= vocab_size:
            raise RefusedError(
                f"token id {low if low < 0 else high} is not in the vocabulary of {model} (0 to {vocab_size - 1})",
                code="T206",
                hint="these tokens were sampled with another tokenizer",
            )
        longest = int(self.lengths.max())
        if max_length is not None and longest > max_length:
            raise RefusedError(f"the longest sequence has {longest:,} tokens, {model} reads at most {max_length:,}")
        filled = self.lengths > 0
        if bool(self.mask[self.starts[:-1][filled]].any()):
            raise RefusedError("a generation has no prompt before it, so nothing predicts its first token", code="T205")


def in_sampled_order(part: Stitched, scores: Array) -> Array:
    """Scores of ``ToScore.of(part, …)`` as the sampled tokens of ``part`` stand, in turn order."""
    if part.source is None:
        return scores
    result = np.empty_like(scores)
    result[part.source] = scores
    return result


class RolloutOrder:
    """Sampled tokens of several ``Stitched`` of one batch of ``n`` rollouts, put into the order of the rollouts.

    ``offsets`` (n + 1), ``turn_ends``, ``turn_rollout`` and ``turn_number`` as in ``LogprobComparison``.
    """

    def __init__(self, parts: Sequence[Stitched], n: int) -> None:
        lengths = sum((np.diff(part.offsets) for part in parts), np.zeros(n, np.int64))
        self.offsets = np.concatenate(([0], np.cumsum(lengths)))
        self._places = []
        for part in parts:
            mine = np.diff(part.offsets)
            self._places.append(np.repeat(self.offsets[:-1] - part.offsets[:-1], mine) + np.arange(part.offsets[-1]))
        owner = np.concatenate([part.turn_rollout for part in parts])
        sizes = np.concatenate([np.diff(part.turn_ends, prepend=0) for part in parts])
        order = np.argsort(owner, kind="stable")
        self.turn_rollout = owner[order]
        self.turn_ends = np.cumsum(sizes[order])
        self.turn_number = np.arange(len(order)) - np.searchsorted(self.turn_rollout, self.turn_rollout)

    def tokens(self, values: Sequence[Array]) -> Array:
        """One array of the tokens of each part → one of all."""
        result = np.empty(int(self.offsets[-1]), values[0].dtype)
        for place, mine in zip(self._places, values, strict=True):
            result[place] = mine
        return result
