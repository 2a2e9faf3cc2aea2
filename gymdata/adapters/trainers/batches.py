"""Batches straight from saved ids and masks.

What always holds: a batch holds the ids and masks of its rows as they are in the file, right-padded, position for
position; rows are named, so that every later step can say which sequences it is looking at. The dataset that TRL gets is
row numbers only: there is no text that it could tokenise again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainingArguments

from gymdata.core.training import Sequences

#: The model is given the tensors of a batch; these belong to the trainer.
ROWS = "rows"


def row_dataset(rows: int, args: TrainingArguments) -> Dataset:
    """Row numbers 0 … rows − 1, filled up so that every process gets as many full batches as the others.

    Left alone, the data loader would even this out by training some rows twice; a row number ≥ ``rows`` is instead a
    filler, which carries no trained token and no weight. A single process needs none.
    """
    multiple = args.world_size * args.per_device_train_batch_size if args.world_size > 1 else 1
    padded = -(-rows // multiple) * multiple
    return Dataset.from_dict({"row": list(range(padded))})


@dataclass
class PairCollator:
    """Rows to the tensors that TRL's DPO loss reads: chosen sides first, rejected sides after (shape (2·B, L))."""

    sequences: Sequences
    pad_token_id: int
    pad_to_multiple_of: int | None = None

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        rows = np.fromiter((example["row"] for example in examples), dtype=np.int64)
        real = len(self.sequences) // 2
        source = rows % real
        ids, attention, mask = padded(
            self.sequences, np.concatenate([2 * source, 2 * source + 1]), self.pad_token_id, self.pad_to_multiple_of
        )
        mask[np.tile(rows >= real, 2)] = 0
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(attention),
            "completion_mask": torch.from_numpy(mask),
            ROWS: rows,
        }


def padded(
    sequences: Sequences, which: np.ndarray, pad: int, multiple: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, attention mask and loss mask of the sequences ``which``, each int64 of shape (len(which), L)."""
    lengths = sequences.lengths[which]
    width = int(lengths.max())
    if multiple:
        width = -(-width // multiple) * multiple
    ids = np.full((len(which), width), pad, np.int64)
    mask = np.zeros((len(which), width), np.int64)
    attention = (np.arange(width) < lengths[:, None]).astype(np.int64)
    for line, index in enumerate(which):
        span = sequences.span(int(index))
        ids[line, : lengths[line]] = sequences.ids[span]
        mask[line, : lengths[line]] = sequences.mask[span]
    return ids, attention, mask
