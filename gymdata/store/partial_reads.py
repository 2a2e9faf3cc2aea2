"""Tables read in part: row groups that are loaded when needed, and datasets of them for query engines.

Invariants: every page that is read is verified; a filter sees the values and never a file's statistics, which no checksum
covers (and which know nothing of NaN); only the requested columns, and those that a filter names, are read. The Arrow cache
for reading in any order is built once, appears whole, and is used only for the very file that it was made from; rows of a
cache are views of the file on disk, so memory does not grow with it.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.ipc
import pyarrow.parquet as pq
import xxhash
from pyarrow.fs import LocalFileSystem

from gymdata.errors import GymdataError
from gymdata.rollouts.schema import ROLLOUTS, Table
from gymdata.store.lock import Lock
from gymdata.store.parquet import group_rows, opened_parquet, schema_of
from gymdata.store.parquet_rows import parquet_parts, stored_columns
from gymdata.store.paths import Source, resolve
from gymdata.store.reading import check_source
from gymdata.store.run_json import replacing
from gymdata.store.tables import chosen_columns, files_of, scan_source, sound_batches

if TYPE_CHECKING:
    import polars as pl

_BATCH_ROWS = 1 << 16
_MADE_FROM = b"gymdata.made_from"


@dataclass(frozen=True, slots=True)
class RowGroup:
    """``rows`` rows. ``batches`` reads columns of them, null where the file has none of that name; with None those that
    were asked for and are there."""

    rows: int
    batches: Callable[[Sequence[str] | None], Iterator[pa.RecordBatch]]

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> RowGroup:
        """A batch that is in memory, or mapped into it."""
        return cls(batch.num_rows, lambda names: iter([batch if names is None else batch.select(list(names))]))

    def load(self) -> pa.Table:
        """All of them, as one chunk a column."""
        return pa.Table.from_batches(self.batches(None)).combine_chunks()


class VerifiedDataset(ds.FileSystemDataset):  # type: ignore[misc]  # pyarrow has no types
    """Row groups as a dataset, whose ``scanner`` reads no more of them than a filter takes. They are read by the thread that
    wants the rows, so no dataset of Arrow's reads them. ``groups``: those with some columns."""

    def __init__(self, schema: pa.Schema, groups: Callable[[Sequence[str]], Iterable[RowGroup]]) -> None:
        super().__init__([], schema, ds.ParquetFileFormat(), LocalFileSystem())
        self._groups = groups
        #: A gymdata error that was raised inside the reader, which may keep only its text.
        self.fault: GymdataError | None = None

    @classmethod
    def of_files(cls, files: Sequence[Path], table: Table) -> VerifiedDataset:
        """Parquet files as one dataset: the columns that one of them has, those of ``table`` with its types.

        Raises DataError for a file that cannot be read, is newer, or lacks a column that ``table`` cannot do without.
        """
        fields = dict[str, pa.Field]()
        for file in files:
            schema = schema_of(file)
            stored_columns(schema, table, None, str(file))
            for f in schema:
                known = table.schema.field(f.name) if f.name in table.schema.names else f.remove_metadata()
                fields.setdefault(f.name, known)
        schema = pa.schema(list(fields.values()))
        # What the table does not have need not be in every file.
        wider = replace(table, schema=schema, optional=table.optional | (fields.keys() - set(table.schema.names)))
        return cls(schema, lambda columns: (group for f in files for group in _parquet_groups(f, wider, columns)))

    def scanner(self, columns: list[str] | None = None, filter: Any = None, **_: object) -> SimpleNamespace:
        """Called by DuckDB: ``columns`` (all, when None) of the rows that pass ``filter``, as what it takes of a scanner."""
        names = self.schema.names if columns is None else columns
        # Columns that the expression may name, possibly too many.
        text = "" if filter is None else str(filter)
        words = set(re.findall(r"\w+", text))
        named = [name for name in self.schema.names if (name in words if name.isidentifier() else name in text)]

        def passing(batch: pa.RecordBatch) -> pa.Table:
            rows = pa.Table.from_batches([batch])
            return rows if filter is None else rows.filter(filter)

        def batches() -> Iterator[pa.RecordBatch]:
            for rows in self.passing(names, named, passing):
                yield from rows.select(names).to_batches()

        schema = pa.schema([self.schema.field(name) for name in names])
        reader = pa.RecordBatchReader.from_batches(schema, batches())
        return SimpleNamespace(to_reader=lambda: reader, projected_schema=schema)

    def passing(
        self, names: Sequence[str], named: Sequence[str], passing: Callable[[pa.RecordBatch], Any]
    ) -> Iterator[Any]:
        """What ``passing`` leaves of each batch with the columns ``names`` and those that a filter has ``named``. Of a row
        group in which no row passes, only these are read."""
        # Without a column there would be no rows to count.
        columns = list(dict.fromkeys([*names, *named])) or self.schema.names[:1]
        first = named if len(columns) > len(named) else ()
        try:
            for group in self._groups(columns):
                if not first or any(len(passing(batch)) for batch in group.batches(first)):
                    yield from map(passing, group.batches(columns))
        except GymdataError as error:
            self.fault = error
            raise


