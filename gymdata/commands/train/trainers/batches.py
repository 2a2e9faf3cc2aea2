"""Batches straight from saved ids and masks.

The dataset that a library gets is row numbers only: there is no text that it could tokenise again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from torch.utils.data import Sampler
from transformers import TrainingArguments
from trl.data_utils import pack_dataset

from gymdata.commands.train.mapped import read_rows
from gymdata.commands.train.pair_data import NamedSequences
from gymdata.commands.train.token_checksum import Columns
from gymdata.models._shared_prefixes import Mode
from gymdata.models.prefix_tree import prefix_tree
from gymdata.rollouts.ragged import Ragged, offsets_of

#: Tensors by name, and ``ROWS`` and ``SEGMENTS``.
Batch = dict[str, Any]
#: What collators get: ``{"row": number}`` each.
Examples = Sequence[Mapping[str, int]]
#: The model is given the tensors of a batch; these belong to the trainer.
ROWS = "rows"
#: In packed batches: the sequence that each token belongs to, int64 (B, L), −1 where none; ``position_ids`` beside it
#: holds each token's position in that sequence.
SEGMENTS = "segments"
#: Columns of the file of rows.
TOKEN_IDS, LOSS_MASK = "sequences.token_ids", "sequences.loss_mask"
#: Batches from which the savings of sharing are estimated.
_LOOKED_AT = 32
#: Share of saved tokens from which on another order of training is used.
WORTH = 0.25
#: Saved tokens per sequence from which on sharing is faster on CUDA: 0.86 to 0.98 times the speed below, 1.5 to 3.1 above.
LONG = 1_000


def row_dataset(rows: int, args: TrainingArguments, order: np.ndarray | None = None) -> Dataset:
    """Row numbers 0 … rows − 1 (in ``order``), filled up so that every process gets as many full batches as the others.

    Left alone, the data loader would even this out by training some rows twice; a row number ≥ ``rows`` is instead a
    filler, which carries no trained token and no weight. A single process needs none.
    """
    multiple = args.world_size * args.per_device_train_batch_size if args.world_size > 1 else 1
    padded = -(-rows // multiple) * multiple
    real = np.arange(rows) if order is None else order
    return Dataset.from_dict({"row": np.concatenate([real, np.arange(rows, padded)])})


def rows_a_step(args: TrainingArguments) -> int:
    """Rows of a step, on all processes. What a training is like may depend on it, and on no other size of a batch."""
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


@dataclass
class PairCollator:
    """Rows to the tensors that TRL's DPO loss reads: chosen sides first, rejected sides after (shape (2·B, L)); and to
    those of ``columns``."""

    sequences: NamedSequences
    pad_token_id: int
    pad_to_multiple_of: int | None = None
    columns: Columns = field(default_factory=dict)

    def __call__(self, examples: Examples) -> Batch:
        rows = np.fromiter((example["row"] for example in examples), dtype=np.int64)
        pairs = len(self.sequences) // 2
        source = rows % pairs
        sides, fillers = np.concatenate([2 * source, 2 * source + 1]), np.tile(rows >= pairs, 2)
        batch = padded(self.sequences, sides, fillers, self.pad_token_id, self.pad_to_multiple_of)
        return {**batch, **padded_columns(self.columns, source, sides, batch), ROWS: rows}


@dataclass
class PackedCollator:
    """``packed_rows`` of ``sequences`` sequences to tensors: positions begin again with each sequence and no attention mask
    is given, by which models keep the sequences apart; padding is a sequence too, masked. ``flat``: all rows in one, as
    flash attention needs it."""

    rows: Dataset
    sequences: int
    pad_token_id: int
    flat: bool = False

    def __call__(self, examples: Examples) -> Batch:
        numbers = [int(example["row"]) for example in examples]
        packed = [self.rows[number % len(self.rows)] for number in numbers]
        shape = (len(packed), max(len(row[TOKEN_IDS]) for row in packed))
        ids, mask = np.full(shape, self.pad_token_id, np.int64), np.zeros(shape, np.int64)
        positions, segments = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
        members = []
        for line, (number, row) in enumerate(zip(numbers, packed, strict=True)):
            n, real, offsets = len(row[TOKEN_IDS]), number < len(self.rows), offsets_of(row["seq_lengths"])
            ids[line, :n] = row[TOKEN_IDS]
            mask[line, :n], segments[line, :n] = (row[LOSS_MASK], row[SEGMENTS]) if real else (0, -1)
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


def packed_rows(file: Path, length: int) -> Dataset:
    """The sequences of a file of rows, packed by TRL into rows of at most ``length`` tokens: ids, masks, and for each token
    the number of its sequence."""
    rows = Dataset.from_file(str(file)).select_columns([TOKEN_IDS, LOSS_MASK]).with_format("arrow")
    rows = rows.map(_numbered, batched=True, with_indices=True)
    return pack_dataset(rows, length).with_format("numpy")


def _numbered(rows: pa.Table, numbers: Sequence[int]) -> pa.Table:
    """With the number of its row for each token."""
    lists = Ragged.of(rows[TOKEN_IDS])
    return rows.append_column(SEGMENTS, lists.like(lists.spread(np.array(numbers))).to_arrow())


def padded(
    sequences: NamedSequences, which: np.ndarray, fillers: np.ndarray, pad: int, multiple: int | None = None
) -> Batch:
    """``padded_lists`` of the sequences ``which``."""
    read_rows(len(which))
    return padded_lists([(sequences.token_ids[i], sequences.loss_mask[i]) for i in which], fillers, pad, multiple)


def padded_lists(
    lists: Sequence[tuple[np.ndarray, np.ndarray]], fillers: np.ndarray, pad: int, multiple: int | None = None
) -> Batch:
    """input_ids, attention_mask and completion_mask of sequences given as (ids, mask), each int64 of shape (len(lists), L);
    nothing is trained of those that are true in ``fillers``."""
    lengths = np.array([len(ids) for ids, _ in lists])
    width = int(lengths.max())
    if multiple:
        width = -(-width // multiple) * multiple
    ids = np.full((len(lists), width), pad, np.int64)
    mask = np.zeros((len(lists), width), np.int64)
    attention = (np.arange(width) < lengths[:, None]).astype(np.int64)
    for line, (own, trained) in enumerate(lists):
        ids[line, : len(own)] = own
        mask[line, : len(own)] = trained
    mask[fillers] = 0
    arrays = {"input_ids": ids, "attention_mask": attention, "completion_mask": mask}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def padded_columns(columns: Columns, rows: np.ndarray, which: np.ndarray, batch: Batch) -> Batch:
    """The tensors of ``columns`` for the ``rows`` of a batch, whose lines are the sequences ``which``: a number per row as
    (B,), one per token as (lines, L − 1), from position 1 on and 0 where nothing is trained, and those of a head as
    (lines, L − 1, k), −1 or −∞ where nothing is."""
    mask, tensors = batch["completion_mask"].numpy(), {}
    for name, column in columns.items():
        if isinstance(column, np.ndarray):
            tensors[name] = torch.from_numpy(column[rows].astype(np.float32))
            continue
        lists = [column[sequence] for sequence in which]
        if lists[0].ndim == 1:
            values = np.zeros(mask.shape, np.float32)
            for line, own in enumerate(lists):
                values[line, : len(own)] = own
            values[mask == 0] = 0
        else:
            ids = np.issubdtype(lists[0].dtype, np.integer)
            shape = (*mask.shape, lists[0].shape[1])
            values = np.full(shape, -1, np.int64) if ids else np.full(shape, -np.inf, np.float32)
            for line, own in enumerate(lists):
                trained = np.flatnonzero(mask[line])  # none of a filler
                values[line, trained] = own[: len(trained)]
        tensors[name] = torch.from_numpy(values[:, 1:].copy())
    return tensors


def to_multiple(value: Any) -> int | None:
    """TRL's ``pad_to_multiple_of`` may still be the string for its default."""
    return value if isinstance(value, int) else None


