"""Reading and writing tables as Parquet and JSON lines.

Invariants: both formats hold the same columns, and converting there and back changes nothing; a file is written
under a temporary name and appears whole; what is read has exactly the types of its schema, or the error names the file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from gymdata.errors import DataError, UsageError
from gymdata.rollouts.schema import ROLLOUTS, TABLES, Table
from gymdata.store.columns import Batch, Fault, Misfit, Row, misfitting, parts
from gymdata.store.formats import format_of, tables_in
from gymdata.store.journal import Line, lines_of
from gymdata.store.lines import RepeatedKeyError, decode, decode_row
from gymdata.store.lock import is_held
from gymdata.store.parquet_rows import parquet_parts
from gymdata.store.paths import RUN_JSON, Source, read_facts, resolve, sealed
from gymdata.store.reading import check_source, report_lines, warn
from gymdata.store.run_json import replacing
from gymdata.store.sinks import JsonLinesSink, ParquetSink

#: JSON rows are parsed and turned into columns this many bytes at a time: Python objects take ten times as much.
PARSE_BYTES = 8 << 20
_BATCH_ROWS = 1 << 16


def read_table(path: str | Path, table: Table = ROLLOUTS, columns: Sequence[str] | None = None) -> pa.Table:
    """All rows of ``table`` under a path argument (see ``resolve``); a run's rows are its sealed and journaled ones.

    ``columns`` limits and orders the columns. A run without rows gives an empty table. Raises DataError for a missing,
    empty, broken or newer file, or one that holds something else.
    """
    names = chosen_columns(table, columns)
    tables = [read_source(source, table, names) for source in files_of(path, table)]
    tables = tables or [_without_rows(table, names or table.required())]
    joined = pa.concat_tables(tables, promote_options="default") if len(tables) > 1 else tables[0]
    return joined.replace_schema_metadata(table.metadata)


def _without_rows(table: Table, names: Sequence[str]) -> pa.Table:
    # Not ``schema.empty_table()``, which imports pandas, if it is installed.
    return pa.Table.from_batches([], schema=pa.schema([table.schema.field(n) for n in names], metadata=table.metadata))


def scan_batches(
    path: str | Path, table: Table = ROLLOUTS, columns: Sequence[str] | None = None, batch_size: int = _BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """The rows of ``read_table`` as a stream of batches of at most ``batch_size`` rows; memory does not grow with the
    file. Files may differ in optional columns, so batches may."""
    names = chosen_columns(table, columns)
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
    """Whether a file holds any row, read little further than its first. Raises DataError as ``read_table``, but not for an
    empty file."""
    check_source(source.path)
    return next(sound_batches(batches(source, table, table.schema.names[:1], 1)), None) is not None


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
            raise DataError.other_table(path, next(iter(tables_in(path)), content), table.name)
    return files


def shaped(data: pa.Table, table: Table) -> pa.Table:
    """``data``, which was made here, with the types of ``table`` and its columns in their order."""
    columns = sorted(data.column_names, key=table.schema.names.index)
    return data.select(columns).cast(_without_rows(table, columns).schema)


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


def row_parts(
    rows: Iterable[tuple[int, Any, int]], table: Table, names: Sequence[str], where: str
) -> Iterator[Batch | Fault]:
    """Batches from (line, parsed row, bytes of JSON), each from about 8 MB of JSON, after the faults of rows among them that
    do not fit."""
    yield from _built((Row(n, *row) for n, row in enumerate(rows)), table, names, where)


def chosen_columns(table: Table, columns: Sequence[str] | None) -> list[str] | None:
    if columns is None:
        return None
    for name in columns:
        if name not in table.schema.names:
            raise UsageError.unknown_choice(f"column of {table.name}", name, table.schema.names)
    return list(columns)


def read_source(source: Source, table: Table, names: list[str] | None) -> pa.Table:
    """All rows of one file. Raises as ``read_table``."""
    batches = list(scan_source(source, table, names))
    return pa.Table.from_batches(batches) if batches else _without_rows(table, names or table.required())


def scan_source(
    source: Source,
    table: Table,
    names: Sequence[str] | None,
    batch_size: int = _BATCH_ROWS,
    *,
    threads: bool = True,
) -> Iterator[pa.RecordBatch]:
    """The rows of one file in batches. Fields that the table is ``without`` are not read from Parquet. Lines that are
    damaged are left out and reported. Raises DataError for any other fault. ``threads``: as for ``batches``."""
    check_source(source.path)
    whole = TABLES.get(table.name, table)
    empty = source.kind == "jsonl"
    for batch in sound_batches(batches(source, whole, names, batch_size, read=table, threads=threads), source):
        empty = False
        yield batch
    if empty:
        raise DataError.empty(source.path, f"rows of {table.name}")


def sound_batches(parts: Iterable[Batch | Fault], source: Source | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of what ``batches`` gives; raises DataError for the first that does not fit. Damaged lines are reported where
    ``source`` is given."""
    damaged = list[tuple[int, int | None]]()
    try:
        for part in parts:
            if isinstance(part, Batch):
                yield part.data
            elif part.kind == "damaged":
                damaged.append((part.line or 0, part.offset))
            elif part.kind != "torn":
                raise part.error()
            elif source is not None and not is_held(source.path.parent.parent):
                # While a run is written, its last line may be incomplete.
                where = f"{source.path}: its last line is torn (byte {part.offset:,})"
                warn(f"{where}: a writer was killed; the same `gymdata collect` command samples that rollout again")
    finally:
        if source is not None:
            why = "their checksums do not match; `gymdata validate` shows them"
            report_lines(source.path, damaged, "row", why)


