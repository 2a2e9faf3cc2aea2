"""Rows of Parquet files with the types of a table.

Invariants: what cannot be read is an error with the file and its row group; a row that does not fit its table is named and
hides no other one; statistics of a file are never taken for its values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gymdata.errors import DataError, abridged, counted, plural
from gymdata.rollouts.ragged import list_parts
from gymdata.rollouts.schema import Table, check_version
from gymdata.store.columns import Batch, Fault, Misfit
from gymdata.store.parquet import READ_FAULTS, broken_parquet, damaged, opened_parquet
from gymdata.workers.tuning import ahead

#: Batches that are decoded ahead of the reader.
_BATCHES_AHEAD = 2
#: Uncompressed bytes of a row group above which it is read in batches of about so many bytes.
_GIANT_BYTES, _STREAM_BYTES = 256 << 20, 48 << 20


def parquet_parts(
    path: Path,
    table: Table,
    read: Table,
    names: Sequence[str] | None,
    batch_size: int,
    *,
    threads: bool = True,
    footer: pq.FileMetaData | None = None,
    group: int | None = None,
) -> Iterator[Batch | Fault]:
    """The rows of a Parquet file, or of one row ``group`` of it, with the types of ``read``, the part of ``table`` that is
    wanted, after what is wrong with their columns or with rows among them.

    ``names``: the columns that are needed, null where there is none; None: all that ``table`` cannot do without, and others
    that are there. ``footer``: as for ``opened_parquet``. Without ``threads`` a batch is decoded by the thread that reads
    it; a file is read ahead."""
    where, row, wanted = str(path), 0, read.schema.names if names is None else names
    try:
        with opened_parquet(path, footer) as file:
            schema = file.schema_arrow
            yield from (faults := _schema_faults(schema, table, read, wanted, where, names is None))
            if any(fault.misfit is None and fault.kind == "file" for fault in faults):
                return
            # What is left of them when a column is lost.
            lost = {fault.misfit.path[0] for fault in faults if fault.misfit is not None}
            columns = [n for n in wanted if n not in lost and (names is not None or n in schema.names)]
            groups = range(file.num_row_groups) if group is None else (group,)
            stored = _stored_batches(file, path, groups, known_leaves(file, columns, read), batch_size, threads)
            if threads and group is None:
                stored = ahead(stored, _BATCHES_AHEAD)
            # Closed before the file, because its thread may still be reading ahead.
            with contextlib.closing(stored):
                for batch in stored:
                    try:
                        yield from _fitted_batch(batch, read, columns, where, row)
                    except DataError as error:
                        yield Fault.of_file(error, row, where, table)
                    row += batch.num_rows
    except DataError as error:
        yield Fault.of_file(error, row, where, table)


def _stored_batches(
    file: pq.ParquetFile, path: Path, groups: Iterable[int], leaves: list[str], size: int, threads: bool
) -> Generator[pa.RecordBatch]:
    """The rows of some row groups, as they are stored."""
    for index in groups:
        yield from _group_batches(file, path, index, leaves, size, threads)


def _group_batches(
    file: pq.ParquetFile, path: Path, index: int, leaves: list[str], size: int, threads: bool
) -> Iterator[pa.RecordBatch]:
    """The rows of one row group, ``size`` at a time, of a giant one fewer: a reader of all groups, and a dataset's scanner
    even more, holds more the longer the file is. Raises DataError for a damaged page, and for a column that ends early, as a
    damaged footer makes it."""
    group = file.metadata.row_group(index)
    n_read, expected = 0, group.num_rows
    if group.total_byte_size > _GIANT_BYTES:
        size = min(size, max(1, expected * _STREAM_BYTES // group.total_byte_size))
    try:
        for batch in file.iter_batches(size, row_groups=[index], columns=leaves, use_threads=threads):
            n_read += batch.num_rows
            if batch.num_rows:
                yield batch
    except READ_FAULTS as error:
        raise broken_parquet(path, error, f"row group {index}: ") from error
    if n_read != expected:
        raise damaged(path, f"row group {index}: {n_read:,} of {counted(expected, 'row')} can be read")


def known_leaves(file: pq.ParquetFile, columns: Sequence[str], table: Table) -> list[str]:
    """The Parquet leaf columns of ``columns``, without fields of lists of objects that ``table`` does not have."""
    fields = {f.name: f.type.value_type for f in table.schema if pa.types.is_list(f.type)}
    structs = {name: {f.name for f in kind} for name, kind in fields.items() if pa.types.is_struct(kind)}
    # "turns.list.element.agent": other programs name the two levels between differently.
    paths = (file.schema.column(i).path.split(".") for i in range(len(file.schema)))
    return [
        ".".join(p) for p in paths if p[0] in columns and (p[0] not in structs or p[3:4] == [] or p[3] in structs[p[0]])
    ]


def stored_columns(schema: pa.Schema, table: Table, names: Sequence[str] | None, where: str) -> list[str]:
    """Which of ``names`` (None: of all columns) a file with ``schema`` has. Raises DataError for one that ``table`` cannot
    do without, or that has what it does not know."""
    wanted = table.schema.names if names is None else names
    if faults := _schema_faults(schema, table, table, wanted, where, names is None):
        raise faults[0].error()
    return [name for name in wanted if name in schema.names]


def _fitted_batch(
    batch: pa.RecordBatch, table: Table, columns: Sequence[str], where: str, first: int
) -> Iterator[Batch | Fault]:
    """The rows of a batch, and a fault for each that has a null where there is none. Raises DataError for a column that
    cannot be brought to its type."""
    places = dict[int, tuple[str | int, ...]]()
    for name in (name for name in columns if name in batch.schema.names):
        for index, path in _null_places(batch.column(name), table.schema.field(name)):
            places.setdefault(index, (name, *path))
    for index in sorted(places):
        found = Misfit(places[index], "a value", "null")
        ids = batch.column("rollout_id") if "rollout_id" in batch.schema.names else None
        value = {"rollout_id": ids[index].as_py()} if ids is not None else None
        yield Fault("row", "S102", first + index, where, table, found.field, misfit=found, value=value)
    numbers = np.arange(first, first + batch.num_rows)
    sound = Batch(batch, numbers).only(~np.isin(numbers - first, list(places)))
    if len(sound.rows):
        fields = [table.schema.field(name) for name in columns]
        arrays = [_cast(sound.data, f, table, where) for f in fields]
        data = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields, metadata=table.metadata))
        yield Batch(data, sound.rows)


def _cast(batch: pa.RecordBatch, f: pa.Field, table: Table, where: str) -> pa.Array:
    """A column with the type of its field; null where the file has none."""
    if f.name not in batch.schema.names:
        return pa.nulls(batch.num_rows, f.type)
    column = batch.column(f.name)
    try:
        return column.cast(f.type)
    except (pa.ArrowException, ValueError) as error:
        of_table = f"column {f.name!r} of {table.name}"
        message = f"{where}: {of_table}: got {column.type}, expected {f.type}: {error}"
        raise DataError(message, code="S102") from error


def _schema_faults(
    schema: pa.Schema, table: Table, read: Table, columns: Sequence[str], where: str, whole: bool
) -> list[Fault]:
    """What is wrong with the columns of a file, of which ``columns`` are read: those and fields that it lacks, lists of
    objects that are none, and fields that the table does not have. ``whole``: it must have all columns."""
    try:
        check_version(schema.metadata, where, table)
    except DataError as error:
        return [Fault.of_file(error, 0, where, table, "S102")]
    needed = table.required() if whole else [name for name in columns if name not in table.optional]
    found = [Misfit((name,), "a value", "nothing", missing=True) for name in needed if name not in schema.names]
    unknown = list[str]()
    for f in (read.schema.field(name) for name in columns if name in schema.names):
        kind = schema.field(f.name).type
        unknown += _unknown_fields(kind, table.schema.field(f.name).type, f.name)
        if pa.types.is_list(f.type) and pa.types.is_struct(f.type.value_type):
            if not (_is_list(kind) and pa.types.is_struct(kind.value_type)):
                found.append(Misfit((f.name,), "list<struct>", str(kind)))
                continue
            there = {child.name for child in kind.value_type}
            lost = [child.name for child in f.type.value_type if child.name not in there and not child.nullable]
            found += (Misfit((f.name, name), "a value", "nothing", missing=True) for name in lost)
    incomplete = DataError.missing_columns(where, table.name, [misfit.field for misfit in found], schema.names)
    faults = [
        Fault("file", "S103" if misfit.missing else "S102", 0, where, table,
              f"column {misfit.field!r}" + " is missing" * misfit.missing, misfit=misfit, raised=incomplete)
        for misfit in found
    ]  # fmt: skip
    if unknown:
        strange = DataError(f"{where}: table {table.name} has no {plural(len(unknown), 'field')} {abridged(unknown)}")
        faults.append(Fault("unknown", "S102", 0, where, table, strange.message, keys=tuple(unknown), raised=strange))
    return faults


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _unknown_fields(actual: pa.DataType, kind: pa.DataType, place: str) -> Iterator[str]:
    """The fields of objects in ``actual`` that ``kind`` does not have: a cast would lose them."""
    if pa.types.is_list(kind) and _is_list(actual):
        yield from _unknown_fields(actual.value_type, kind.value_type, f"{place}[]")
    elif pa.types.is_struct(kind) and pa.types.is_struct(actual):
        for child in actual:
            if kind.get_field_index(child.name) < 0:
                yield f"{place}.{child.name}"
            else:
                yield from _unknown_fields(child.type, kind.field(child.name).type, f"{place}.{child.name}")


def _null_places(array: pa.Array, f: pa.Field) -> Iterator[tuple[int, tuple[str | int, ...]]]:
    """Where ``array`` has a null that ``f`` does not allow: the index, and the path from there on. A log-probability that
    is null is one that is not finite."""
    if array.null_count and not f.nullable:
        yield from ((int(index), ()) for index in np.flatnonzero(array.is_null()))
    if pa.types.is_list(f.type) and _is_list(array.type):
        offsets, values = list_parts(array)
        item = pa.field("item", f.type.value_type, nullable=pa.types.is_floating(f.type.value_type))
        for place, path in _null_places(values, item):
            index = int(np.searchsorted(offsets, place, side="right")) - 1
            yield index, (place - int(offsets[index]), *path)
    elif pa.types.is_struct(f.type) and pa.types.is_struct(array.type):
        for child in f.type:
            if array.type.get_field_index(child.name) >= 0:
                below = _null_places(array.field(child.name), child)
                yield from ((index, (child.name, *path)) for index, path in below)
