"""Reading and writing tables as Parquet and JSON lines.

Invariants: both formats hold the same columns, and converting there and back changes nothing; a file is written
under a temporary name and appears whole; what is read has exactly the types of its schema, or the error names the file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gymdata.errors import DataError, UsageError, abridged, counted, plural
from gymdata.rollouts.schema import HASHES, PAIRS, ROLLOUTS, TABLES, Table, check_version
from gymdata.store.columns import build, content_hashes, other_rows, reshape, to_rows
from gymdata.store.formats import format_of, head
from gymdata.store.journal import lines_of
from gymdata.store.lines import RepeatedKeyError, decode, decode_row, encode, row_lines
from gymdata.store.lock import is_held
from gymdata.store.parquet import group_batches, opened_parquet, schema_of
from gymdata.store.paths import RUN_JSON, Source, read_facts, resolve, sealed
from gymdata.store.reading import check_source, report_lines, warn
from gymdata.store.run_json import replacing
from gymdata.workers.tuning import ahead

#: JSON rows are parsed and turned into columns this many bytes at a time: Python objects take ten times as much.
PARSE_BYTES = 8 << 20
_BATCH_ROWS = 1 << 16
#: Batches of a Parquet file that are decoded ahead of the reader.
_BATCHES_AHEAD = 2


def read_table(path: str | Path, table: Table = ROLLOUTS, columns: Sequence[str] | None = None) -> pa.Table:
    """All rows of ``table`` under a path argument (see ``resolve``); a run's rows are its sealed and journaled ones.

    ``columns`` limits and orders the columns. A run without rows gives an empty table. Raises DataError for a missing,
    empty, broken or newer file, or one that holds something else.
    """
    names = _chosen(table, columns)
    tables = [read_source(source, table, names) for source in files_of(path, table)]
    if not tables:
        column_names = names or table.required()
        schema = pa.schema([table.schema.field(n) for n in column_names], metadata=table.metadata)
        # Not ``schema.empty_table()``, which imports pandas, if it is installed.
        return pa.Table.from_batches([], schema=schema)
    joined = pa.concat_tables(tables, promote_options="default") if len(tables) > 1 else tables[0]
    return joined.replace_schema_metadata(table.metadata)


def scan_batches(
    path: str | Path, table: Table = ROLLOUTS, columns: Sequence[str] | None = None, batch_size: int = _BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """The rows of ``read_table`` as a stream of batches of at most ``batch_size`` rows; memory does not grow with the
    file. Files may differ in optional columns, so batches may."""
    names = _chosen(table, columns)
    for source in files_of(path, table):
        yield from scan_source(source, table, names, batch_size)


def read_coded(paths: Iterable[str | Path], table: Table, columns: Sequence[str], texts: Collection[str]) -> pa.Table:
    """``columns`` of all rows under ``paths``, those of ``texts`` as dictionaries, one for all rows: for texts that many of
    ten million rows share."""
    fields = [table.schema.field(name) for name in columns]
    schema = pa.schema([(f.name, pa.dictionary(pa.int32(), f.type) if f.name in texts else f.type) for f in fields])

    def coded(batch: pa.RecordBatch) -> pa.RecordBatch:
        pairs = zip(batch.columns, columns, strict=True)
        return pa.RecordBatch.from_arrays([c.dictionary_encode() if n in texts else c for c, n in pairs], schema=schema)

    batches = [coded(batch) for path in paths for batch in scan_batches(path, table, columns)]
    return pa.Table.from_batches(batches, schema).unify_dictionaries()


def has_rows(source: Source, table: Table) -> bool:
    """Whether a file holds any row, read no further than its first. Raises DataError as ``read_table``, of JSON lines only
    where the first row is one of another table."""
    if source.kind != "jsonl":
        return next(scan_source(source, table, [table.schema.names[0]], 1), None) is not None
    line = next(row_lines(source), None)
    if line is not None:
        with contextlib.suppress(ValueError):
            if (other := other_rows(decode(line[1]), table, str(source.path))) is not None:
                raise other
    return line is not None


#: What to do about a line that is no row.
_DAMAGED = "`gymdata validate` lists every fault, and its fix writes the rows that have none"
#: Tables that are given beside rollouts, as more columns of them.
_BESIDE = ("scores", "audit", "comparisons", "violations")


def files_of(path: str | Path, table: Table = ROLLOUTS) -> list[Source]:
    """``resolve`` for what is to be read: rollouts of a folder in which another command wrote something else are no empty
    list, but raise DataError."""
    files = resolve(path, table)
    folder = Path(path)
    if not files and table.name == ROLLOUTS.name and folder.is_dir() and (folder / RUN_JSON).is_file():
        facts = read_facts(folder / RUN_JSON)
        tables = facts.get("schemas")
        if isinstance(tables, dict) and tables.keys().isdisjoint({table.name, *_BESIDE}):
            content = f"the output of {facts.get('stage') or 'another command'}"
            raise DataError.other_table(path, held_instead(path, table) or content, table.name)
    return files


def holds_pairs(path: str | Path) -> bool:
    """Whether a path argument holds pairs, and no rollouts."""
    files = resolve(path, PAIRS)
    if Path(path).is_dir():
        return bool(files) and not resolve(path, ROLLOUTS)
    first = files[0] if files else None
    if first is None or first.kind == "parquet":
        return first is not None and "chosen" in schema_of(first.path).names
    row: Any = None
    with contextlib.suppress(ValueError):
        row = decode(next(iter(head(first)), b"null"))
    return isinstance(row, dict) and "chosen" in row


def held_instead(path: str | Path, table: Table) -> str | None:
    """The name of another table that a path argument holds instead of ``table``."""
    return next((name for name in TABLES if name != table.name and resolve(path, name)), None)


def write_table(data: pa.Table, path: str | Path, table: Table) -> Path:
    """Write ``data`` whole to ``path``, ``.parquet`` or ``.jsonl`` by its suffix. Returns the path.

    Raises DataError when ``data`` is not a ``table``, StoreError.from_os when the disk refuses.
    """
    target = Path(path)
    if target.suffix not in (".parquet", ".jsonl"):
        raise UsageError.bad_value("output file", target.name, "a name ending in .parquet or .jsonl")
    rows = shaped(data, table)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_batches(rows.to_batches(), target, table, rows.schema)
    return target


def shaped(data: pa.Table, table: Table) -> pa.Table:
    """``data`` with the types and order of ``table``, and the hashes that rollouts lack. Raises DataError when it is not a
    ``table``."""
    if table.name == ROLLOUTS.name and {"turns", *HASHES} <= set(data.column_names):
        lacking = [name for name in HASHES if data[name].null_count]
        hashes = content_hashes(data["turns"]) if lacking else {}
        for name in lacking:
            data = data.set_column(data.schema.get_field_index(name), name, hashes[name])
    return _shape(data, table, None, "table to write")


def write_batches(batches: Iterable[pa.RecordBatch], target: Path, table: Table, schema: pa.Schema) -> int:
    """Stream batches of one schema to a file that appears whole. Returns the number of rows."""
    with replacing(target) as temporary:
        return stream_batches(batches, temporary, target.suffix, table, schema)


def stream_batches(batches: Iterable[pa.RecordBatch], path: Path, suffix: str, table: Table, schema: pa.Schema) -> int:
    """Write batches to ``path`` itself, in the format of ``suffix``. Returns the number of rows."""
    rows = 0
    sink = ParquetSink(path, table, schema) if suffix == ".parquet" else JsonLinesSink(path)
    try:
        for batch in batches:
            sink.write(batch)
            rows += batch.num_rows
    finally:
        sink.close()
    return rows


def row_batches(rows: Iterable[tuple[int, Any, int]], table: Table, names: Sequence[str], where: str) -> Iterator[Any]:
    """Batches from (line, parsed row, bytes of JSON), each from about 8 MB of JSON."""
    source = iter(rows)
    for first in source:
        chunk, size = [first], first[2]
        while size < PARSE_BYTES and len(chunk) < _BATCH_ROWS:
            more = list(islice(source, 64 if size * 64 < PARSE_BYTES * len(chunk) else 1))
            if not more:
                break
            chunk += more
            size += sum(row[2] for row in more)
        yield build([row[1] for row in chunk], table, names, where, [row[0] for row in chunk])


class ParquetSink:
    """A Parquet file being written: the table's encodings, row groups of limited size, page checksums."""

    #: Largest row group: its tokens, its bytes in memory, and those of rows without tokens, which only bytes can bound.
    group_tokens = 4_000_000
    group_bytes = 128 << 20
    text_group_bytes = 8 << 20

    def __init__(self, path: Path, table: Table, schema: pa.Schema) -> None:
        leaves = _leaves(schema)
        # Token ids repeat over long distances, so they gain by a higher level; floats gain nothing.
        levels = {leaf: table.float_level if pa.types.is_float32(kind) else 1 for leaf, kind in leaves.items()}
        levels |= {leaf: table.id_level for leaf in leaves if leaf.endswith("_ids.list.element")}
        self._writer = pq.ParquetWriter(
            path.absolute(),  # pyarrow takes a relative name with a colon for a URL
            schema.with_metadata(table.metadata),
            compression="zstd",
            compression_level=levels,
            data_page_size=table.page_bytes,
            use_dictionary=[c for c in table.dictionary if c in leaves],
            use_byte_stream_split=[c for c in table.split if c in leaves],
            write_statistics=[c for c in leaves if "." not in c],
            write_page_checksum=True,
        )
        self._held: list[pa.RecordBatch] = []
        self._tokens = self._bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        tokens = tokens_of(batch)
        # Rows without tokens, or with long texts, would make row groups of any size.
        most = self.group_bytes if self._tokens or tokens.any() else self.text_group_bytes
        rows = max(1, batch.num_rows * most // max(1, batch.nbytes))
        for start in range(0, batch.num_rows, rows):
            piece = batch.slice(start, rows)
            if self._held and self._bytes + piece.nbytes > most:
                self._flush()
            self._add(piece, tokens[start : start + rows])

    def _add(self, batch: pa.RecordBatch, tokens: np.ndarray) -> None:
        sizes = np.cumsum(tokens)
        start, before = 0, 0
        while start < batch.num_rows:
            room = before + self.group_tokens - self._tokens
            stop = int(np.searchsorted(sizes, room, side="right"))
            if stop <= start and self._held:
                self._flush()
                continue
            stop = max(stop, start + 1)
            self._held.append(batch.slice(start, stop - start))
            self._bytes += self._held[-1].nbytes
            self._tokens += int(sizes[stop - 1]) - before
            start, before = stop, int(sizes[stop - 1])

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._held:
            group = pa.Table.from_batches(self._held)
            self._writer.write_table(group, row_group_size=group.num_rows)
        self._held, self._tokens, self._bytes = [], 0, 0


class JsonLinesSink:
    """A JSON lines file being written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, batch: pa.RecordBatch) -> None:
        for start in range(0, batch.num_rows, 1024):
            self._file.writelines(encode(row) + b"\n" for row in to_rows(batch.slice(start, 1024)))

    def close(self) -> None:
        self._file.close()


def _chosen(table: Table, columns: Sequence[str] | None) -> list[str] | None:
    if columns is None:
        return None
    for name in columns:
        if name not in table.schema.names:
            raise UsageError.unknown_choice(f"column of {table.name}", name, table.schema.names)
    return list(columns)


def read_source(source: Source, table: Table, names: list[str] | None) -> pa.Table:
    """All rows of one file. Raises as ``read_table``."""
    if batches := list(scan_source(source, table, names)):
        return pa.Table.from_batches(batches)
    stored = schema_of(source.path).names if source.kind == "parquet" else ()
    column_names = names or [name for name in table.schema.names if name not in table.optional or name in stored]
    return pa.schema([table.schema.field(n) for n in column_names], metadata=table.metadata).empty_table()


def scan_source(
    source: Source,
    table: Table,
    names: Sequence[str] | None,
    batch_size: int = _BATCH_ROWS,
    *,
    threads: bool = True,
) -> Iterator[pa.RecordBatch]:
    """The rows of one file in batches. Fields that the table is ``without`` are not read from Parquet.
    Without ``threads`` a batch is decoded by the thread that reads it, when it reads it, so it is in that core's caches:
    less CPU time, slightly more wall time."""
    check_source(source.path)
    if source.kind != "parquet":
        empty = True
        for batch in _scan_json(source, TABLES.get(table.name, table), names):
            empty = False
            for start in range(0, batch.num_rows, batch_size):
                yield batch.slice(start, batch_size)
        if empty and source.kind == "jsonl":
            raise DataError.empty(source.path, f"rows of {table.name}")
        return
    where = str(source.path)
    with opened_parquet(source.path) as file:
        check_version(file.schema_arrow.metadata, where, table)
        present = _present(file.schema_arrow, table, names, where)
        leaves = present if table is TABLES.get(table.name, table) else _known_leaves(file, present, table)
        read = (
            batch
            for index in range(file.num_row_groups)
            for batch in group_batches(file, source.path, index, batch_size, leaves, threads=threads)
        )
        # Closed before the file, because its thread may still be reading ahead.
        with contextlib.closing(ahead(read, _BATCHES_AHEAD) if threads else read) as batches:
            for batch in batches:
                if batch.num_rows:
                    yield from _shape(pa.Table.from_batches([batch]), table, names, where).to_batches()


def _known_leaves(file: pq.ParquetFile, columns: list[str], table: Table) -> list[str]:
    """The Parquet leaf columns of ``columns``, without fields of lists of objects that ``table`` does not have."""
    fields = {f.name: f.type.value_type for f in table.schema if pa.types.is_list(f.type)}
    structs = {name: {f.name for f in kind} for name, kind in fields.items() if pa.types.is_struct(kind)}
    # "turns.list.element.agent": other programs name the two levels between differently.
    paths = (file.schema.column(i).path.split(".") for i in range(len(file.schema)))
    return [
        ".".join(p) for p in paths if p[0] in columns and (p[0] not in structs or p[3:4] == [] or p[3] in structs[p[0]])
    ]


def _scan_json(source: Source, table: Table, names: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    where = str(source.path)
    try:
        rows = _rows(source, table)
        first = next(rows, None)
    except FileNotFoundError:
        # Sealed since the folder was listed: the part holds the same rows.
        if (part := sealed(source)) is not source:
            yield from scan_source(part, table, names, _BATCH_ROWS)
            return
        raise DataError.missing_path(source.path) from None
    if first is None:
        return
    columns = names
    if columns is None:
        # The first row says which optional columns the file has.
        has = first[1] if isinstance(first[1], dict) else {}
        columns = [n for n in table.schema.names if n not in table.optional or n in has]
        rows = _refusing(rows, sorted(table.optional.difference(columns)), where)
    yield from row_batches(chain([first], rows), table, columns, where)


def _refusing(
    rows: Iterator[tuple[int, Any, int]], lacking: Collection[str], where: str
) -> Iterator[tuple[int, Any, int]]:
    """``rows``; raises DataError for one with a value in a column that the first row of its file lacks: its values would be
    lost."""
    for row in rows:
        for name in lacking:
            if type(row[1]) is dict and row[1].get(name) is not None:
                hint = (
                    "a column is in all rows of a file, or in none: add it to the others, null where there is no value"
                )
                raise DataError.bad_row(
                    where, row[0], name, "a value", "none, as the first row has no such column", hint
                )
        yield row


def _rows(source: Source, table: Table) -> Iterator[tuple[int, Any, int]]:
    """(line, row, bytes) of a file in our format, or in a foreign one that holds rollouts."""
    foreign = format_of(source)
    if foreign is not None and not foreign.read_in_place:
        raise foreign.refused(source, table.name)
    if foreign is not None and table.name == ROLLOUTS.name:
        for number, row in enumerate(foreign.rollouts(source), 1):
            yield number, row, 2000 + 12 * (row["n_context_tokens"] + row["n_generated_tokens"])
        return
    yield from own_rows(source)


def own_rows(source: Source, *, report: bool = True) -> Iterator[tuple[int, Any, int]]:
    """(line, row, bytes) of a file of JSON lines in our format. Lines that are damaged are left out and reported.

    ``report``: false where ``repair`` has reported them already.
    """
    damaged = list[tuple[int, int | None]]()
    try:
        for line in lines_of(source):
            if line.body is not None:
                yield line.number, _decoded(source.path, line.number, line.body), len(line.body)
            elif line.closed:
                damaged.append((line.number, line.offset))
            elif report and not is_held(source.path.parent.parent):
                # While a run is written, its last line may be incomplete.
                where = f"{source.path}: its last line is torn (byte {line.offset:,})"
                warn(f"{where}: a writer was killed; the same `gymdata collect` command samples that rollout again")
    finally:
        if report:
            report_lines(source.path, damaged, "row", "their checksums do not match; `gymdata validate` shows them")


def _decoded(path: Path, number: int, body: bytes) -> Any:
    try:
        return decode_row(body)
    except RepeatedKeyError as error:
        raise DataError.bad_row(path, number, error.args[0], "two values", "one", _DAMAGED) from error
    except ValueError as error:
        raise DataError.bad_row(path, number, None, f"a line that is not JSON ({error})", "a row", _DAMAGED) from error


def _present(schema: pa.Schema, table: Table, names: Sequence[str] | None, where: str) -> list[str]:
    """The columns to read from a file, which must have all that the table cannot do without."""
    chosen = names if names is not None else table.schema.names
    missing = [n for n in chosen if n not in schema.names and n not in table.optional]
    if missing:
        raise DataError.missing_columns(where, table.name, missing, schema.names)
    return [n for n in chosen if n in schema.names]


def _shape(data: pa.Table, table: Table, names: Sequence[str] | None, where: str) -> pa.Table:
    """``data`` with the types, order and metadata of the schema; requested columns that are missing are null."""
    present = _present(data.schema, table, names, where)
    if names is None and (unknown := [c for c in data.column_names if c not in table.schema.names]):
        raise DataError(f"{where}: table {table.name} has no {plural(len(unknown), 'column')} {abridged(unknown)}")
    fields, columns = [], []
    for name in names if names is not None else [n for n in table.schema.names if n in present]:
        field = table.schema.field(name)
        fields.append(field)
        if name not in data.column_names:
            columns.append(pa.chunked_array([pa.nulls(data.num_rows, field.type)]))
            continue
        column = data.column(name)
        try:
            if column.type != field.type:
                column = pa.chunked_array([reshape(chunk, field.type) for chunk in column.chunks], field.type)
        except (pa.ArrowException, ValueError) as error:
            message = f"{where}: column {name!r} of {table.name}: got {column.type}, expected {field.type}: {error}"
            raise DataError(message) from error
        if not field.nullable and column.null_count:
            raise DataError(f"{where}: column {name!r} of {table.name} has {counted(column.null_count, 'null value')}")
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata=table.metadata))


def tokens_of(batch: pa.RecordBatch) -> np.ndarray:
    """Tokens in each row, int64: from the counts if the table has them, else the lengths of its id lists, else of its
    longest lists of numbers."""
    names = batch.schema.names
    if "n_context_tokens" in names:
        total = np.zeros(batch.num_rows, np.int64)
        for name in ("n_context_tokens", "n_generated_tokens"):
            total += batch.column(name).to_numpy(zero_copy_only=False)
        return total
    lists = {n: c for n, c in zip(names, batch.columns, strict=True) if pa.types.is_list(c.type)}
    total, longest = np.zeros(batch.num_rows, np.int64), np.zeros(batch.num_rows, np.int64)
    for name, column in lists.items():
        sizes = np.diff(column.offsets.to_numpy())
        if name.endswith("_ids"):
            total += sizes
        elif pa.types.is_floating(column.type.value_type):
            longest = np.maximum(longest, sizes)
    return total if any(name.endswith("_ids") for name in lists) else longest


def _leaves(schema: pa.Schema) -> dict[str, pa.DataType]:
    """Parquet column paths of a schema, and their types."""

    def walk(kind: pa.DataType, path: str) -> Iterator[tuple[str, pa.DataType]]:
        if pa.types.is_list(kind):
            yield from walk(kind.value_type, path + ".list.element")
        elif pa.types.is_struct(kind):
            for f in kind:
                yield from walk(f.type, f"{path}.{f.name}")
        else:
            yield path, kind

    return {leaf: kind for f in schema for leaf, kind in walk(f.type, f.name)}