def grouping_pays(
    sharing: Mode, sequences: NamedSequences, order: np.ndarray, args: TrainingArguments, sides: int = 1
) -> bool:
    """Whether to train in ``order``, which puts siblings into the same step."""
    return sharing == "on" or shared_tokens(sequences, order, rows_a_step(args), sides)[0] > WORTH


def pays_on_cuda(sequences: NamedSequences, args: TrainingArguments, sides: int) -> bool:
    """Whether prefixes are so long that sharing them is faster on CUDA, where rollouts of a task are trained together."""
    order = siblings_together(sequences.siblings[::sides], np.random.default_rng(args.seed))
    return shared_tokens(sequences, order, args.train_batch_size, sides)[1] > LONG


def shared_tokens(sequences: NamedSequences, order: np.ndarray, batch: int, sides: int = 1) -> tuple[float, float]:
    """How many of the tokens of ``batch`` rows in ``order`` another sequence of their batch begins with as well: their
    share, and their number per sequence. A row is ``sides`` sequences. Estimated from at most 32 batches, evenly spread."""
    starts = np.arange(0, len(order), batch)
    starts = starts[np.linspace(0, len(starts) - 1, min(_LOOKED_AT, len(starts))).astype(int)]
    every = once = n_sequences = 0
    for start in starts:
        read_rows(sides * batch)
        rows = order[start : start + batch]
        which = (sides * rows[:, None] + np.arange(sides)).ravel()
        members = [sequences.token_ids[i] for i in which]
        n_sequences += len(members)
        every += sum(map(len, members))
        once += prefix_tree(members, width=2**40).tokens
    return 1 - once / max(every, 1), (every - once) / max(n_sequences, 1)


class EpochSampler(Sampler[int]):
    """Numbers below ``rows`` in an order that is drawn for each epoch: siblings side by side with ``groups``, the group of
    each row; else as torch's sampler draws for as many rows as are ``real``. Fillers (see ``row_dataset``) come last:
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
