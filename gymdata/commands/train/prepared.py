"""Training data as one Arrow file of columns, written part by part and mapped by every process of a training.

A part of the data (``TrainConfig.parts``) is in memory while it is checked and appended as a record batch. Held-out rows are
a file of their own. ``prepared``, written last, has what is known of all rows.

Invariants: a folder without ``prepared`` is not opened; what is due is of the part as it was made from the source's table,
not of what was written.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from gymdata.commands.train.data import DUE, LENGTH, MASK, ROW, Facts, TrainingData, lists_of
from gymdata.commands.train.mapped import mapped
from gymdata.commands.train.pair_data import sequences_of
from gymdata.commands.train.token_checksum import IDS, checksums_by_row
from gymdata.errors import StoreError
from gymdata.rollouts.ragged import Array, Ragged, offsets_of
from gymdata.rollouts.schema import HEAD
from gymdata.store.run_json import replacing

#: The folder's name beside a training's job file.
DATA = "data"
PREPARED, ROWS, HELD_OUT = "prepared", "rows.arrow", "held-out.arrow"
_FACTS = TypeAdapter(dict[str, Facts])
#: Columns of checked rows that are written whatever the loss reads.
_KEPT = ("name", "rollout_id", IDS, MASK, "task_id", "policy_version")


def prepare(folder: Path, parts: Iterable[TrainingData]) -> TrainingData:
    """The data of ``parts``, written to ``folder`` and opened from there.

    Raises StoreError when the disk refuses, and whatever ``parts`` does.
    """
    shutil.rmtree(folder, ignore_errors=True)
    files: dict[str, _File] = {}
    try:
        folder.mkdir(parents=True)
        for part in parts:
            for name, rows in ((ROWS, part), (HELD_OUT, part.heldout)):
                if rows is not None:
                    files.setdefault(name, _File(folder / name)).append(rows)
        for file in files.values():
            file.close()
        with replacing(folder / PREPARED) as temporary:
            temporary.write_bytes(_FACTS.dump_json({name: file.facts for name, file in files.items() if file.facts}))
    except OSError as error:
        raise StoreError.from_os(folder, error) from error
    return opened(folder)


def opened(folder: Path) -> TrainingData:
    """The data that was written to ``folder``, mapped. Raises StoreError when it is not complete."""
    try:
        known = _FACTS.validate_json((folder / PREPARED).read_bytes())
    except (FileNotFoundError, ValidationError) as error:
        raise StoreError(
            f"{folder}: the prepared training data is not complete", hint="start the training again"
        ) from error
    data, *held_out = (_mapped(folder / name, facts) for name, facts in known.items())
    return replace(data, heldout=held_out[0]) if held_out else data


def _mapped(path: Path, facts: Facts) -> TrainingData:
    table = mapped(path)
    # A column that some rows lack is in none.
    return TrainingData(table.select([f.name for f in table.schema if not table[f.name].null_count]), facts, path=path)


def proven(checked: TrainingData, read_by_loss: Callable[[pa.Table], Mapping[str, pa.ChunkedArray]]) -> TrainingData:
    """Checked rows as they are trained: with the columns that the loss reads of them alone, what else a training needs to
    know of each row, and what is due of it."""
    sequences, sides, read = sequences_of(checked), checked.sides, dict(read_by_loss(checked.table))
    values = {name: _values(name, column, sequences.n_trained) for name, column in read.items()}
    due = checksums_by_row(sequences.keys, sequences, values, sides)
    keys = pa.array(sequences.keys)
    columns = {
        **{name: checked.table[name] for name in _KEPT if name in checked.table.column_names},
        **read,
        "key": keys if sides == 1 else pa.FixedSizeListArray.from_arrays(keys, sides),
        "n_trained": sequences.n_trained.reshape(-1, sides).sum(axis=1),
        LENGTH: sequences.lengths.reshape(-1, sides).max(axis=1, initial=0),
        "prompt": pa.array(sequences.prompts[::sides], pa.binary(16)),
        **{DUE + name: column for name, column in due.items()},
    }
    heldout = None if checked.heldout is None else proven(checked.heldout, read_by_loss)
    return replace(checked, table=pa.table(columns), heldout=heldout)


def _values(name: str, column: pa.ChunkedArray, n_trained: Array) -> Ragged | Array:
    """What a loss reads, as checksums are made of it."""
    if not (pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type)):
        return np.asarray(column.to_numpy())
    lists = lists_of(column)
    if name not in HEAD:
        return lists
    k = max(len(lists.values) // max(int(n_trained.sum()), 1), 1)
    return Ragged(lists.values.reshape(-1, k), offsets_of(n_trained))


class _File:
    """A file of columns that is being written; the first part that has rows says which columns."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, 0
        self.facts: Facts | None = None
        self.schema = pa.schema([])
        self.writer: pa.RecordBatchStreamWriter | None = None

    def append(self, part: TrainingData) -> None:
        self.facts = part.facts if self.facts is None else self.facts + part.facts
        n, first, self.rows = len(part), self.rows, self.rows + len(part)
        table = part.table.append_column(ROW, pa.array(np.arange(first, self.rows)))
        if not first:
            self.schema = table.schema
        if n:
            if self.writer is None:
                self.writer = pa.ipc.new_stream(self.path, self.schema)
            columns = [table[f.name] if f.name in table.column_names else pa.nulls(n, f.type) for f in self.schema]
            self.writer.write_table(pa.table(columns, schema=self.schema).combine_chunks())

    def close(self) -> None:
        (self.writer or pa.ipc.new_stream(self.path, self.schema)).close()