def scan_lazy(path: str | Path, table: Table = ROLLOUTS) -> pl.LazyFrame:
    """The rows of ``read_table`` as a Polars LazyFrame, verified as they are read.

    A query reads the columns that it names, a batch at a time, and the others only of row groups in which a row passes its
    filter.
    """
    import polars as pl
    from polars.io.plugins import register_io_source

    def groups(columns: Sequence[str]) -> Iterator[RowGroup]:
        return (group for source in files_of(path, table) for group in _groups_of(source, table, columns))

    dataset = VerifiedDataset(table.arrow, groups)
    empty = cast("pl.DataFrame", pl.from_arrow(table.arrow.empty_table()))

    def frames(
        columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, _: int | None
    ) -> Iterator[pl.DataFrame]:
        names = columns if columns is not None else table.schema.names
        named = [] if predicate is None else list(dict.fromkeys(predicate.meta.root_names()))
        left = n_rows

        def passing(batch: pa.RecordBatch) -> pl.DataFrame:
            nonlocal left
            df = cast("pl.DataFrame", pl.from_arrow(batch))
            if left is not None:
                df = df.head(left)
                left -= df.height
            return df if predicate is None else df.filter(predicate)

        # The first rows are counted as they are read, which is once.
        for df in dataset.passing([*names, *named], named if n_rows is None else (), passing):
            yield df.select(names)
            if left == 0:
                return

    return register_io_source(frames, schema=empty.schema)


def row_groups(path: str | Path, table: Table, columns: Sequence[str] | None = None) -> list[RowGroup]:
    """The rows of ``read_table``, in its order, in groups that are read one by one.

    ``columns`` limits the columns; optional ones that a file lacks are left out. Raises what ``read_table`` raises.
    """
    names = chosen_columns(table, columns)
    return [group for source in resolve(path, table) for group in _groups_of(source, table, names)]


def rows_at(
    path: str | Path, table: Table, numbers: npt.NDArray[np.int64], columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Some rows of ``read_table``, by their numbers (rising), whole or some of their columns. Only the row groups that hold
    them are read, each once."""
    names, start = chosen_columns(table, columns), 0
    for group in (group for source in resolve(path, table) for group in _groups_of(source, table, names)):
        indices = numbers[(numbers >= start) & (numbers < start + group.rows)] - start
        start += group.rows
        if len(indices):
            yield group.load().take(pa.array(indices))


def cached_row_groups(path: str | Path, table: Table, columns: Sequence[str]) -> list[RowGroup]:
    """The same rows, of those ``columns`` that are there, from an Arrow file that is mapped into memory: any row is there
    without reading others.

    The file is built when it is missing or its source changed: ``.NAME.arrow`` beside the source, or in the temporary
    folder where that cannot be written.
    """
    groups = []
    for source in resolve(path, table):
        reader = pa.ipc.open_file(pa.memory_map(str(_arrow_file(source, table))))
        names = [name for name in columns if name in reader.schema.names]
        groups += [RowGroup.of(reader.get_batch(i).select(names)) for i in range(reader.num_record_batches)]
    return groups


def _arrow_file(source: Source, table: Table) -> Path:
    """The cache of a file. Several processes of one training build it at once: the first builds it for all."""
    check_source(source.path)
    stat = source.path.stat()
    made_from = f"{source.path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()
    folder, name = source.path.parent, f".{source.path.name}.arrow"
    if not os.access(folder, os.W_OK):
        digest = xxhash.xxh3_64_hexdigest(str(source.path.resolve()).encode())
        folder, name = Path(tempfile.gettempdir()), f"gymdata-{digest}.arrow"
    cache = folder / name
    if _is_made_from(cache, made_from):
        return cache
    lock = Lock(folder, f".{name}.lock", wait=True)
    try:
        if not _is_made_from(cache, made_from):
            loaded = (group.load() for group in _groups_of(source, table, None))
            first = next(loaded, table.schema.empty_table())
            schema = first.schema.with_metadata({**table.metadata, _MADE_FROM: made_from})
            with replacing(cache) as temporary, pa.ipc.new_file(temporary, schema) as writer:
                for data in chain([first], loaded):
                    writer.write_table(data)
    finally:
        lock.remove()
    return cache


def _is_made_from(cache: Path, made_from: bytes) -> bool:
    try:
        with pa.memory_map(str(cache)) as mapped:
            return bool((pa.ipc.open_file(mapped).schema.metadata or {}).get(_MADE_FROM) == made_from)
    except (pa.ArrowException, OSError):
        return False


def _groups_of(source: Source, table: Table, names: Sequence[str] | None) -> Iterator[RowGroup]:
    """The rows of a file with the table's types: by row groups, of other formats the batches as they are read."""
    if source.kind != "parquet":
        return map(RowGroup.of, scan_source(source, table, names))
    check_source(source.path)
    return _parquet_groups(source.path, table, names)


def _parquet_groups(path: Path, table: Table, names: Sequence[str] | None) -> Iterator[RowGroup]:
    """The row groups of a Parquet file that have rows."""
    with opened_parquet(path) as file:
        footer, columns = file.metadata, stored_columns(file.schema_arrow, table, names, str(path))
    for index, rows in enumerate(group_rows(footer)):
        if rows:
            yield RowGroup(rows, partial(_group_batches, path, table, footer, index, columns))


def _group_batches(
    path: Path, table: Table, footer: pq.FileMetaData, index: int, stored: Sequence[str], names: Sequence[str] | None
) -> Iterator[pa.RecordBatch]:
    columns = stored if names is None else names
    return sound_batches(parquet_parts(path, table, table, columns, _BATCH_ROWS, footer=footer, group=index))
