"""Training data as one Arrow file of columns, written part by part and mapped by every process of a training.

A part of the data (``TrainConfig.parts``) is in memory while it is checked, counted and appended as a record batch; after
that only numbers per row are. A row of the file is a row of training: what a pair has of each side is a list of two, and
``due`` is what its tokens must sum up to. Held-out rows are a file of their own. ``prepared``, written last, has what is
known of all rows. ``datasets.Dataset.from_file`` reads the files, too.

Invariants: a folder without ``prepared`` is not opened; what is due is of the part as it was made from the source's table,
not of what was written.
"""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gymdata.commands.train.mapped import Lists, Texts, mapped
from gymdata.commands.train.pair_data import NamedSequences, TrainingData
from gymdata.errors import StoreError
from gymdata.rollouts.ragged import Array, Ragged, byte_view
from gymdata.store.run_json import replacing

#: The folder's name beside a training's job file.
DATA = "data"
PREPARED, ROWS, HELD_OUT = "prepared", "rows.arrow", "held-out.arrow"
#: What is computed of sequences while they are in memory and kept beside them.
_DERIVED = ("keys", "n_trained", "first_trained", "lowest_id", "highest_id", "last_id", "prompts")
#: Where a value is in the data: the names of a field and of what is within it.
_Path = tuple[str, ...]


def prepare(folder: Path, parts: Iterable[TrainingData]) -> TrainingData:
    """The data of ``parts``, written to ``folder`` and opened from there.

    Raises StoreError when the disk refuses, and whatever ``parts`` does.
    """
    shutil.rmtree(folder, ignore_errors=True)
    files: dict[str, _File] = {}
    try:
        folder.mkdir(parents=True)
        for part in parts:
            for name, rows in ((ROWS, part), (HELD_OUT, getattr(part, "heldout", None))):
                if rows is not None:
                    files.setdefault(name, _File(folder / name)).append(rows)
        for file in files.values():
            file.close()
        with replacing(folder / PREPARED) as temporary, temporary.open("wb") as stream:
            pickle.dump({name: file.known for name, file in files.items()}, stream)
    except OSError as error:
        raise StoreError.from_os(folder, error) from error
    return opened(folder)


def opened(folder: Path) -> TrainingData:
    """The data that was written to ``folder``, its lists mapped. Raises StoreError when it is not complete."""
    try:
        with (folder / PREPARED).open("rb") as stream:
            files = pickle.load(stream)  # noqa: S301 - this training wrote it
    except (FileNotFoundError, EOFError) as error:
        raise StoreError(
            f"{folder}: the prepared training data is not complete", hint="start the training again"
        ) from error
    data: TrainingData
    data, *held_out = (_filled(known, mapped(folder / name)) for name, known in files.items())
    for rows in held_out:
        vars(data)["heldout"] = rows
    return data


@dataclasses.dataclass
class _Known:
    """What opens a file: the class of its data, what is known of all rows, and the columns that all of them have."""

    kind: Any = TrainingData
    facts: dict[_Path, Any] = dataclasses.field(default_factory=dict)
    columns: set[str] = dataclasses.field(default_factory=set)


class _File:
    """A file of columns that is being written."""

    def __init__(self, path: Path) -> None:
        self.path, self.known = path, _Known()
        self.schema = pa.schema([])
        self.writer: pa.RecordBatchStreamWriter | None = None

    def append(self, part: TrainingData) -> None:
        self.known.kind, n = type(part), len(part)
        columns = {}
        for path, value in _values(part):
            if isinstance(value, (np.ndarray, Ragged, list)):
                columns[".".join(path)] = _array(value, n)
            else:
                self.known.facts[path] = _summed(self.known.facts.get(path), value)
        if self.writer is not None and n:
            # A column that some part lacks is in none; where it is written already, the others are null.
            self.known.columns &= columns.keys()
            arrays = [columns.get(field.name, pa.nulls(n, field.type)) for field in self.schema]
            self.writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self.schema))
        elif self.writer is None:
            batch = pa.RecordBatch.from_pydict(columns)
            self.known.columns, self.schema = set(columns), batch.schema
            if n:
                self.writer = pa.ipc.new_stream(self.path, self.schema)
                self.writer.write_batch(batch)

    def close(self) -> None:
        if self.writer is None:  # no part has rows
            self.writer = pa.ipc.new_stream(self.path, self.schema)
        self.writer.close()


def _values(data: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """Everything that is in ``data`` but its held-out rows, and where."""
    if isinstance(data, (TrainingData, NamedSequences)):
        names = [field.name for field in dataclasses.fields(data) if field.name != "heldout"]
        items = {
            name: getattr(data, name) for name in (*names, *(_DERIVED if isinstance(data, NamedSequences) else ()))
        }
    elif isinstance(data, dict) and data:
        items = data
    else:
        yield path, data
        return
    for name, value in items.items():
        yield from _values(value, (*path, name))


def _summed(before: Any, part: Any) -> Any:
    """What is known of the rows of both, of which either may have nothing."""
    if not before or not part:
        return before or part
    return before | part if isinstance(part, frozenset) else before + part


def _filled(known: _Known, table: pa.Table) -> Any:
    """The data with its columns."""
    fields: dict[str, Any] = {}
    columns = {tuple(name.split(".")): _read(table[name]) for name in table.column_names if name in known.columns}
    for (name, *within), value in {**known.facts, **columns}.items():
        fields[name] = {**(fields.get(name) or {}), within[0]: value} if within else value
    given = fields.pop("sequences")
    sequences = NamedSequences(**{name: value for name, value in given.items() if name not in _DERIVED})
    vars(sequences).update(given)
    return known.kind(**fields, sequences=sequences)


def _array(column: Any, rows: int) -> pa.Array:
    """A column of ``rows`` entries, each a list of two where there are twice as many values."""
    if isinstance(column, Ragged):
        values = pa.array(column.values.ravel())
        if column.values.ndim == 2:
            values = pa.FixedSizeListArray.from_arrays(values, column.values.shape[1])
        array = pa.ListArray.from_arrays(column.offsets.astype(np.int32), values)
    elif isinstance(column, list):
        array = pa.array(column, pa.string())
    elif column.dtype.kind == "V":
        array = pa.Array.from_buffers(pa.binary(column.itemsize), len(column), [None, pa.py_buffer(byte_view(column))])
    else:
        array = pa.array(column)
    return array if len(array) == rows else pa.FixedSizeListArray.from_arrays(array, len(array) // rows)


def _read(column: pa.ChunkedArray) -> Lists | Texts | Array:
    """A column as it was given to ``_array``."""
    if pa.types.is_fixed_size_list(column.type):
        column = pa.chunked_array([chunk.flatten() for chunk in column.chunks], column.type.value_type)
    if pa.types.is_list(column.type):
        return Lists(column)
    if pa.types.is_string(column.type):
        return Texts(column)
    if pa.types.is_fixed_size_binary(column.type):
        keys = [chunk.buffers()[1][: len(chunk) * column.type.byte_width] for chunk in column.chunks]
        return np.frombuffer(b"".join(keys), f"V{column.type.byte_width}")
    return np.asarray(column.to_numpy())
