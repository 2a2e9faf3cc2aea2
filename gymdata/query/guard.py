"""Restrictions on SQL: one statement that reads.

Invariants: a statement that is not one SELECT is refused before it runs; once a connection is locked, SQL reaches no
file, no network and no setting.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gymdata.errors import UsageError

if TYPE_CHECKING:
    import duckdb


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one statement; None is no bound. ``memory`` in bytes, of the process that runs it (0: half of the
    machine's): DuckDB's buffers take half of it, and spill what is larger to ``spill``, a folder for this alone, because
    DuckDB lets SQL read everything in it (none: nothing is spilled)."""

    seconds: float | None = None
    memory: int = 0
    threads: int | None = None
    spill: str = ""


def check_statement(con: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Raises UsageError unless ``sql`` is one statement that only reads."""
    import duckdb

    try:
        sql.encode()
    except UnicodeEncodeError as error:
        raise UsageError.bad_value("SQL", ascii(sql[error.start : error.start + 1]), "text in UTF-8") from error
    statements = con.extract_statements(sql)
    if len(statements) != 1:
        raise UsageError.bad_value("SQL", f"{len(statements)} statements", "one SELECT")
    try:
        kind = statements[0].type
    except ValueError:
        # DuckDB's bindings do not know all of its statements.
        raise UsageError(
            "SQL: got a statement that is no SELECT: query only reads",
            hint="`-o FILE.parquet` writes the result of a SELECT",
        ) from None
    explained = re.sub(r"^\s*explain(\s+analyze)?\s+", "", statements[0].query, flags=re.IGNORECASE)
    if kind == duckdb.StatementType.EXPLAIN and explained != statements[0].query:
        check_statement(con, explained)
        return
    pivots = kind == duckdb.StatementType.MULTI and re.match(r"\s*(pivot|with|from|select)\b", sql, re.IGNORECASE)
    if kind != duckdb.StatementType.SELECT and not pivots:
        raise UsageError(
            f"SQL: got a statement of kind {kind.name}, expected a SELECT: query only reads",
            hint="`-o FILE.parquet` writes the result of a SELECT",
        )


def lock(con: duckdb.DuckDBPyConnection, limits: Limits = Limits()) -> None:
    """From now on SQL on ``con`` can only read what is registered, and cannot change settings. The bounds on memory and
    threads hold."""
    if limits.memory:
        con.execute(f"SET memory_limit='{limits.memory // 2048}KiB'")
    if limits.threads is not None:
        con.execute(f"SET threads={limits.threads}")
    con.execute("SET enable_external_access=false")
    con.execute("SET lock_configuration=true")
