"""Tables read in part: verified Parquet files for a query engine, and groups of rows that are loaded when needed.

Invariants: a filter sees the values and never a file's statistics, which no checksum covers (and which know nothing of NaN);
a gymdata file has the columns and types of its table. Only the requested columns, and those that a filter names, are read.
The Arrow cache for reading in any order is built once, appears whole, and is used only for the very file
that it was made from; rows of a cache are views of the file on disk, so memory does not grow with it.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.ipc
import xxhash
from pyarrow.fs import LocalFileSystem

from gymdata.errors import DataError, GymdataError
from gymdata.rollouts.schema import ROLLOUTS, SCHEMA_KEY, Table, check_version
from gymdata.store.lock import Lock
from gymdata.store.parquet import group_batches, group_rows, opened_parquet, schema_of
from gymdata.store.paths import Source, resolve
from gymdata.store.reading import check_source
from gymdata.store.run_json import replacing
from gymdata.store.tables import _chosen, _present, _shape, files_of, scan_source

if TYPE_CHECKING:
    import polars as pl

#: Rows of a batch: token lists of one row take as much room as a thousand rewards.
_FLAT_ROWS, _NESTED_ROWS = 1 << 16, 1 << 12


@dataclass(frozen=True, slots=True)
class RowGroup:
    """``rows`` rows. ``batches`` reads some of their columns, or with None those that were asked for."""

    rows: int
    batches: Callable[[Sequence[str] | None], Iterator[pa.RecordBatch]]

    def load(self) -> pa.Table:
        """All of them, as one chunk a column."""
        return pa.Table.from_batches(self.batches(None)).combine_chunks()


class VerifiedDataset(ds.FileSystemDataset):  # type: ignore[misc]  # pyarrow has no types
    """Row groups of one schema, of which ``scanner`` filters rows that were read and verified, and reads no more than that
    takes. They are read by the thread that wants the rows, so no dataset of Arrow's reads them. ``groups``: those with some
    columns."""

    def __init__(self, schema: pa.Schema, groups: Callable[[Sequence[str]], Iterable[RowGroup]]) -> None:
        super().__init__([], schema, ds.ParquetFileFormat(), LocalFileSystem())
        self._groups = groups
        #: A gymdata error that was raised inside the reader, which may keep only its text.
        self.fault: GymdataError | None = None

    def scanner(self, columns: list[str] | None = None, filter: Any = None, **_: object) -> SimpleNamespace:
        """Called by DuckDB: ``columns`` (all, when None) of the rows that pass ``filter``, as what it takes of a scanner."""
        names = self.schema.names if columns is None else columns
        schema = pa.schema([self.schema.field(name) for name in names])
        reader = pa.RecordBatchReader.from_batches(schema, self._batches(names, filter))
        return SimpleNamespace(to_reader=lambda: reader, projected_schema=schema)

    def _batches(self, names: list[str], filter: Any) -> Iterator[pa.RecordBatch]:
        # Columns that the expression may name, possibly too many.
        text = str(filter)
        words = set(re.findall(r"\w+", text))
        named = [n for n in self.schema.names if filter is not None and (n in words if n.isidentifier() else n in text)]
        # Without a column there would be no rows to count.
        columns = list(dict.fromkeys([*names, *named])) or self.schema.names[:1]
        first = named if filter is not None and set(columns) - set(named) else []
        try:
            for group in self._groups(columns):
                if not first or any(self._passing(batch, filter).num_rows for batch in group.batches(first)):
                    for batch in group.batches(columns):
                        yield from self._passing(batch, filter).select(names).to_batches()
        except GymdataError as error:
            self.fault = error
            raise

    def _passing(self, batch: pa.RecordBatch, filter: Any) -> pa.Table:
        schema = pa.schema([self.schema.field(name) for name in batch.schema.names])
        table = pa.Table.from_arrays(batch.columns, schema=schema)
        return table if filter is None else table.filter(filter)


def _parquet_groups(path: Path, columns: Sequence[str]) -> list[RowGroup]:
    """The row groups of a file that have rows."""
    with opened_parquet(path) as file:
        footer, schema = file.metadata, file.schema_arrow

    def batches(index: int, names: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        chosen = list(columns if names is None else names)
        nested = any(pa.types.is_nested(schema.field(name).type) for name in chosen)
        with opened_parquet(path, footer) as file:
            for batch in group_batches(file, path, index, _NESTED_ROWS if nested else _FLAT_ROWS, chosen):
                yield batch.select(chosen)

    return [RowGroup(rows, partial(batches, index)) for index, rows in enumerate(group_rows(footer)) if rows]


def verified_datasets(files: Sequence[Path], table: Table) -> list[VerifiedDataset]:
    """Datasets over ``files``, one for each set of columns among them, in the order in which they first come.

    Raises DataError for a file that cannot be read, is newer, or claims to be ``table`` and has other columns or types.
    """
    alike: dict[tuple[tuple[str, str], ...], list[Path]] = defaultdict(list)
    for file in files:
        alike[tuple((f.name, str(f)) for f in _checked_schema(file, table))].append(file)

    def groups(same: Sequence[Path], columns: Sequence[str]) -> Iterator[RowGroup]:
        return (group for file in same for group in _parquet_groups(file, columns))

    schemas = ((schema_of(same[0]).remove_metadata(), same) for same in alike.values())
    return [VerifiedDataset(schema, partial(groups, same)) for schema, same in schemas]


def _checked_schema(file: Path, table: Table) -> pa.Schema:
    """The columns of one file, its footer consistent in itself and with the table."""
    where = str(file)
    schema = schema_of(file)
    check_version(schema.metadata, where, table)
    if SCHEMA_KEY in (schema.metadata or {}):
        missing = [name for name in table.required() if name not in schema.names]
        if missing:
            raise DataError.missing_columns(where, table.name, missing, schema.names)
        for field in schema:
            if field.name not in table.schema.names:
                raise DataError(f"{where}: table {table.name} has no column {field.name}")
            expected = table.schema.field(field.name)
            if not _fits(field.type, expected.type):
                raise DataError(
                    f"{where}: column {field.name!r} of {table.name}: got {field.type}, expected {expected.type}"
                )
    return schema


def _fits(actual: pa.DataType, expected: pa.DataType) -> bool:
    """Whether a type means the same, however wide it is and wherever it takes nulls; optional fields may be missing."""
    if actual == expected:
        return True
    if pa.types.is_dictionary(actual):
        return _fits(actual.value_type, expected)
    if pa.types.is_struct(expected) and pa.types.is_struct(actual):
        fields = {field.name: field for field in expected}
        names = {field.name for field in actual}
        lacks_none = all(field.nullable or field.name in names for field in expected)
        return lacks_none and all(f.name in fields and _fits(f.type, fields[f.name].type) for f in actual)
    if pa.types.is_list(expected) and (pa.types.is_list(actual) or pa.types.is_large_list(actual)):
        return _fits(actual.value_type, expected.value_type)
    if pa.types.is_string(expected):
        return bool(pa.types.is_large_string(actual) or pa.types.is_string_view(actual))
    kinds = (pa.types.is_signed_integer, pa.types.is_floating)
    return any(is_kind(actual) and is_kind(expected) for is_kind in kinds)


def scan_lazy(path: str | Path, table: Table = ROLLOUTS) -> pl.LazyFrame:
    """The rows of ``read_table`` as a Polars LazyFrame, verified as they are read.

    A query reads the columns that it names, a batch at a time; what is nested, token ids above all, only of row groups in
    which a row passes its filter.
    """
    import polars as pl
    from polars.io.plugins import register_io_source

    empty: Any = pl.from_arrow(table.arrow.empty_table())
    schema = empty.schema

    def frame(rows: pa.RecordBatch, names: Sequence[str]) -> pl.DataFrame:
        df: Any = pl.from_arrow(rows)
        missing = [pl.lit(None, schema[name]).alias(name) for name in names if name not in df.columns]
        return cast("pl.DataFrame", df.with_columns(missing).select(names))

    def frames(
        columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, _: int | None
    ) -> Iterator[pl.DataFrame]:
        def passing(df: pl.DataFrame) -> pl.DataFrame:
            return df if predicate is None else df.filter(predicate)

        names = columns if columns is not None else list(schema)
        named = [] if predicate is None else list(dict.fromkeys(predicate.meta.root_names()))
        nested = any(schema[name].is_nested() for name in set(names) - set(named))
        first, left = named if nested and n_rows is None else [], n_rows
        # Without a column there would be no rows to count.
        read = list(dict.fromkeys([*names, *named])) or table.schema.names[:1]
        for group in (group for source in files_of(path, table) for group in _groups_of(source, table, read)):
            if first and not any(passing(frame(rows, first)).height for rows in group.batches(first)):
                continue
            for rows in group.batches(None):
                df = frame(rows, names)
                if left is not None:
                    df = df.head(left)
                    left -= df.height
                yield passing(df)
                if left == 0:
                    return

    return register_io_source(frames, schema=schema)


_MADE_FROM = b"gymdata.made_from"


def row_groups(path: str | Path, table: Table, columns: Sequence[str] | None = None) -> list[RowGroup]:
    """The rows of ``read_table``, in its order, in groups that are read one by one.

    ``columns`` limits the columns; optional ones that a file lacks are left out. Raises what ``read_table`` raises.
    """
    names = _chosen(table, columns)
    return [group for source in resolve(path, table) for group in _groups_of(source, table, names)]


def cached_row_groups(path: str | Path, table: Table, columns: Sequence[str]) -> list[RowGroup]:
    """The same rows, of those ``columns`` that are there, from an Arrow file that is mapped into memory: any row is there
    without reading others.

    The file is built when it is missing or its source changed: ``.NAME.arrow`` beside the source, or in the temporary
    folder where that cannot be written.
    """
    groups = []
    for source in resolve(path, table):
        check_source(source.path)
        stat = source.path.stat()
        made_from = f"{source.path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()
        folder = source.path.parent
        name = f".{source.path.name}.arrow"
        if not os.access(folder, os.W_OK):
            folder = Path(tempfile.gettempdir())
            name = f"gymdata-{xxhash.xxh3_64_hexdigest(str(source.path.resolve()).encode())}.arrow"
        cache = folder / name
        if not _is_made_from(cache, made_from):
            # Several processes of one training build it at once: the first builds it for all.
            lock = Lock(folder, f".{name}.lock", wait=True)
            try:
                if not _is_made_from(cache, made_from):
                    _build(cache, source, table, made_from)
            finally:
                lock.remove()
        reader = pa.ipc.open_file(pa.memory_map(str(cache)))
        names = [name for name in columns if name in reader.schema.names]
        groups += [_held(reader.get_batch(i).select(names)) for i in range(reader.num_record_batches)]
    return groups


def _build(cache: Path, source: Source, table: Table, made_from: bytes) -> None:
    loaded = (group.load() for group in _groups_of(source, table, None))
    first = next(loaded, table.schema.empty_table())
    schema = first.schema.with_metadata({**table.metadata, _MADE_FROM: made_from})
    with replacing(cache) as temporary, pa.ipc.new_file(temporary, schema) as writer:
        for batch in (batch for data in chain([first], loaded) for batch in data.to_batches()):
            writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))


def _groups_of(source: Source, table: Table, names: list[str] | None) -> Iterator[RowGroup]:
    """The rows of a file with the table's types: by row groups, of other formats the batches as they are read."""
    if source.kind != "parquet":
        yield from map(_held, scan_source(source, table, names))
        return
    check_source(source.path)
    where = str(source.path)
    schema = schema_of(source.path)
    check_version(schema.metadata, where, table)
    present = _present(schema, table, names, where)

    def shaped(group: RowGroup, chosen: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        columns = present if chosen is None else [name for name in present if name in chosen] or present[:1]
        for batch in group.batches(columns):
            yield from _shape(pa.Table.from_batches([batch]), table, columns, where).to_batches()

    for group in _parquet_groups(source.path, present):
        yield RowGroup(group.rows, partial(shaped, group))


def _held(batch: pa.RecordBatch) -> RowGroup:
    """A batch that is in memory, or mapped into it."""
    return RowGroup(batch.num_rows, lambda names: iter([batch if names is None else batch.select(list(names))]))


def _is_made_from(cache: Path, made_from: bytes) -> bool:
    try:
        with pa.memory_map(str(cache)) as mapped:
            return bool((pa.ipc.open_file(mapped).schema.metadata or {}).get(_MADE_FROM) == made_from)
    except (pa.ArrowException, OSError):
        return False
