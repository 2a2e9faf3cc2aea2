"""One SELECT over files, run by DuckDB in this process.

Invariants: the statement can only read, and only the given files; an error in the SQL says which views there are.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import duckdb
import pyarrow as pa

from gymdata.commands.query.views import Views, error_message, find_files, open_views
from gymdata.errors import DataError, GymdataError, UsageError, first_line

T = TypeVar("T")
#: Rows that DuckDB collects for one batch, and for one of JSON, which takes more room.
_BATCH_ROWS, _TEXT_ROWS = 122_880, 2_048
#: The commands that write the tables that not every run has.
_WRITERS = {
    "scores": "gymdata score",
    "comparisons": "gymdata judge",
    "pairs": "gymdata pairs",
    "experiences": "gymdata experience",
    "audit": "gymdata audit --write-as ref_logprobs",
}


@contextlib.contextmanager
def run_statement(sql: str, paths: Sequence[str], *, as_json: bool = False) -> Iterator[pa.RecordBatchReader]:
    """The batches of the result. Raises MemoryError for a statement that needs more than there is.

    ``as_json``: each value is the text of its JSON, as DuckDB writes it, and a missing one null.
    """
    with open_views(find_files(paths)) as views, ThreadPoolExecutor(1, "gymdata-query") as thread:

        def run(work: Callable[[], T]) -> T:
            # In a thread: neither DuckDB nor Arrow hears Ctrl-C while it reads.
            future = thread.submit(work)
            try:
                return future.result()
            except KeyboardInterrupt:
                # Again and again: between two statements DuckDB does not notice.
                while wait([future], 0.1).not_done:
                    views.con.interrupt()
                raise

        try:
            reader = run(lambda: _started(views, sql, as_json))
            try:
                batches = iter(lambda: run(lambda: next(reader, None)), None)
                yield pa.RecordBatchReader.from_batches(reader.schema, batches)
            finally:
                reader.close()
        except duckdb.OutOfMemoryException as error:
            raise MemoryError(first_line(error)) from error
        except duckdb.Error as error:
            raise _explain(error, views) from error
        except OSError as error:
            # What DuckDB raises while batches are fetched arrives as Arrow's OSError, which has no errno; a real one
            # (a closed pipe, a full disk) is not about the SQL.
            if error.errno is not None:
                raise
            if re.search("out of memory|bad_alloc|malloc of", str(error), re.IGNORECASE):
                raise MemoryError(first_line(error)) from error
            raise views.fault or UsageError(f"SQL: {first_line(error)}") from error


def _started(views: Views, sql: str, as_json: bool) -> pa.RecordBatchReader:
    _check(views.con, sql)
    views.prepare(sql)
    result = views.con.sql(sql)
    if result is None:
        raise UsageError("SQL: the statement has no result", hint="query takes one SELECT")
    # Columns of one name become ``a`` and ``a_1``: a row that is an object would keep one of them only.
    shown = "to_json(COLUMNS(*))" if as_json else "*"
    rows: Any = result.query("gymdata_result", f"SELECT {shown} FROM gymdata_result")
    reader: pa.RecordBatchReader = rows.to_arrow_reader(_TEXT_ROWS if as_json else _BATCH_ROWS)
    return reader


def _check(con: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Raises UsageError unless ``sql`` is one statement that only reads."""
    try:
        sql.encode()
    except UnicodeEncodeError as error:
        raise UsageError.bad_value("SQL", ascii(sql[error.start : error.start + 1]), "text in UTF-8") from error
    statements = con.extract_statements(sql)
    if len(statements) != 1:
        raise UsageError.bad_value("SQL", f"{len(statements)} statements", "one SELECT")
    kinds = duckdb.StatementType
    with contextlib.suppress(ValueError):  # DuckDB's bindings do not know all of its statements
        if statements[0].type in (kinds.SELECT, kinds.EXPLAIN, kinds.MULTI):  # a PIVOT is several
            return
    hint = "`-o FILE.parquet` writes the result of a SELECT"
    raise UsageError("SQL: got another statement, expected a SELECT: query only reads", hint=hint)


def _explain(error: duckdb.Error, views: Views) -> GymdataError:
    if views.fault is not None:
        return views.fault
    message, hint = error_message(error), None
    if isinstance(error, duckdb.PermissionException):
        hint = "a query reads only the files that are given after it"
    elif isinstance(error, duckdb.IOException):
        return DataError(f"SQL: {message}")
    elif isinstance(error, (duckdb.BinderException, duckdb.CatalogException)):
        missing = next((name for name in _WRITERS if f"with name {name} does not exist" in message), None)
        written = f"`{_WRITERS[missing]}` writes this table, which these files have not; " if missing else ""
        described = f"`DESCRIBE {views.names[0]}` lists its columns; of JSON text, task->>'level' is a field"
        hint = f"{written}views: {', '.join(views.names)}; {described}"
    return UsageError(f"SQL: {message}", hint=hint)
