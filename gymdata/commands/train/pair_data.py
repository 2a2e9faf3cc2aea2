"""Pairs as rows of training, and the sequences of rows while they are checked.

Nothing here tokenises. A masked-in token is never the first of its sequence, as nothing predicts it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from gymdata.commands.train.data import MASK, SIDES, Facts, LengthCost, TrainingData
from gymdata.commands.train.token_checksum import IDS, Hashes, sequence_keys
from gymdata.errors import DataError, RefusedError, counted
from gymdata.rollouts.ragged import Ragged, content_codes, first_like, joined_keys, offsets_of
from gymdata.rollouts.sequences import Sequences
from gymdata.rollouts.soundness import (
    Lists,
    is_rendered,
    refuse_unsound,
    rendered_ids,
    unless_rendered,
    without_unknown,
)

#: Columns of a pairs file that training reads.
PAIR_COLUMNS: tuple[str, ...] = (
    "pair_id",
    "prompt_ids",
    "chosen_ids",
    "rejected_ids",
    "chosen_mask",
    "rejected_mask",
    "chosen_logprobs",
    "rejected_logprobs",
    "margin",
    "weight",
    "chosen_rollout_id",
    "rejected_rollout_id",
    "policy_hash",
    "temperature",
    "rendered",
)


@dataclass(frozen=True)
class NamedSequences(Sequences):
    """Sequences to train, each with a name of its own; ``loss_mask`` is never 1 on a first token."""

    names: Sequence[str]

    @cached_property
    def keys(self) -> Hashes:
        return sequence_keys(self.names)

    @cached_property
    def n_trained(self) -> np.ndarray:
        """int64 (n,): trained tokens of each sequence."""
        return self.loss_mask.sums(self.is_trained)

    @cached_property
    def prompts(self) -> list[bytes]:
        """A key of each sequence's ids before its first trained token."""
        return self.token_ids.first(self.first_trained).keys()

    @cached_property
    def first_trained(self) -> np.ndarray:
        """int64 (n,): index of each sequence's first trained token, its length without one."""
        return self.loss_mask.first_nonzero()

    def refuse_odd_mask(self, where: str) -> None:
        """Raises DataError for an entry of the mask other than 0 and 1."""
        mask = self.loss_mask
        odd = np.flatnonzero((mask.values != 0) & (mask.values != 1))
        if len(odd):
            name = self.names[mask.locate(odd[0])[0]]
            raise DataError(f"{where}: mask of {name} holds {mask.values[odd[0]]}, expected 0 or 1")

    def refuse_unsound(self, ids: str, row: str, where: str, rendered: np.ndarray, *, ratios: bool) -> None:
        """Raises RefusedError for ids and trained log-probs that must not be trained on (T206, L302, L303). ``ids`` and
        ``row``: what messages call them; ``rendered``: sequences whose ids were rendered from text; ``ratios``: whether
        log-probs are needed, else a sequence may have none that are known."""
        trained_logprobs = self.logprobs.like(np.where(self.is_trained, self.logprobs.values, 0))
        trained = Lists("logprobs", unless_rendered(trained_logprobs, rendered), mask=self.loss_mask.values)
        trained = trained if ratios else without_unknown(trained)
        refuse_unsound((Lists(ids, self.token_ids),), trained, lambda k: f"{row} {self.names[k]}", where)

    def take(self, rows: np.ndarray) -> Self:
        if len(rows) == len(self) and np.array_equal(rows, np.arange(len(self))):
            return self
        return replace(super().take(rows), names=[self.names[i] for i in rows])

    def first_of_equal(self, *more: np.ndarray, seen: set[bytes]) -> np.ndarray:
        """Rows (rising) without those whose ids, mask and entries of ``more`` (n numbers each) an earlier row has, or one in
        ``seen``, the keys of earlier parts, to which those of these rows are added."""
        columns = [self.token_ids.keys(), self.loss_mask.keys()]
        columns += [[value.tobytes() for value in column] for column in more]
        keys = joined_keys(columns)
        first = first_like(content_codes(keys)) == np.arange(len(keys))
        keys = [xxhash.xxh3_128_digest(key) for key in keys]
        first &= np.array([key not in seen for key in keys], np.bool_)
        seen.update(keys)
        return np.flatnonzero(first)


