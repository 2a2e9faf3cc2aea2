"""Restrictions on SQL: one statement that reads.

Invariants: a statement that is not one SELECT is refused before it runs; once a connection is locked, SQL reaches no
file but DuckDB's own for what does not fit in memory, no network and no setting.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gymdata.errors import UsageError

if TYPE_CHECKING:
    import duckdb


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


def lock(con: duckdb.DuckDBPyConnection) -> None:
    """From now on SQL on ``con`` can only read what is registered, and cannot change settings."""
    con.execute("SET enable_external_access=false")
    con.execute("SET lock_configuration=true")
