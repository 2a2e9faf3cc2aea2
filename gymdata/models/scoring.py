"""Tokens to be scored by a model's forward pass, flat, and where their scores belong.

Invariant: scores come back in the order of the sequences, whatever the order in which they were scored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from gymdata.errors import RefusedError
from gymdata.models.prefix_tree import prompt_groups, sibling_order
from gymdata.rollouts.logprobs import sampled_at
from gymdata.rollouts.ragged import Array, Ragged, offsets_of
from gymdata.rollouts.sequences import RolloutSequences
from gymdata.store.paths import Facts


def refuse_unknown_ids(ids: Array, vocab_size: int | None, model: str, where: str = "") -> None:
    """Raises RefusedError (T206) for one of ``ids`` (some) that is not in the vocabulary of ``model``; its size None: not
    known."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        id_range = "" if vocab_size is None else f" (0 to {vocab_size - 1})"
        raise RefusedError(
            f"{where}token id {low if low < 0 else high} is not in the vocabulary of {model}{id_range}",
            code="T206",
            hint="these tokens were sampled with another tokenizer",
        )


@dataclass(frozen=True)
class ToScore:
    """n sequences: of ``token_ids`` (int32), those with ``mask`` (bool, a list per sequence) are scored at ``temperature``
    (above 0), one entry per sequence."""

    token_ids: Ragged
    mask: Ragged
    temperature: Array

    @classmethod
    def of(cls, sequences: RolloutSequences, temperature: Array) -> ToScore:
        """The trained tokens of ``sequences``; ``temperature`` has one entry per rollout of their batch, from its
        row."""
        mask = sequences.loss_mask.like(sequences.is_trained)
        return cls(sequences.token_ids, mask, sampled_at(temperature[sequences.rollout]).astype(np.float64))

    @classmethod
    def joined(cls, parts: Sequence[ToScore]) -> ToScore:
        """The sequences of all ``parts``."""
        return cls(
            Ragged.joined([part.token_ids for part in parts]),
            Ragged.joined([part.mask for part in parts]),
            np.concatenate([part.temperature for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def lengths(self) -> Array:
        return self.token_ids.lengths

    @cached_property
    def scores(self) -> Ragged:
        """Where each sequence's scores are among all scores."""
        offsets = offsets_of(self.mask.sums(self.mask.values))
        return Ragged(np.arange(offsets[-1]), offsets)

    @cached_property
    def n_scored(self) -> int:
        return len(self.scores.values)

    def take(self, rows: Array) -> ToScore:
        """The sequences at ``rows`` (int), in that order."""
        return ToScore(self.token_ids.take(rows), self.mask.take(rows), self.temperature[rows])

    def batches(self, max_tokens: int) -> Iterator[Array]:
        """Row numbers of sequences with something to score, those with one prompt side by side and the longest first, at
        most ``max_tokens`` with padding a batch; a longer sequence goes alone."""
        order = sibling_order(prompt_groups(self.token_ids, self.mask), self.lengths)
        order = order[self.scores.lengths[order] > 0]
        start = 0
        while start < len(order):
            size, longest = 1, int(self.lengths[order[start]])
            while start + size < len(order):
                longest = max(longest, int(self.lengths[order[start + size]]))
                if (size + 1) * longest > max_tokens:
                    break
                size += 1
            yield order[start : start + size]
            start += size

    def refuse_unscorable(self, vocab_size: int, max_length: int | None, model: str) -> None:
        """Raises RefusedError for what ``model`` cannot read: an id that is not in its vocabulary (T206), a sequence
        that is longer than it reads, or a scored token with nothing before it (T205)."""
        if not len(self.token_ids.values):
            return
        refuse_unknown_ids(self.token_ids.values, vocab_size, model)
        longest = int(self.lengths.max())
        if max_length is not None and longest > max_length:
            raise RefusedError(f"the longest sequence has {longest:,} tokens, {model} reads at most {max_length:,}")
        first = self.token_ids.offsets[:-1][self.lengths > 0]
        if bool(self.mask.values[first].any()):
            raise RefusedError("a generation has no prompt before it, so nothing predicts its first token", code="T205")


class PolicyModel(Protocol):
    """A policy that scores tokens which were sampled. ``facts``: number format and device, for run.json."""

    facts: Facts

    def log_probs(self, to_score: ToScore, *, entropy: bool = False, shift: int = 0) -> tuple[Any, Any]:
        """Log-probs of the scored tokens at their rows' temperature over the whole vocabulary, and entropies in nats
        (None unless requested): float32 (to_score.n_scored,). ``shift``: scored with the output this many positions later;
        NaN beyond the end. Raises RefusedError for ids that it cannot read."""
        ...

    def log_probs_at(self, to_score: ToScore, temperatures: Sequence[float]) -> Any:
        """Log-probs at each of ``temperatures`` in place of the rows', float32 (len(temperatures), to_score.n_scored)."""
        ...

    def log_mass(self, to_score: ToScore, ids: Ragged) -> Any:
        """The logarithm of the probability of a set of ids at the place of each scored token (``ids``: one list each),
        at its row's temperature, float32 (to_score.n_scored,)."""
        ...


class Critic(Protocol):
    """Gives the value of the state after any token."""

    facts: Facts

    def values(self, to_score: ToScore) -> tuple[Any, Any]:
        """float32 (to_score.n_scored,) each: the value of the state before a scored token, and of the state after it."""
        ...