def batches(
    source: Source,
    table: Table,
    names: Sequence[str] | None = None,
    batch_size: int = _BATCH_ROWS,
    *,
    read: Table | None = None,
    threads: bool = True,
) -> Iterator[Batch | Fault]:
    """The rows of one file of any form in their order, and what is wrong with those that are in no batch, before others of
    about their place.

    ``names``: the columns that are needed; None: the file must have all that ``table`` cannot do without. ``read``: the
    part of ``table`` that is wanted, all when None; Parquet is read no further, other rows have to fit as a whole.
    Without ``threads`` a batch is decoded by the thread that reads it, when it reads it, so it is in that core's caches:
    less CPU time, slightly more wall time.
    """
    if source.kind == "parquet":
        yield from parquet_parts(source.path, table, read or table, names, batch_size, threads=threads)
        return
    where = str(source.path)
    rows = _rows(source, table)
    try:
        first = next(rows, None)
    except FileNotFoundError:
        # Sealed since the folder was listed: the part holds the same rows.
        if (its_part := sealed(source)) is source:
            raise DataError.missing_path(source.path) from None
        yield from batches(its_part, table, names, batch_size, read=read, threads=threads)
        return
    if first is None:
        return
    rows = chain([first], rows)
    if (columns := names) is None:
        # The first row says which optional columns the file has.
        has = first.value if isinstance(first, Row) and isinstance(first.value, dict) else {}
        columns = [n for n in table.schema.names if n not in table.optional or n in has]
        rows = _refusing(rows, sorted(table.optional.difference(columns)), table, where)
    for part in _built(rows, table, columns, where):
        yield from part.slices(batch_size) if isinstance(part, Batch) else (part,)


def _built(rows: Iterable[Row | Fault], table: Table, columns: Sequence[str], where: str) -> Iterator[Batch | Fault]:
    """Rows as batches, each from about 8 MB of JSON, after the faults among them."""
    held, faults, size = list[Row](), list[Fault](), 0

    def flushed() -> list[Batch | Fault]:
        found = [*faults, *(parts(held, table, columns, where) if held else ())]
        return sorted(found, key=lambda part: (isinstance(part, Batch), part.row))

    for row in rows:
        if isinstance(row, Fault):
            faults.append(row)
            continue
        held.append(row)
        size += row.size
        if size >= PARSE_BYTES or len(held) >= _BATCH_ROWS:
            yield from flushed()
            held, faults, size = [], [], 0
    yield from flushed()


def _refusing(rows: Iterable[Row | Fault], lacking: Collection[str], table: Table, where: str) -> Iterator[Row | Fault]:
    """``rows``; a fault for one with a value in a column that the first row of its file lacks: its values would be lost."""
    for row in rows:
        of = row.value if isinstance(row, Row) and isinstance(row.value, dict) else {}
        name = next((name for name in lacking if of.get(name) is not None), None)
        if name is None or isinstance(row, Fault):
            yield row
        else:
            expected = "none, as the first row has no such column: it is in all rows of a file, or in none"
            yield misfitting(row, Misfit((name,), expected, "a value"), table, where)


def _rows(source: Source, table: Table) -> Iterator[Row | Fault]:
    """The rows of a file in our format, or in a foreign one that holds rollouts."""
    foreign = format_of(source)
    if foreign is not None and not foreign.read_in_place:
        raise foreign.refused(source, table.name)
    if foreign is not None and table.name == ROLLOUTS.name:
        for n, row in enumerate(foreign.rollouts(source)):
            yield Row(n, n + 1, row, 2000 + 12 * (row["n_context_tokens"] + row["n_generated_tokens"]))
        return
    where, n = str(source.path), -1
    try:
        for n, line in enumerate(lines_of(source)):
            yield _row(n, line, table, where)
    except DataError as error:
        yield Fault.of_file(error, n + 1, where, table)


def _row(number: int, line: Line, table: Table, where: str) -> Row | Fault:
    if line.body is None:
        at = "" if line.offset is None else f" at byte {line.offset}"
        if line.closed:
            detail = f"damaged line{at}: its checksum does not match"
            return Fault("damaged", "S101", number, where, table, detail, line.number, line.offset)
        # A writer was killed, or is writing now. Nothing that was whole is lost.
        detail = f"torn last line{at}; resuming the run cuts it off"
        return Fault("torn", "S101", number, where, table, detail, line.number, line.offset)
    try:
        return Row(number, line.number, decode_row(line.body), len(line.body))
    except RepeatedKeyError as error:
        code, what = "S102", str(error)
        found, value = Misfit((error.args[0],), "one", "two values"), decode(line.body)
    except (ValueError, RecursionError) as error:
        code, what = "S101", f"not JSON: {str(error)[:200]}"
        found, value = Misfit((), "a row", f"a line that is not JSON ({error})"), None
    return Fault("row", code, number, where, table, what, line.number, misfit=found, value=value)
