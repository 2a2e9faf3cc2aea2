"""The rows of a training as columns: the one form in which they are checked, written, mapped and trained.

A row is a sequence, or a pair, which has two in each column of sequences: the chosen side and the rejected one. What a
loss reads is a number per row, a list with a number per token, or the k numbers of each trained token's head, one after the
other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from gymdata.commands.train.token_checksum import CONTEXT, IDS, Hashes, TrainedTokens
from gymdata.errors import DataError, RefusedError, counted
from gymdata.models.prefix_tree import sibling_order
from gymdata.rollouts.ragged import Array, Ints, Ragged, content_codes

#: The sequences of a pair, in their order.
SIDES = ("chosen", "rejected")
#: The number of a row in its file; which tokens are trained; how long the longest sequence of a row is.
ROW, MASK, LENGTH = "row", "loss_mask", "length"
#: What a column of due checksums is called before the name of the column that they are of.
DUE = "due."


@dataclass(frozen=True, slots=True)
class LengthCost:
    """What a length limit cut, in rows (pairs or sequences: ``unit``) and in trained tokens; and which could not be used:
    ``identical`` on both sides after it, or with ``nothing_trained``."""

    unit: Literal["pair", "sequence"]
    max_length: int | None
    rows: int
    longest: int
    rows_cut: int = 0
    trained_tokens_lost: int = 0
    nothing_trained: tuple[str, ...] = ()
    identical: tuple[str, ...] = ()

    def __add__(self, other: LengthCost) -> LengthCost:
        """The sum of two parts of a file."""
        summed = ("rows", "rows_cut", "trained_tokens_lost", "nothing_trained", "identical")
        sums = {name: getattr(self, name) + getattr(other, name) for name in summed}
        return replace(self, longest=max(self.longest, other.longest), **sums)

    def refuse(self, where: str, model: str, limit: int | None) -> None:
        """Raises DataError or RefusedError when nothing is left to train, or the model at ``model`` cannot read the longest
        sequence (``limit`` tokens; None: no limit)."""
        if self.rows == 0:
            raise DataError.empty(where, f"{self.unit}s to train on")
        if len(self.identical) + len(self.nothing_trained) == self.rows:
            if self.unit == "pair":
                raise RefusedError(
                    f"{where}: with --max-length {self.max_length} no pair is left: {len(self.identical):,} would be "
                    f"identical, {len(self.nothing_trained):,} would have no trained token",
                    code="P601",
                )
            why = f"with --max-length {self.max_length} " if self.max_length else ""
            raise RefusedError(
                f"{where}: {why}none of {counted(self.rows, 'sequence')} has a trained token left",
                code="T205",
                hint="give a --max-length that reaches beyond the prompts" if self.max_length else None,
            )
        effective = min(self.longest, self.max_length or self.longest)
        if limit is not None and effective > limit:
            raise RefusedError(
                f"{where}: the longest sequence has {effective:,} tokens, {model} reads at most {limit:,}",
                hint=f"--max-length {limit} cuts longer ones and prints what that costs; --dry-run prints it without "
                "training",
            )

    def text(self) -> str | None:
        """A sentence on what was cut; None when nothing was."""
        if not (self.rows_cut or self.nothing_trained or self.identical):
            return None
        alike = (
            f"{len(self.identical):,} left out because both sides would be identical, " if self.unit == "pair" else ""
        )
        return (
            (f"--max-length {self.max_length}: " if self.unit == "pair" else "")
            + f"{self.rows_cut:,} of {counted(self.rows, self.unit)} cut, {alike}{len(self.nothing_trained):,} left out "
            f"because no trained token remains; {self.trained_tokens_lost:,} trained tokens lost in all"
        )


@dataclass(frozen=True)
class Facts:
    """What is known of all rows together, besides their columns. ``counts``: what they were chosen from, and so on;
    ``temperatures``: those that they were sampled at."""

    cost: LengthCost
    counts: dict[str, int] = field(default_factory=dict)
    policy_hashes: frozenset[str | None] = frozenset()
    temperatures: frozenset[float] = frozenset()

    def __add__(self, other: Facts) -> Facts:
        names = {**self.counts, **other.counts}
        return Facts(
            self.cost + other.cost,
            {name: self.counts.get(name, 0) + other.counts.get(name, 0) for name in names},
            self.policy_hashes | other.policy_hashes,
            self.temperatures | other.temperatures,
        )


@dataclass(frozen=True)
class TrainingData:
    """Rows of training: a part of them in memory, or all, mapped from the file at ``path``; ``heldout``: those of other
    tasks, to measure on, where a trainer holds some out.

    Columns of sequences: ``input_ids``, ``loss_mask``, ``rollout_id`` and ``key``, by which the checksums know it. Columns
    of rows: ``name``, ``n_trained``, ``length``, ``prompt`` (a key of the ids before the first trained token), what the
    loss reads, and as ``due.NAME`` the checksum that is due of each column that is trained, made of what was read.
    """

    table: pa.Table
    facts: Facts
    heldout: TrainingData | None = None
    path: Path | None = None

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def sides(self) -> int:
        """Sequences per row."""
        return len(SIDES) if pa.types.is_fixed_size_list(self.table.schema.field(IDS).type) else 1

    @cached_property
    def due(self) -> dict[str, Hashes]:
        """By column, what is due of each row."""
        names = [name for name in self.table.column_names if name.startswith(DUE)]
        return {name.removeprefix(DUE): self.numbers(name) for name in names}

    @property
    def read_by_loss(self) -> list[str]:
        """The columns that the loss reads besides ids."""
        return [name for name in self.due if name not in (IDS, CONTEXT)]

    @cached_property
    def keys(self) -> Hashes:
        return np.asarray(by_sequence(self.table["key"]).to_numpy())

    @cached_property
    def n_trained(self) -> Ints:
        return self.numbers("n_trained")

    @cached_property
    def lengths(self) -> Ints:
        return self.numbers(LENGTH)

    @cached_property
    def siblings(self) -> Ints:
        """A number per row, the same for those of one prompt."""
        return content_codes(self.table["prompt"].combine_chunks())

    @property
    def head_ids(self) -> int:
        """The ids of a head; 0 where no loss reads heads."""
        return len(self.lists("top_ids", slice(0, 1))[0]) // int(self.n_trained[0]) if "top_ids" in self.due else 0

    @property
    def counts(self) -> dict[str, int]:
        """For run.json and the end of the command."""
        rows = f"{self.facts.cost.unit}s"
        held_out = {}
        if self.heldout is not None:
            held_out = {f"heldout_{rows}": len(self.heldout), "heldout_tasks": len(set(self.heldout.tasks))}
        return {**self.facts.counts, rows: len(self), **held_out}

    @property
    def tasks(self) -> list[str]:
        """The task of each row, of rows that are held out."""
        tasks: list[str] = self.table["task_id"].to_pylist()
        return tasks

    @property
    def rollout_ids(self) -> list[str]:
        """The rollout of each sequence."""
        rollouts: list[str] = by_sequence(self.table["rollout_id"]).to_pylist()
        return rollouts

    def rollouts_of(self, rows: Array) -> list[str]:
        """rollout_ids behind rows of training, each once."""
        values = [self.table["rollout_id"][int(row)].as_py() for row in rows]
        return list(dict.fromkeys(name for value in values for name in ([value] if isinstance(value, str) else value)))

    def name(self, sequence: int) -> str:
        """The name of a sequence."""
        row: str = self.table["name"][sequence // self.sides].as_py()
        return row if self.sides == 1 else f"{row}/{SIDES[sequence % self.sides]}"

    def numbers(self, name: str) -> Array:
        """A column of numbers."""
        return np.asarray(self.table[name].to_numpy())

    def lists(self, name: str, rows: slice = slice(None)) -> Ragged:
        """The lists of the sequences of some rows in a column."""
        return lists_of(self.table[name][rows])

    def batches(self, *names: str) -> Iterator[pa.RecordBatch]:
        """The columns ``names`` of the file, some rows at a time, without mapping it: what was looked at does not stay in
        memory."""
        with pa.OSFile(str(self.path)) as file:
            schema = pa.ipc.read_schema(file)
            file.seek(0)
            wanted = [schema.get_field_index(name) for name in names]
            yield from pa.ipc.open_stream(file, options=pa.ipc.IpcReadOptions(included_fields=wanted))

    def trained(self) -> TrainedTokens:
        """The trained tokens of one epoch."""
        sums = {name: int(column.sum(dtype=np.uint64)) for name, column in self.due.items()}
        return TrainedTokens(int(self.n_trained.sum()), sums)

    def scoring_order(self, rows: Array | None = None) -> Ints:
        """Places in ``rows`` (None: all): one prompt's side by side, the longest first."""
        which = slice(None) if rows is None else rows
        return sibling_order(self.siblings[which], self.lengths[which])

    def take(self, rows: Array) -> TrainingData:
        """The rows at ``rows`` (int array), in that order."""
        return (
            self if np.array_equal(rows, np.arange(len(self))) else replace(self, table=self.table.take(pa.array(rows)))
        )


def by_sequence(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """What a column has of each sequence."""
    if not pa.types.is_fixed_size_list(column.type):
        return column
    if isinstance(column, pa.Array):
        return column.flatten()
    return pa.chunked_array([chunk.flatten() for chunk in column.chunks], column.type.value_type)


def lists_of(column: pa.Array | pa.ChunkedArray) -> Ragged:
    """The lists of all sequences of a column."""
    return Ragged.of(by_sequence(column))
