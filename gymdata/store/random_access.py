"""A table as groups of rows that are loaded when needed: Parquet row groups for reading in order, and an Arrow cache for
reading in any order.

Invariants: the cache is built once, appears whole, and is used only for the very file that it was made from; rows
of a cache are views of the file on disk, so memory does not grow with it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import xxhash

from gymdata.rollouts.schema import Table, check_version
from gymdata.store.lock import writing
from gymdata.store.paths import Source, resolve
from gymdata.store.reading import check_source
from gymdata.store.run_json import replacing
from gymdata.store.tables import _chosen, _present, _refuse_short, _shape, broken_parquet, read_source

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


def cached_row_groups(path: str | Path, table: Table) -> list[RowGroup]:
    """The same rows, all columns, from an Arrow file that is mapped into memory: any row is there without reading others.

    The file is built when it is missing or its source changed: ``.NAME.arrow`` beside the source, or in the temporary
    folder where that cannot be written.
    """
    groups = []
    for source in resolve(path, table):
        check_source(source, table)
        reader = pa.ipc.open_file(pa.memory_map(str(_cache_of(source, table))))
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        groups += [RowGroup(b.num_rows, lambda b=b: pa.Table.from_batches([b])) for b in batches]  # type: ignore[misc]  # as in loading: a default
    return groups


def _groups_of(source: Source, table: Table, names: list[str] | None) -> list[RowGroup]:
    check_source(source, table)
    where = str(source.path)
    if source.kind != "parquet":
        whole = read_source(source, table, names).combine_chunks()
        return [RowGroup(whole.num_rows, lambda: whole)]
    try:
        with pq.ParquetFile(source.path) as file:
            check_version(file.schema_arrow.metadata, where, table)
            present = _present(file.schema_arrow, table, names, where)
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise broken_parquet(source.path, error) from error

    def load(index: int) -> pa.Table:
        try:
            with pq.ParquetFile(source.path, page_checksum_verification=True) as file:
                data = file.read_row_group(index, columns=present)
                _refuse_short(where, data.num_rows, sizes[index])
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise broken_parquet(source.path, error) from error
        return _shape(data, table, present, where).combine_chunks()

    return [RowGroup(rows, lambda i=i: load(i)) for i, rows in enumerate(sizes)]  # type: ignore[misc]  # as in loading: a default


def _cache_of(source: Source, table: Table) -> Path:
    stat = source.path.stat()
    made_from = f"{source.path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()
    folder = source.path.parent
    name = f".{source.path.name}.arrow"
    if not os.access(folder, os.W_OK):
        folder = Path(tempfile.gettempdir())
        name = f"gymdata-{xxhash.xxh3_64_hexdigest(str(source.path.resolve()).encode())}.arrow"
    cache = folder / name
    if not (cache.is_file() and _is_made_from(cache, made_from)):
        # Several processes of one training come here at once: the first makes it for all.
        with writing(cache, wait=True):
            if not (cache.is_file() and _is_made_from(cache, made_from)):
                _build(source, table, cache, made_from)
    return cache


def _is_made_from(cache: Path, made_from: bytes) -> bool:
    try:
        with pa.memory_map(str(cache)) as mapped:
            return bool((pa.ipc.open_file(mapped).schema.metadata or {}).get(_MADE_FROM) == made_from)
    except (pa.ArrowException, OSError):
        return False


def _build(source: Source, table: Table, cache: Path, made_from: bytes) -> None:
    groups = _groups_of(source, table, None)
    with replacing(cache) as temporary:
        first = groups[0].load() if groups else table.schema.empty_table()
        schema = first.schema.with_metadata({**table.metadata, _MADE_FROM: made_from})
        with pa.ipc.new_file(temporary, schema) as writer:
            for index in range(len(groups)):
                data = first if index == 0 else groups[index].load()
                for batch in data.to_batches():
                    writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
