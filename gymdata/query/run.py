"""``gymdata query``: read-only SQL over runs and files.

Invariants: the statement can only read, and only the given files; an error in the SQL lists the views and columns that
exist.
"""

from __future__ import annotations

import contextlib
import difflib
import filecmp
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from gymdata.errors import DataError, GymdataError, StoreError, UsageError, counted
from gymdata.public import path_of, wrong_argument
from gymdata.query.guard import Limits, check_statement, stopping_after
from gymdata.query.types import json_value, printable, python_values
from gymdata.query.views import Views, find_files
from gymdata.store.paths import beside, local_output
from gymdata.store.stage_output import refuse_other_kind

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

_SUFFIXES = (".parquet", ".csv", ".jsonl")
#: The commands that write the tables that not every run has.
_WRITERS = {
    "scores": "gymdata score",
    "comparisons": "gymdata judge",
    "pairs": "gymdata pairs",
    "experiences": "gymdata experience",
    "audit": "gymdata audit --write-as ref_logprobs",
    "annotations": "gymdata train-rl --annotate",
}


def query(sql: str, *paths: str | Path) -> pa.Table:
    """The result of one SELECT over the files under ``paths``, as an Arrow table.

    Views: rollouts (with a column ``reward_NAME`` for each named reward), turns (with ``prompt_token_ids``), messages,
    failures, and pairs, scores, comparisons, experiences, violations, audit, annotations where there are such files.
    ``paths``: run folders, stage folders, Parquet or JSON lines files, globs. Raises UsageError for SQL that is wrong or
    does more than read.
    """
    if not isinstance(sql, str):
        raise wrong_argument(sql, "query", "one SELECT as a string, then the paths that it reads")
    if not paths:
        raise UsageError(
            "gymdata.query: got no paths, expected the files that the SELECT reads", hint="query(sql, path)"
        )
    with run_query(sql, *(path_of(path, "query") for path in paths)) as reader:
        return reader.read_all()


@contextlib.contextmanager
def run_query(
    sql: str, *paths: str | Path, as_text: bool = False, limits: Limits = Limits()
) -> Iterator[pa.RecordBatchReader]:
    """Like ``query``, but a stream of record batches, for results that need not fit into memory.

    ``as_text``: values of types that JSON and CSV have no form for are DuckDB's text for them. ``limits``: time, until the
    block is left, and memory.
    """
    import duckdb

    with Views(find_files(paths), limits) as views, stopping_after(views.con, limits.seconds) as clock:
        try:
            check_statement(views.con, sql)
            views.prepare(sql)
            result = views.con.sql(sql)
            if result is None:
                raise UsageError("SQL: the statement has no result", hint="query takes one SELECT")
            names = result.columns
            reader = (_with_text(views.con, sql, result) if as_text else result).to_arrow_reader()
            try:
                yield _named_apart(reader, names)
            finally:
                reader.close()
        except duckdb.Error as error:
            raise _over_time(limits) if clock.ran_out else _explain(error, views) from error
        except OSError as error:
            # What DuckDB raises while batches are fetched arrives as Arrow's OSError, which has no errno; a real one
            # (a closed pipe, a full disk) is not about the SQL.
            if error.errno is not None:
                raise
            if clock.ran_out:
                raise _over_time(limits) from error
            raise views.fault or _unread(error, views) or UsageError(f"SQL: {_first_line(error)}") from error


def _over_time(limits: Limits) -> UsageError:
    return UsageError(f"SQL: took longer than {limits.seconds:g} s", hint="add a LIMIT, or read fewer columns")


def _with_text(con: duckdb.DuckDBPyConnection, sql: str, result: duckdb.DuckDBPyRelation) -> duckdb.DuckDBPyRelation:
    """``result`` with the columns cast whose types cannot be printed. They are named by position."""
    casts = printable(result.types)
    if not any(casts):
        return result
    numbered = [f"c{index}" for index in range(len(casts))]
    shown = ", ".join(
        name if cast is None else f"CAST({name} AS {cast}) AS {name}"
        for name, cast in zip(numbered, casts, strict=True)
    )
    # A comment may end the statement.
    return con.sql(f"SELECT {shown} FROM (\n{sql.strip().rstrip(';')}\n) AS t({', '.join(numbered)})")


def _named_apart(reader: pa.RecordBatchReader, wanted: Sequence[str]) -> pa.RecordBatchReader:
    """The columns' names; those of one name as ``a`` and ``a_1``: a row that is an object would keep one of them only."""
    import pyarrow as pa

    names: list[str] = []
    for name in wanted:
        free = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(1)))
        names.append(next(one for one in free if one not in names))
    if names == reader.schema.names:
        return reader
    schema = pa.schema([field.with_name(name) for field, name in zip(reader.schema, names, strict=True)])
    renamed = (pa.RecordBatch.from_arrays(batch.columns, schema=schema) for batch in reader)
    return pa.RecordBatchReader.from_batches(schema, renamed)


