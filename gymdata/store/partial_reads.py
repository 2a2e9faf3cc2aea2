"""Tables read in part: verified Parquet files for a query engine, and groups of rows that are loaded when needed.

Invariants: a page is read only when its checksum agrees; a filter sees the values and never a file's statistics, which
no checksum covers (and which know nothing of NaN); a gymdata file has the columns and types of its table. Only the
requested columns, and those that a filter names, are read. Pages without a checksum, which other programs write, cannot
be verified. The Arrow cache for reading in any order is built once, appears whole, and is used only for the very file
that it was made from; rows of a cache are views of the file on disk, so memory does not grow with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.ipc
import pyarrow.parquet as pq
import xxhash
from pyarrow.fs import LocalFileSystem

from gymdata.errors import DataError, GymdataError, counted
from gymdata.rollouts.schema import ROLLOUTS, SCHEMA_KEY, Table, check_version
from gymdata.store.lock import Lock
from gymdata.store.parquet import parquet_file
from gymdata.store.paths import Source, resolve
from gymdata.store.reading import check_source
from gymdata.store.run_json import replacing
from gymdata.store.tables import (
    _chosen,
    _present,
    _shape,
    opened_parquet,
    read_source,
    scan_batches,
    schema_of,
)

if TYPE_CHECKING:
    import polars as pl

#: Rows of a batch: token lists of one row take as much room as a thousand rewards.
_FLAT_ROWS, _NESTED_ROWS = 1 << 16, 1 << 12


class VerifiedDataset(ds.FileSystemDataset):  # type: ignore[misc]  # pyarrow has no types
    """Files of one schema, of which ``scanner`` filters rows after their pages were verified, and reads no more than that
    takes. They are read by the thread that wants the rows, so no dataset of Arrow's reads them."""

    def __init__(self, files: Sequence[Path], schema: pa.Schema) -> None:
        super().__init__([], schema, ds.ParquetFileFormat(), LocalFileSystem())
        self._files = files
        #: A gymdata error that was raised inside the reader, which may keep only its text.
        self.fault: GymdataError | None = None

    def scanner(self, columns: list[str] | None = None, filter: Any = None, **_: object) -> _Reads:
        """Called by DuckDB: ``columns`` (all, when None) of the rows that pass ``filter``."""
        names = self.schema.names if columns is None else columns
        schema = pa.schema([self.schema.field(name) for name in names])
        return _Reads(pa.RecordBatchReader.from_batches(schema, self._noted(self._batches(names, filter))))

    def _noted(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            yield from batches
        except GymdataError as error:
            self.fault = error
            raise

    def _batches(self, names: list[str], filter: Any) -> Iterator[pa.RecordBatch]:
        # Columns that the expression may name, possibly too many.
        text = str(filter)
        words = set(re.findall(r"\w+", text))
        named = [n for n in self.schema.names if filter is not None and (n in words if n.isidentifier() else n in text)]
        # Without a column there would be no rows to count.
        columns = list(dict.fromkeys([*names, *named])) or self.schema.names[:1]
        first = named if filter is not None and set(columns) - set(named) else []
        for path in self._files:
            with _reading(path), parquet_file(path, page_checksum_verification=True) as file:
                # Row group by row group: a reader of them all holds more the longer the file is.
                for group in range(file.num_row_groups):
                    if not first or any(t.num_rows for t in self._passing(file, group, first, filter)):
                        for table in self._passing(file, group, columns, filter):
                            yield from table.select(names).to_batches()

    def _passing(self, file: pq.ParquetFile, group: int, names: list[str], filter: Any) -> Iterator[pa.Table]:
        """The rows of a row group that pass. A footer's entry of one column can be damaged, too; the reader would see a
        shorter column."""
        schema = pa.schema([self.schema.field(name) for name in names])
        size = _NESTED_ROWS if any(pa.types.is_nested(field.type) for field in schema) else _FLAT_ROWS
        n_read, rows = 0, file.metadata.row_group(group).num_rows
        for batch in file.iter_batches(size, row_groups=[group], columns=names):
            n_read += batch.num_rows
            table = pa.Table.from_arrays(batch.select(names).columns, schema=schema)
            yield table if filter is None else table.filter(filter)
        if n_read != rows:
            raise pa.ArrowInvalid(f"a column stream ends too early: {n_read:,} of {counted(rows, 'row')}")


@dataclass
class _Reads:
    """The interface of a scanner that DuckDB uses."""

    reader: pa.RecordBatchReader

    def to_reader(self) -> pa.RecordBatchReader:
        return self.reader

    @property
    def projected_schema(self) -> pa.Schema:
        return self.reader.schema


def verified_datasets(files: Sequence[Path], table: Table) -> list[VerifiedDataset]:
    """Datasets over ``files``, one for each set of columns among them, in the order in which they first come.

    Raises DataError for a file that cannot be read, is newer, or claims to be ``table`` and has other columns or types.
    """
    alike: dict[tuple[tuple[str, str], ...], list[Path]] = defaultdict(list)
    for file in files:
        alike[tuple((f.name, str(f)) for f in _checked_schema(file, table))].append(file)
    return [VerifiedDataset(same, schema_of(same[0]).remove_metadata()) for same in alike.values()]


def _checked_schema(file: Path, table: Table) -> pa.Schema:
    """The columns of one file, its footer consistent in itself and with the table."""
    where = str(file)
    with opened_parquet(file) as opened:
        schema, footer = opened.schema_arrow, opened.metadata
        # A row group's columns stay untouched here: pyarrow ends the process over some damage in what describes them.
        rows = sum(footer.row_group(i).num_rows for i in range(footer.num_row_groups))
    check_version(schema.metadata, where, table)
    if rows != footer.num_rows:
        raise DataError.damaged(where, "its row groups do not have as many rows as its footer says")
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


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raises DataError for what cannot be read of ``file``: what is damaged, or else that it was replaced meanwhile."""
    try:
        yield
    except MemoryError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise first_broken([file]) or DataError(
            f"{file}: was replaced or changed while it was read", hint="run the command again"
        ) from error


def first_broken(files: Sequence[Path]) -> DataError | None:
    """Which of ``files`` cannot be read, every page of it: the error that names it, or None."""
    for file in files:
        try:
            with opened_parquet(file, page_checksum_verification=True) as opened:
                for index in range(opened.num_row_groups):
                    for name in opened.schema_arrow.names:
                        rows, read = opened.metadata.row_group(index).num_rows, opened.read_row_group(index, [name])
                        if read.num_rows != rows:
                            reason = f"column {name!r} has {read.num_rows:,} of {counted(rows, 'row')}"
                            return DataError.damaged(file, reason)
        except DataError as error:
            return error
    return None


def scan_lazy(path: str | Path, table: Table = ROLLOUTS) -> pl.LazyFrame:
    """The rows of ``read_table`` as a Polars LazyFrame, verified as they are read.

    A query reads the columns that it names, a batch at a time; what is nested, token ids above all, only of row groups in
    which a row passes its filter.
    """
    import polars as pl
    from polars.io.plugins import register_io_source

    empty: Any = pl.from_arrow(table.arrow.empty_table())
    schema = empty.schema

    def frame(rows: pa.Table | pa.RecordBatch, names: list[str]) -> pl.DataFrame:
        df: Any = pl.from_arrow(rows)
        missing = [pl.lit(None, schema[name]).alias(name) for name in names if name not in df.columns]
        return cast("pl.DataFrame", df.with_columns(missing).select(names))

    def frames(
        columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, batch_size: int | None
    ) -> Iterator[pl.DataFrame]:
        names = columns if columns is not None else list(schema)
        if predicate is not None and n_rows is None:
            named = list(dict.fromkeys(predicate.meta.root_names()))
            nested = any(schema[name].is_nested() for name in set(names) - set(named))
            if nested and all(source.kind == "parquet" for source in resolve(path, table)):
                for scalars, group in zip(row_groups(path, table, named), row_groups(path, table, names), strict=True):
                    if frame(scalars.load(), named).select(predicate.any()).item():
                        yield frame(group.load(), names).filter(predicate)
                return
        left = n_rows
        # Without a column there would be no rows to count.
        for batch in scan_batches(path, table, names or table.schema.names[:1], batch_size or _NESTED_ROWS):
            df = frame(batch, names)
            if left is not None:
                df = df.head(left)
                left -= df.height
            yield df if predicate is None else df.filter(predicate)
            if left == 0:
                return

    return register_io_source(frames, schema=schema)


_MADE_FROM = b"gymdata.made_from"


@dataclass(frozen=True, slots=True)
class RowGroup:
    """``rows`` rows that ``load`` gives as a table of one chunk a column."""

    rows: int
    load: Callable[[], pa.Table]


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
        if not (cache.is_file() and _is_made_from(cache, made_from)):
            # Several processes of one training build it at once: the first builds it for all.
            lock = Lock(folder, f".{name}.lock", wait=True)
            try:
                if not (cache.is_file() and _is_made_from(cache, made_from)):
                    parts = _groups_of(source, table, None)
                    with replacing(cache) as temporary:
                        first = parts[0].load() if parts else table.schema.empty_table()
                        schema = first.schema.with_metadata({**table.metadata, _MADE_FROM: made_from})
                        with pa.ipc.new_file(temporary, schema) as writer:
                            for index in range(len(parts)):
                                data = first if index == 0 else parts[index].load()
                                for batch in data.to_batches():
                                    writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
            finally:
                lock.remove()
        reader = pa.ipc.open_file(pa.memory_map(str(cache)))
        names = [name for name in columns if name in reader.schema.names]
        batches = [reader.get_batch(i).select(names) for i in range(reader.num_record_batches)]
        groups += [RowGroup(b.num_rows, lambda b=b: pa.Table.from_batches([b])) for b in batches]  # type: ignore[misc]  # as in loading: a default
    return groups


def _groups_of(source: Source, table: Table, names: list[str] | None) -> list[RowGroup]:
    check_source(source.path)
    where = str(source.path)
    if source.kind != "parquet":
        data = read_source(source, table, names).combine_chunks()
        return [RowGroup(data.num_rows, lambda: data)]
    with opened_parquet(source.path) as file:
        check_version(file.schema_arrow.metadata, where, table)
        present = _present(file.schema_arrow, table, names, where)
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]

    def load(index: int) -> pa.Table:
        with opened_parquet(source.path, page_checksum_verification=True) as file:
            data = file.read_row_group(index, columns=present)
            if data.num_rows != sizes[index]:
                raise DataError.damaged(where, f"{data.num_rows:,} of {counted(sizes[index], 'row')} can be read")
        return _shape(data, table, present, where).combine_chunks()

    return [RowGroup(rows, lambda i=i: load(i)) for i, rows in enumerate(sizes)]  # type: ignore[misc]  # as in loading: a default


def _is_made_from(cache: Path, made_from: bytes) -> bool:
    try:
        with pa.memory_map(str(cache)) as mapped:
            return bool((pa.ipc.open_file(mapped).schema.metadata or {}).get(_MADE_FROM) == made_from)
    except (pa.ArrowException, OSError):
        return False