def sequences_of(data: TrainingData) -> NamedSequences:
    """The sequences of rows that were checked."""
    ids, mask, logprobs = (data.lists(name) for name in (IDS, MASK, "logprobs"))
    return NamedSequences(ids, mask, logprobs, [data.name(number) for number in range(len(ids))])


def training_pairs(
    pairs: pa.Table,
    max_length: int | None = None,
    where: str = "pairs",
    *,
    rendered: bool = False,
    first_row: int = 0,
) -> TrainingData:
    """The pairs of a table (``PAIR_COLUMNS``), cut to ``max_length`` tokens when given; the first is row ``first_row`` of
    ``where``. ``margin``: NaN where it is not known, of text that was imported.

    A pair whose two sides are equal after the cut, or that has no trained token left on a side, is left out and named in
    ``cost``. ``rendered``: whether ids may be rendered from text; their log-probs are NaN. Raises DataError for rows that
    contradict themselves and RefusedError (P601, T205, T206, T213, L301 to L303) for rows that must not be trained on.
    """
    ids = pairs.column("pair_id").to_pylist()
    from_text = is_rendered(pairs)
    if from_text.any() and not rendered:
        raise rendered_ids(where, f"pair {ids[int(from_text.argmax())]}", f"{from_text.sum():,} pairs")
    full = _pair_sequences(pairs, ids, where, first_row)
    full.refuse_odd_mask(where)
    untrained = np.flatnonzero(full.n_trained == 0)
    if len(untrained):
        raise RefusedError(
            f"{where}: {counted(len(untrained), 'side of a pair has', 'sides of pairs have')} no generated token to train "
            f"on (first: {full.names[untrained[0]]})",
            code="T205",
            hint="these rollouts have no token data, or their generations are empty; collect them with gymdata",
        )
    full.refuse_unsound("its ids", "pair", where, np.repeat(from_text, 2), ratios=False)
    same = np.flatnonzero(_identical(full))
    if len(same):
        raise RefusedError(
            f"{where}: {counted(len(same), 'pair has', 'pairs have')} the same tokens as chosen and rejected (first: row "
            f"{first_row + same[0]}, pair {ids[same[0]]})",
            code="P601",
            hint="make the pairs again with `gymdata pairs`, which never writes such a pair",
        )
    # Preferences that were imported may have no margin, which few losses read.
    margin = numbers(pairs, "margin")
    columns = pa.table({"margin": np.where(from_text & np.isnan(margin), 0.0, margin), "weight": pairs["weight"]})
    check_numbers(columns, {"margin": -np.inf, "weight": 0.0}, "pair", ids, where, first_row)
    sequences, rows, cost = _cut(full, ids, max_length)
    trained = sequences.take(np.stack([2 * rows, 2 * rows + 1], axis=1).ravel())
    rollouts = [pairs.column(f"{side}_rollout_id").to_pylist() for side in SIDES]
    of_sequences = {
        "rollout_id": pa.array([rollouts[side][i] for i in rows for side in (0, 1)], pa.string()),
        IDS: trained.token_ids.to_arrow(),
        MASK: trained.loss_mask.to_arrow(),
        "logprobs": trained.logprobs.to_arrow(),
    }
    columns = {"name": pa.array([ids[i] for i in rows], pa.string()), "margin": margin[rows]}
    columns |= {name: pairs[name].take(pa.array(rows)) for name in ("weight", "task_id") if name in pairs.column_names}
    columns |= {name: pa.FixedSizeListArray.from_arrays(column, 2) for name, column in of_sequences.items()}
    return TrainingData(pa.table(columns), Facts(cost))


def _cut(full: NamedSequences, ids: list[str], max_length: int | None) -> tuple[NamedSequences, np.ndarray, LengthCost]:
    """(all sequences after the cut, the pairs that are trained, what it cost)."""
    n = len(ids)
    cost = LengthCost("pair", max_length, n, longest=int(full.lengths.max(initial=0)))
    if max_length is None or cost.longest <= max_length:
        return full, np.arange(n), cost
    short = full.cut(max_length)
    counts = short.n_trained.reshape(n, 2)
    empty = (counts == 0).any(axis=1)
    same = _identical(short) & ~empty
    trained = ~(empty | same)
    cost = replace(
        cost,
        rows_cut=int((full.lengths > max_length).reshape(n, 2).any(axis=1).sum()),
        trained_tokens_lost=int(full.is_trained.sum()) - int(counts[trained].sum()),
        identical=tuple(ids[i] for i in np.flatnonzero(same)),
        nothing_trained=tuple(ids[i] for i in np.flatnonzero(empty)),
    )
    return short, np.flatnonzero(trained), cost


