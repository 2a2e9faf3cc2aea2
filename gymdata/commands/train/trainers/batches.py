"""Batches straight from saved ids and masks.

The dataset that a library gets is the rows of the file, which are padded here: it has no text that could be tokenised again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, concatenate_datasets
from torch.utils.data import Sampler
from transformers import TrainingArguments
from trl.data_utils import pack_dataset

from gymdata.commands.train.data import LENGTH, MASK, ROW, TrainingData, lists_of
from gymdata.commands.train.mapped import read_rows
from gymdata.commands.train.token_checksum import IDS
from gymdata.models._shared_prefixes import Mode
from gymdata.models.prefix_tree import prefix_tree
from gymdata.rollouts.ragged import Ragged, offsets_of
from gymdata.rollouts.schema import HEAD

#: Tensors by name, and ``ROWS`` and ``SEGMENTS``.
Batch = dict[str, Any]
#: What collators get: rows of the file by column, as numpy has them.
Examples = Sequence[Mapping[str, Any]]
#: The model is given the tensors of a batch; these belong to the trainer.
ROWS = "rows"
#: In packed batches: the sequence that each token belongs to, int64 (B, L), −1 where none; ``position_ids`` beside it
#: holds each token's position in that sequence.
SEGMENTS = "segments"
#: Batches from which the savings of sharing are estimated.
_LOOKED_AT = 32
#: Share of saved tokens from which on another order of training is used.
WORTH = 0.25
#: Saved tokens per sequence from which on sharing is faster on CUDA: 0.86 to 0.98 times the speed below, 1.5 to 3.1 above.
LONG = 1_000


def dataset_of(data: TrainingData) -> Dataset:
    """The rows of a file with what is trained of them, mapped."""
    columns = [ROW, LENGTH, IDS, MASK, *data.read_by_loss]
    # Without a fingerprint datasets would hash all of the file.
    return Dataset(data.table.select(columns), fingerprint=str(data.path)).with_format("numpy")


def with_fillers(rows: Dataset, args: TrainingArguments) -> Dataset:
    """``rows`` filled up so that every process gets as many full batches as the others.

    Left alone, the data loader would even this out by training some rows twice; a row whose number is not below that of the
    rows is instead a filler, which carries no trained token and no weight. A single process needs none.
    """
    multiple = args.world_size * args.per_device_train_batch_size if args.world_size > 1 else 1
    numbers = np.arange(len(rows), -(-len(rows) // multiple) * multiple)
    if not len(numbers):
        return rows
    table = rows.with_format("arrow")[numbers % len(rows)]
    fillers = Dataset(table.set_column(table.schema.get_field_index(ROW), ROW, pa.array(numbers)))
    return concatenate_datasets([rows, fillers]).with_format("numpy")


def rows_a_step(args: TrainingArguments) -> int:
    """Rows of a step, on all processes. What a training is like may depend on it, and on no other size of a batch."""
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


@dataclass
class Collator:
    """Rows of a file of ``rows`` rows to tensors, one line per sequence: of pairs (``sides`` 2) all chosen sides first, as
    TRL's losses read them. Ids and masks are (lines, L); what the loss reads is a number per row as (B,), one per token as
    (lines, L − 1), from position 1 on and 0 where nothing is trained, or those of a head as (lines, L − 1, k), −1 or −∞
    where nothing is. ``computed``: a list per sequence of numbers per token, by the names of the tensors, besides."""

    rows: int
    pad_token_id: int
    pad_to_multiple_of: Any = None
    sides: int = 1
    computed: Mapping[str, Ragged] = field(default_factory=dict)

    def __call__(self, examples: Examples) -> Batch:
        read_rows(len(examples))
        numbers = np.array([example[ROW] for example in examples])
        lines = {name: self.lines(examples, name) for name in examples[0] if name not in (ROW, LENGTH)}
        lines |= {name: [lists[number] for number in numbers % self.rows] for name, lists in self.computed.items()}
        fillers = np.tile(numbers >= self.rows, self.sides)
        masks = lines.pop(MASK)
        batch = self.padded(lines.pop(IDS), masks, fillers)
        trained = batch["completion_mask"].numpy() != 0
        for name, values in lines.items():
            if np.ndim(values[0]) == 0:
                column = np.array(values)
                batch[name] = torch.from_numpy(column.astype(np.float32) if column.dtype.kind == "f" else column)
                continue
            if name in HEAD:
                padded = _padded_heads(values, len(values[0]) // int(np.count_nonzero(masks[0])), trained)
            else:
                padded = _padded_numbers(values, trained)
            batch[name] = torch.from_numpy(padded[:, 1:].copy())
        return {**batch, ROWS: numbers}

    def lines(self, examples: Examples, name: str) -> list[Any]:
        """What the sequences of rows have in a column."""
        if self.sides == 1 or np.ndim(examples[0][name]) == 0:
            return [example[name] for example in examples]
        return [example[name][side] for side in range(self.sides) for example in examples]

    def padded(self, ids: Sequence[np.ndarray], masks: Sequence[np.ndarray], fillers: np.ndarray) -> Batch:
        """input_ids, attention_mask and completion_mask of sequences, each int64 of shape (lines, L); nothing is trained of
        those that are true in ``fillers``."""
        lengths = np.array([len(own) for own in ids])
        width = int(lengths.max())
        # TRL's setting may still be the string for its default.
        if isinstance(self.pad_to_multiple_of, int):
            width = -(-width // self.pad_to_multiple_of) * self.pad_to_multiple_of
        tokens = np.full((len(ids), width), self.pad_token_id, np.int64)
        trained = np.zeros((len(ids), width), np.int64)
        attention = (np.arange(width) < lengths[:, None]).astype(np.int64)
        for line, (own, mask) in enumerate(zip(ids, masks, strict=True)):
            tokens[line, : len(own)] = own
            trained[line, : len(own)] = mask
        trained[fillers] = 0
        arrays = {"input_ids": tokens, "attention_mask": attention, "completion_mask": trained}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _padded_numbers(lists: Sequence[np.ndarray], trained: np.ndarray) -> np.ndarray:
    values = np.zeros(trained.shape, np.float32)
    for line, own in enumerate(lists):
        values[line, : len(own)] = own
    values[~trained] = 0
    return values


def _padded_heads(lists: Sequence[np.ndarray], k: int, trained: np.ndarray) -> np.ndarray:
    is_ids = np.issubdtype(lists[0].dtype, np.integer)
    values = np.full((*trained.shape, k), -1 if is_ids else -np.inf, np.int64 if is_ids else np.float32)
    for line, own in enumerate(lists):
        positions = np.flatnonzero(trained[line])  # none of a filler
        values[line, positions] = own.reshape(-1, k)[: len(positions)]
    return values


@dataclass
class PackedCollator:
    """``rows`` rows that ``packed_rows`` made of ``sequences`` sequences to tensors: positions begin again with each
    sequence and no attention mask is given, by which models keep the sequences apart; padding is a sequence too, masked.
    ``flat``: all rows in one, as flash attention needs it."""

    rows: int
    sequences: int
    pad_token_id: int
    flat: bool = False

    def __call__(self, examples: Examples) -> Batch:
        shape = (len(examples), max(len(row[IDS]) for row in examples))
        ids, mask = np.full(shape, self.pad_token_id, np.int64), np.zeros(shape, np.int64)
        positions, segments = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
        members = []
        for line, row in enumerate(examples):
            n, real, offsets = len(row[IDS]), row[ROW] < self.rows, offsets_of(row["seq_lengths"])
            ids[line, :n] = row[IDS]
            mask[line, :n], segments[line, :n] = (row[MASK], row[SEGMENTS]) if real else (0, -1)
            positions[line] = np.arange(shape[1])
            positions[line] -= np.repeat([*offsets[:-1], n], [*row["seq_lengths"], shape[1] - n])
            members.append(row[SEGMENTS][offsets[:-1]] + (0 if real else self.sequences))
        if self.flat:
            ids, mask, positions, segments = (a.reshape(1, -1) for a in (ids, mask, positions, segments))
        return {
            "input_ids": torch.from_numpy(ids),
            "completion_mask": torch.from_numpy(mask),
            "position_ids": torch.from_numpy(positions),
            "weight": torch.ones(len(ids)),
            "temperature": torch.ones(len(ids)),
            SEGMENTS: segments,
            ROWS: np.concatenate(members),
        }


def packed_rows(data: TrainingData, length: int) -> Dataset:
    """The sequences of a file, packed by TRL into rows of at most ``length`` tokens: ids, masks, and for each token the
    number of its sequence."""
    rows = Dataset.from_file(str(data.path)).select_columns([ROW, IDS, MASK]).with_format("arrow")
    packed = pack_dataset(rows.map(_numbered, batched=True), length)
    return packed.add_column(ROW, np.arange(len(packed))).with_format("numpy")


def _numbered(rows: pa.Table) -> pa.Table:
    """Ids and masks, with the number of its row for each token."""
    lists = lists_of(rows[IDS])
    return rows.select([IDS, MASK]).append_column(SEGMENTS, lists.like(lists.spread(rows[ROW].to_numpy())).to_arrow())


def grouping_pays(sharing: Mode, data: TrainingData, order: np.ndarray, args: TrainingArguments) -> bool:
    """Whether to train in ``order``, which puts siblings into the same step."""
    return sharing == "on" or shared_tokens(data, order, rows_a_step(args))[0] > WORTH


def pays_on_cuda(data: TrainingData, args: TrainingArguments) -> bool:
    """Whether prefixes are so long that sharing them is faster on CUDA, where rollouts of a task are trained together."""
    order = siblings_together(data.siblings, np.random.default_rng(args.seed))
    return shared_tokens(data, order, args.train_batch_size)[1] > LONG


def shared_tokens(data: TrainingData, order: np.ndarray, batch: int) -> tuple[float, float]:
    """How many of the tokens of ``batch`` rows in ``order`` another sequence of their batch begins with as well: their
    share, and their number per sequence. Estimated from at most 32 batches, evenly spread."""
    starts = np.arange(0, len(order), batch)
    starts = starts[np.linspace(0, len(starts) - 1, min(_LOOKED_AT, len(starts))).astype(int)]
    every = once = n_sequences = 0
    for start in starts:
        read_rows(batch)
        rows = [data.lists(IDS, slice(row, row + 1)) for row in order[start : start + batch].tolist()]
        members = [sequences[side] for sequences in rows for side in range(data.sides)]
        n_sequences += len(members)
        every += sum(map(len, members))
        once += prefix_tree(members, width=2**40).tokens
    return 1 - once / max(every, 1), (every - once) / max(n_sequences, 1)


class EpochSampler(Sampler[int]):
    """Numbers below ``rows`` in an order that is drawn for each epoch: siblings side by side with ``groups``, the group of
    each row; else as torch's sampler draws for as many rows as are ``real``. Fillers (see ``with_fillers``) come last:
    whatever the number of processes, a step has the same rows."""

    def __init__(self, real: int, rows: int, seed: int, groups: np.ndarray | None = None) -> None:
        self.real, self.rows, self.seed, self.groups = real, rows, seed, groups
        self.epoch = 0

    def __len__(self) -> int:
        return self.rows

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.groups is not None:
            yield from siblings_together(self.groups, np.random.default_rng((self.seed, self.epoch))).tolist()
        else:
            # accelerate draws the epochs of torch's sampler from these seeds.
            drawn = torch.Generator().manual_seed(self.seed + self.epoch)
            yield from torch.randperm(self.real, generator=drawn).tolist()
        yield from range(self.real, self.rows)


def siblings_together(groups: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """All rows, by group, groups and rows in a random order."""
    drawn = rng.permutation(int(groups.max()) + 1 if len(groups) else 0)
    return np.asarray(np.lexsort((rng.random(len(groups)), drawn[groups])))


def siblings_alternating(groups: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """All rows, two groups at a time whose rows take turns, so that neighbors have different prompts and siblings meet."""
    order = siblings_together(groups, rng)
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    lanes: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    sizes = [0, 0]
    for part in np.split(order, starts[1:]):
        lane = int(sizes[1] < sizes[0])
        lanes[lane].append(part)
        sizes[lane] += len(part)
    places = np.concatenate([(np.arange(size) + 0.5) / max(size, 1) for size in sizes])
    return np.asarray(np.concatenate([*lanes[0], *lanes[1]])[np.argsort(places, kind="stable")])
