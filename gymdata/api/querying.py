"""``gymdata query``: read-only SQL over runs and files.

What always holds: the statement can only read, and only the given files; a mistake in the SQL is answered with what
there is to ask for.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from gymdata.adapters.duckdb_views import Views, check_statement, find_files
from gymdata.errors import DataError, GymdataError, UsageError
from gymdata.store.paths import beside, local_output
from gymdata.store.stage_output import refuse_other_kind

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

_SUFFIXES = (".parquet", ".csv", ".jsonl")
#: What writes the tables that not every run has.
_WRITERS = {
    "scores": "gymdata score",
    "comparisons": "gymdata judge",
    "pairs": "gymdata pairs",
    "experiences": "gymdata experience",
    "audit": "gymdata audit --write-as ref_logprobs",
}


def query(sql: str, *paths: str | Path) -> pa.Table:
    """The result of one SELECT over the files under ``paths``, as an Arrow table.

    Views: rollouts (with a column ``reward_NAME`` for each named reward), turns (with ``prompt_token_ids``), messages,
    failures, and pairs, scores, comparisons, experiences, violations, audit where there are such files. ``paths``: run
    folders, stage folders, Parquet or JSON lines files, globs. Raises UsageError for SQL that is wrong or does more than
    read.
    """
    with run_query(sql, *paths) as reader:
        return reader.read_all()


@contextlib.contextmanager
def run_query(sql: str, *paths: str | Path) -> Iterator[pa.RecordBatchReader]:
    """Like ``query``, but a stream of record batches, for results that need not fit into memory."""
    import duckdb

    with Views(find_files(paths)) as views:
        try:
            check_statement(views.con, sql)
            views.prepare(sql)
            yield _named_apart(views.con.sql(sql).to_arrow_reader())
        except duckdb.Error as error:
            raise _explain(error, views) from error
        except OSError as error:
            # What DuckDB raises while batches are fetched arrives as Arrow's OSError, which has no errno; a real one
            # (a closed pipe, a full disk) is not about the SQL.
            if error.errno is not None:
                raise
            raise views.fault or UsageError(f"SQL: {_first_line(error)}") from error


def _named_apart(reader: pa.RecordBatchReader) -> pa.RecordBatchReader:
    """Columns of one name as ``a`` and ``a_1``: a row that is an object would keep one of them only."""
    import pyarrow as pa

    names: list[str] = []
    for name in reader.schema.names:
        free = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(1)))
        names.append(next(one for one in free if one not in names))
    if names == reader.schema.names:
        return reader
    schema = pa.schema([field.with_name(name) for field, name in zip(reader.schema, names, strict=True)])
    renamed = (pa.RecordBatch.from_arrays(batch.columns, schema=schema) for batch in reader)
    return pa.RecordBatchReader.from_batches(schema, renamed)


def refuse_unwritable(schema: pa.Schema, kind: str) -> None:
    """Raises UsageError for a column whose type ``kind`` (json, csv, jsonl, parquet) has no form for."""
    import pyarrow as pa

    for field in schema:
        of_time = pa.types.is_interval(field.type)
        if of_time or (kind != "parquet" and pa.types.is_large_binary(field.type) | pa.types.is_binary(field.type)):
            what = "an INTERVAL" if of_time else "a BLOB"
            raise UsageError(
                f"column {field.name!r} is {what}, which {kind} has no form for", hint=f"cast it: {field.name}::VARCHAR"
            )


def check_target(target: str | Path, *paths: str | Path) -> None:
    """Raises UsageError unless a result of a query over ``paths`` may be written to ``target``."""
    path = local_output(target)
    if path.suffix not in _SUFFIXES:
        raise UsageError.bad_value("-o", path.name, f"a name ending in {', '.join(_SUFFIXES)}")
    sources = [s.path.resolve() for found in find_files(paths).by_table.values() for s in found]
    if path.resolve() in sources:
        raise UsageError(f"-o {path}: is one of the files that the query reads", hint="give another name")
    # A result has no run.json: what has one was written by another command.
    refuse_other_kind(beside(path), "query", [path.name])


def write_result(reader: pa.RecordBatchReader, target: str | Path) -> int:
    """Write a result to a .parquet, .csv or .jsonl file that appears whole. Returns the number of rows."""
    from gymdata.store.run_json import replacing

    path = Path(target)
    refuse_unwritable(reader.schema, path.suffix.removeprefix("."))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        if path.suffix == ".parquet":
            return _write_parquet(reader, temporary)
        with temporary.open("w", encoding="utf-8", newline="") as file:
            return write_text(reader, file, "csv" if path.suffix == ".csv" else "jsonl")


def _write_parquet(reader: pa.RecordBatchReader, path: Path) -> int:
    import pyarrow.parquet as pq

    rows = 0
    with pq.ParquetWriter(path, reader.schema, compression="zstd", compression_level=1) as writer:
        for batch in reader:
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows


def write_text(reader: pa.RecordBatchReader, file: TextIO, kind: str) -> int:
    """Write rows as CSV (nested values as JSON, nulls empty) or JSON lines to a text file. Returns how many."""
    import csv
    import json

    from gymdata.store.lines import encode_any

    write = file.write
    table = csv.writer(file, lineterminator="\n")
    names = reader.schema.names
    if kind == "csv":
        table.writerow(names)
    rows = 0
    for batch in reader:
        columns = [column.to_pylist() for column in batch.columns]
        for row in zip(*columns, strict=True):
            if kind == "csv":
                table.writerow([json.dumps(v, default=str) if isinstance(v, (list, dict)) else v for v in row])
            else:
                write(encode_any(dict(zip(names, row, strict=True))).decode() + "\n")
        rows += batch.num_rows
    return rows


def _explain(error: duckdb.Error, views: Views) -> GymdataError:
    import duckdb

    if views.fault is not None:
        return views.fault
    message = _first_line(error)
    if isinstance(error, duckdb.PermissionException):
        return UsageError(f"SQL: {message}", hint="a query reads only the files that are given after it")
    if isinstance(error, duckdb.IOException):
        return DataError(f"SQL: {message}")
    # What there is to ask for helps with a name that is not there, not with a word in the wrong place.
    if not isinstance(error, (duckdb.BinderException, duckdb.CatalogException)):
        return UsageError(f"SQL: {message}")
    known = views.columns()
    missing = re.search(r"(?:named?|column|with name) \"?([\w.]+)\"? ?(?:does not exist|not found|!)", message)
    name = missing[1].rpartition(".")[2] if missing else ""
    words = [*known, *(column for columns in known.values() for column in columns)]
    near = difflib.get_close_matches(name, words, n=1, cutoff=0.6) if name else []
    listing = "\n".join(f"  {view}: {', '.join(columns)}" for view, columns in known.items())
    lead = f"did you mean {near[0]!r}? " if near else ""
    if isinstance(error, duckdb.CatalogException) and name in _WRITERS:
        lead = f"`{_WRITERS[name]}` writes this table, which these files have not; "
    return UsageError(f"SQL: {message}", hint=f"{lead}there is to query:\n{listing}")


def _first_line(error: BaseException) -> str:
    """DuckDB's message without the excerpt of the statement, which the user has just typed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def too_wide(value: object, most: int = 60) -> str | None:
    """A shortened form of a value that would flood a table, or None when it is short."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) <= most:
        return None
    count = f" ({len(value):,} items)" if isinstance(value, Sequence) and not isinstance(value, str) else ""
    return text[: most - len(count) - 1] + "…" + count