def _pair_sequences(pairs: pa.Table, names: list[str], where: str, first_row: int) -> NamedSequences:
    """prompt ++ chosen and prompt ++ rejected of each row, interleaved."""
    prompt = Ragged.of(pairs.column("prompt_ids"), np.int32)
    if (prompt.lengths == 0).any():
        row = int(np.flatnonzero(prompt.lengths == 0)[0])
        raise RefusedError(f"{where}: row {first_row + row} (pair {names[row]}) has no prompt ids", code="T205")
    kinds = {"ids": np.int32, "mask": np.int8, "logprobs": np.float32}
    sides = [{what: Ragged.of(pairs.column(f"{side}_{what}"), kind) for what, kind in kinds.items()} for side in SIDES]
    for name, side in zip(SIDES, sides, strict=True):
        for what in ("mask", "logprobs"):
            got, lengths = side[what].lengths, side["ids"].lengths
            wrong = np.flatnonzero(got != lengths)
            if len(wrong):
                row = int(wrong[0])
                message = (
                    f"{where}, row {first_row + row}, pair {names[row]}: {name}_{what} has {got[row]} entries, "
                    f"{name}_ids has {lengths[row]} ({counted(len(wrong), 'such row')})"
                )
                raise RefusedError(message, code="L301") if what == "logprobs" else DataError(message)
    tokens, part = Ragged.interleaved([prompt, sides[0]["ids"], prompt, sides[1]["ids"]])
    lengths = np.stack([prompt.lengths + side["ids"].lengths for side in sides], axis=1).ravel()
    token_ids = Ragged(tokens.values, offsets_of(lengths))
    mask, logprobs = np.zeros(len(part), np.int8), np.zeros(len(part), np.float32)
    for number, side in ((1, sides[0]), (3, sides[1])):
        here = part == number
        mask[here], logprobs[here] = side["mask"].values, side["logprobs"].values
    both = [f"{name}/{side}" for name in names for side in SIDES]
    return NamedSequences(token_ids, token_ids.like(mask), token_ids.like(logprobs), both)


def _identical(sequences: NamedSequences) -> np.ndarray:
    """bool (n / 2,): chosen and rejected hold the same tokens."""
    lengths = sequences.lengths.reshape(-1, 2)
    same = lengths[:, 0] == lengths[:, 1]
    for row in np.flatnonzero(same):
        same[row] = np.array_equal(sequences.token_ids[2 * row], sequences.token_ids[2 * row + 1])
    return np.asarray(same)


def check_numbers(
    table: pa.Table, least_of: Mapping[str, float], what: str, names: Sequence[str], where: str, first_row: int
) -> None:
    """Raises DataError for a number of the columns ``least_of`` that is not finite or below its least: it would spoil every
    step that it is part of. ``what`` and ``names``: of the rows."""
    for name, least in least_of.items():
        values = numbers(table, name)
        odd = np.flatnonzero(~np.isfinite(values) | (values < least))
        if len(odd):
            row, expected = int(odd[0]), "a finite number" + (" of at least 0" if least == 0.0 else "")
            raise DataError(
                f"{where}, row {first_row + row}, {what} {names[row]}: {name}: got {values[row]}, expected {expected} "
                f"({counted(len(odd), 'such row')})",
                hint="correct these rows, or leave them out",
            )


def numbers(table: pa.Table, name: str) -> np.ndarray:
    return np.asarray(table.column(name).to_numpy(), dtype=np.float64)


#: Columns of a pairs file that a reward model's training reads.
REWARD_COLUMNS: tuple[str, ...] = (*PAIR_COLUMNS, "task_id")


def held_apart(table: pa.Table, tasks: Collection[str], checked: Callable[[pa.Table], TrainingData]) -> TrainingData:
    """What ``checked`` makes of the rows of a table that are not of ``tasks``; those that are, held out."""
    is_held_out = pc.is_in(table["task_id"], value_set=pa.array(sorted(tasks), table["task_id"].type))
    return replace(checked(table.filter(pc.invert(is_held_out))), heldout=checked(table.filter(is_held_out)))
