"""Experiences as a trainer gets them: flat arrays of ids, masks, saved log-probs and advantages, cut only where asked.

Invariants: what is trained has a finite advantage and a finite saved log-prob; a trained token is never the first
of its sequence (nothing predicts it); whatever a length limit costs is counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import pyarrow as pa

from gymdata.errors import DataError, RefusedError
from gymdata.rollouts.checks import Lists, refuse_unsound
from gymdata.rollouts.ragged import Ragged
from gymdata.train.data import NamedSequences, refuse_too_long

#: Columns of an experiences file that training reads; ``ref_logprobs`` only where there are any.
EXPERIENCE_COLUMNS = (
    "rollout_id", "sequence_index", "input_ids", "loss_mask", "logprobs", "advantages", "weight", "temperature",
    "policy_hash", "ref_logprobs",
)  # fmt: skip


@dataclass(frozen=True)
class LengthCost:
    """What was not trained, and why."""

    max_length: int | None
    sequences: int
    longest: int
    sequences_cut: int = 0
    trained_tokens_lost: int = 0
    nothing_trained: tuple[str, ...] = ()

    def refuse(self, where: str, model: str, limit: int | None) -> None:
        if self.sequences == 0:
            raise DataError.empty(where, "sequences to train on")
        if len(self.nothing_trained) == self.sequences:
            why = f"with --max-length {self.max_length} " if self.max_length else ""
            raise RefusedError(
                f"{where}: {why}none of {self.sequences:,} sequences has a trained token left",
                code="T205",
                hint="give a --max-length that reaches beyond the prompts" if self.max_length else None,
            )
        refuse_too_long(where, self.longest, self.max_length, model, limit)

    def text(self) -> str | None:
        if not (self.sequences_cut or self.nothing_trained):
            return None
        return (
            f"{self.sequences_cut:,} of {self.sequences:,} sequences are cut, {len(self.nothing_trained):,} left out "
            f"because no trained token remains; {self.trained_tokens_lost:,} trained tokens lost in all"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "max_length": self.max_length, "sequences": self.sequences, "longest": self.longest,
            "sequences_cut": self.sequences_cut, "trained_tokens_lost": self.trained_tokens_lost,
            "left_out_nothing_trained": list(self.nothing_trained),
        }  # fmt: skip


@dataclass(frozen=True)
class TrainingExperiences:
    """n sequences; ``advantages`` and ``ref_logprobs`` (None: not in the file) have a number per token of them; ``weight``
    and ``temperature`` have one entry a sequence, as have ``rollout_ids``. ``chosen``: how many rollouts they were chosen
    from, and so on, where they were chosen."""

    sequences: NamedSequences
    rollout_ids: list[str]
    advantages: Ragged
    ref_logprobs: Ragged | None
    weight: np.ndarray
    temperature: np.ndarray
    policy_hashes: frozenset[str]
    cost: LengthCost
    chosen: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def counts(self) -> dict[str, int]:
        return {**self.chosen, "sequences": len(self)}

    def rollouts_of(self, rows: np.ndarray) -> list[str]:
        return list(dict.fromkeys(self.rollout_ids[row] for row in rows))

    def take(self, rows: np.ndarray) -> Self:
        """The sequences at ``rows`` (int array), in that order, with all that belongs to them."""
        return replace(
            self,
            sequences=self.sequences.take(rows),
            rollout_ids=[self.rollout_ids[row] for row in rows],
            advantages=self.advantages.take(rows),
            ref_logprobs=None if self.ref_logprobs is None else self.ref_logprobs.take(rows),
            weight=self.weight[rows],
            temperature=self.temperature[rows],
        )


def training_experiences(
    table: pa.Table, max_length: int | None = None, where: str = "experiences"
) -> TrainingExperiences:
    """The rows of a table (``EXPERIENCE_COLUMNS``), cut to ``max_length`` tokens when given.

    A sequence without a trained token (after the cut) is left out and named in ``cost``. Raises DataError for rows that
    contradict themselves and RefusedError (T205, T206, L301 to L303) for rows that must not be trained on.
    """
    rollouts = table["rollout_id"].to_pylist()
    names = [f"{r}/{i}" for r, i in zip(rollouts, table["sequence_index"].to_pylist(), strict=True)]
    if len(set(names)) != len(names):
        raise DataError(f"{where}: holds a sequence more than once", hint="are the same experiences given twice?")
    ids = Ragged.of(table["input_ids"], np.int32)
    mask, logprobs, advantages = (
        _beside(table, name, kind, ids, names, where)
        for name, kind in (("loss_mask", np.int8), ("logprobs", np.float32), ("advantages", np.float32))
    )
    reference = None
    if "ref_logprobs" in table.column_names and table["ref_logprobs"].null_count == 0:
        reference = _beside(table, "ref_logprobs", np.float32, ids, names, where)
    odd = np.flatnonzero((mask.values != 0) & (mask.values != 1))
    if len(odd):
        name = names[mask.locate(odd[0])[0]]
        raise DataError(f"{where}: mask of {name} holds {mask.values[odd[0]]}, expected 0 or 1")
    mask = mask.like(mask.values.copy())
    mask.values[ids.offsets[:-1][ids.lengths > 0]] = 0
    whole = NamedSequences(ids, mask, logprobs, names)
    trained = Lists("trained token", logprobs.like(np.where(whole.is_trained, logprobs.values, 0)))
    refuse_unsound((Lists("input_ids", ids),), trained, lambda k: f"sequence {names[k]}", where)
    bad = np.flatnonzero(~np.isfinite(advantages.values) & whole.is_trained)
    if len(bad):
        raise RefusedError(
            f"{where}: advantages of {names[ids.locate(bad[0])[0]]} is {advantages.values[bad[0]]} on a trained token "
            f"({len(bad):,} such token(s))",
            code="R502",
        )
    return _cut(whole, advantages, reference, table, rollouts, max_length)


def _cut(
    whole: NamedSequences,
    advantages: Ragged,
    reference: Ragged | None,
    table: pa.Table,
    rollouts: list[str],
    max_length: int | None,
) -> TrainingExperiences:
    longest = int(whole.lengths.max(initial=0))
    lengths = np.minimum(whole.lengths, longest if max_length is None else max_length)
    short = whole if (lengths == whole.lengths).all() else whole.cut(int(lengths.max()))
    trained = short.loss_mask.sums(short.is_trained)
    rows = np.flatnonzero(trained > 0)
    cost = LengthCost(
        max_length=max_length,
        sequences=len(whole),
        longest=longest,
        sequences_cut=int((lengths < whole.lengths).sum()),
        trained_tokens_lost=int(whole.is_trained.sum() - trained[rows].sum()),
        nothing_trained=tuple(whole.names[i] for i in np.flatnonzero(trained == 0)),
    )
    return TrainingExperiences(
        sequences=short.take(rows),
        rollout_ids=[rollouts[i] for i in rows],
        advantages=advantages.first(lengths).take(rows),
        ref_logprobs=None if reference is None else reference.first(lengths).take(rows),
        weight=np.asarray(table["weight"].to_numpy(), dtype=np.float64)[rows],
        temperature=np.asarray(table["temperature"].to_numpy(), dtype=np.float64)[rows],
        policy_hashes=frozenset(table["policy_hash"].unique().to_pylist()),
        cost=cost,
    )


def _beside(table: pa.Table, name: str, kind: type, ids: Ragged, names: list[str], where: str) -> Ragged:
    lists = Ragged.of(table[name], kind)
    wrong = np.flatnonzero(lists.lengths != ids.lengths)
    if len(wrong):
        row = int(wrong[0])
        raise RefusedError(
            f"{where}: row {row} ({names[row]}): {name} has {lists.lengths[row]} entries, input_ids has "
            f"{ids.lengths[row]} ({len(wrong):,} such row(s))",
            code="L301" if name == "logprobs" else None,
        )
    return lists
