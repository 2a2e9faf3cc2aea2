"""One SELECT over files, run by DuckDB in this process.

Invariants: the statement can only read, and only the given files; an error in the SQL lists the views and columns that
exist.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import duckdb
import pyarrow as pa

from gymdata.commands.query.guard import check_statement
from gymdata.commands.query.views import Views, find_files
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
    with Views(find_files(paths)) as views, ThreadPoolExecutor(1, "gymdata-query") as thread:

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
            raise _explain(error, views, sql) from error
        except OSError as error:
            # What DuckDB raises while batches are fetched arrives as Arrow's OSError, which has no errno; a real one
            # (a closed pipe, a full disk) is not about the SQL.
            if error.errno is not None:
                raise
            if re.search("out of memory|bad_alloc|malloc of", str(error), re.IGNORECASE):
                raise MemoryError(first_line(error)) from error
            raise views.fault or _unread(error, views) or UsageError(f"SQL: {first_line(error)}") from error


def _started(views: Views, sql: str, as_json: bool) -> pa.RecordBatchReader:
    check_statement(views.con, sql)
    views.prepare(sql)
    result = views.con.sql(sql)
    if result is None:
        raise UsageError("SQL: the statement has no result", hint="query takes one SELECT")
    # Columns of one name become ``a`` and ``a_1``: a row that is an object would keep one of them only.
    shown = "to_json(COLUMNS(*))" if as_json else "*"
    rows: Any = result.query("gymdata_result", f"SELECT {shown} FROM gymdata_result")
    reader: pa.RecordBatchReader = rows.to_arrow_reader(_TEXT_ROWS if as_json else _BATCH_ROWS)
    return reader


def _explain(error: duckdb.Error, views: Views, sql: str) -> GymdataError:
    if views.fault is not None:
        return views.fault
    message = first_line(error)
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
        by_view = views.columns()
    except duckdb.Error:
        # A file whose columns do not fit the views.
        return UsageError(f"SQL: {message}")
    missing = re.search(r"(?:named?|column|with name) \"?([\w.]+)\"? ?(?:does not exist|not found|!)", message)
    name = missing[1].rpartition(".")[2] if missing else ""
    # A column is missing in the views that the statement reads, a view among all.
    read = {view: columns for view, columns in by_view.items() if re.search(rf"\b{view}\b", sql, re.IGNORECASE)}
    elsewhere = isinstance(error, duckdb.CatalogException) or any(name in names for names in by_view.values())
    searched = by_view if elsewhere else read or by_view
    words = [*searched, *(column for columns in searched.values() for column in columns)]
    near = difflib.get_close_matches(name, words, n=1, cutoff=0.6) if name else []
    candidates = {view: names for view, names in searched.items() if {view, *names}.intersection(near)} or searched
    listing = "\n".join(f"  {view}: {', '.join(columns)}" for view, columns in candidates.items())
    if other_views := [view for view in by_view if view not in candidates]:
        listing += f"\n  other views: {', '.join(other_views)}"
    guess = f"did you mean {near[0]!r}? " if near else ""
    if name in near:
        return UsageError(f"SQL: {message}", hint=f"{name} is a column of {', '.join(candidates)}")
    if of_text := re.match(r"Binder Error: Cannot extract field '(\w+)' from expression \"(task|extra)\"", message):
        # Written as in conditions.
        guess = f"{of_text[2]} is JSON text: {of_text[2]}->>'{of_text[1]}' is the text of a field; "
    if isinstance(error, duckdb.CatalogException) and name in _WRITERS:
        guess = f"`{_WRITERS[name]}` writes this table, which these files have not; "
    return UsageError(f"SQL: {message}", hint=f"{guess}available views:\n{listing}")


def _unread(error: BaseException, views: Views) -> DataError | None:
    """The error of the file that could not be read, when DuckDB failed on it: DuckDB's message has neither name nor
    reason."""
    return views.broken() if "stream" in str(error) or "page" in str(error) else None