def _refuse_unwritable(schema: pa.Schema) -> None:
    """Raises UsageError for a column whose type Parquet has no form for."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for field in schema:
        try:
            pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])).close()
        except pa.ArrowNotImplementedError as error:
            raise UsageError(
                f"column {field.name!r} is {field.type}, which Parquet has no form for",
                hint=f"cast it in the SELECT: {field.name}::VARCHAR",
            ) from error


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


def write_result(reader: pa.RecordBatchReader, target: str | Path, *, overwrite: bool = False) -> int:
    """Write a result to a .parquet, .csv or .jsonl file that appears whole. Returns the number of rows.

    Raises StoreError for a file that is there and has something else, without ``overwrite``.
    """
    from gymdata.store.run_json import replacing

    path = Path(target)
    if path.suffix == ".parquet":
        _refuse_unwritable(reader.schema)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        rows = _write(reader, temporary, path.suffix)
        # The same query may be run again; nothing records what any other file is.
        if not overwrite and path.exists() and not filecmp.cmp(path, temporary, shallow=False):
            raise StoreError.not_described(path)
    return rows


def _write(reader: pa.RecordBatchReader, path: Path, suffix: str) -> int:
    if suffix == ".parquet":
        return _write_parquet(reader, path)
    with path.open("w", encoding="utf-8", newline="") as file:
        return write_text(reader, file, "csv" if suffix == ".csv" else "jsonl")


def _write_parquet(reader: pa.RecordBatchReader, path: Path) -> int:
    import pyarrow.parquet as pq

    rows = 0
    with pq.ParquetWriter(path.absolute(), reader.schema, compression="zstd", compression_level=1) as writer:
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
        columns = [python_values(column) for column in batch.columns]
        for row in zip(*columns, strict=True):
            if kind == "csv":
                table.writerow(
                    [json.dumps(json_value(v), default=str) if isinstance(v, (list, dict)) else v for v in row]
                )
            else:
                write(encode_any(json_value(dict(zip(names, row, strict=True)))).decode() + "\n")
        rows += batch.num_rows
    return rows


def _explain(error: duckdb.Error, views: Views) -> GymdataError:
    import duckdb

    if views.fault is not None:
        return views.fault
    message = _first_line(error)
    if isinstance(error, duckdb.PermissionException):
        return UsageError(f"SQL: {message}", hint="a query reads only the files that are given after it")
    if (unread := _unread(error, views)) is not None:
        return unread
    if isinstance(error, duckdb.IOException):
        return DataError(f"SQL: {message}")
    # The list of views helps with an unknown name, not with a syntax error.
    if not isinstance(error, (duckdb.BinderException, duckdb.CatalogException)):
        return UsageError(f"SQL: {message}")
    try:
        known = views.columns()
    except duckdb.Error:
        # A file whose columns do not fit the views.
        return UsageError(f"SQL: {message}")
    missing = re.search(r"(?:named?|column|with name) \"?([\w.]+)\"? ?(?:does not exist|not found|!)", message)
    name = missing[1].rpartition(".")[2] if missing else ""
    words = [*known, *(column for columns in known.values() for column in columns)]
    near = difflib.get_close_matches(name, words, n=1, cutoff=0.6) if name else []
    meant = {view: columns for view, columns in known.items() if {view, *columns}.intersection(near)} or known
    listing = "\n".join(f"  {view}: {', '.join(columns)}" for view, columns in meant.items())
    others = [view for view in known if view not in meant]
    listing += f"\n  other tables: {', '.join(others)}" if others else ""
    lead = f"did you mean {near[0]!r}? " if near else ""
    if of_text := re.match(r"Binder Error: Cannot extract field '(\w+)' from expression \"(task|extra)\"", message):
        # Written as in conditions.
        lead = f"{of_text[2]} is JSON text: {of_text[2]}->>'{of_text[1]}' is the text of a field; "
    if isinstance(error, duckdb.CatalogException) and name in _WRITERS:
        lead = f"`{_WRITERS[name]}` writes this table, which these files have not; "
    return UsageError(f"SQL: {message}", hint=f"{lead}there is to query:\n{listing}")


def _unread(error: BaseException, views: Views) -> DataError | None:
    """The error of the file that could not be read, when DuckDB failed on it: DuckDB's message has neither name nor
    reason."""
    return views.broken() if "stream" in str(error) or "page" in str(error) else None


def _first_line(error: BaseException) -> str:
    """DuckDB's message without the excerpt of the statement, which the user has just typed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def too_wide(value: object, most: int = 60) -> str | None:
    """A shortened form of a value that would flood a table, or None when it is short."""
    text = str(value)
    if len(text) <= most:
        return None
    count = f" ({counted(len(value), 'item')})" if isinstance(value, Sequence) and not isinstance(value, str) else ""
    return text[: most - len(count) - 1] + "…" + count
