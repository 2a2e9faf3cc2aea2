"""``gymdata query``."""

from __future__ import annotations

import io
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gymdata.errors import UsageError, counted, printable

from .console import emit_json, facts, fits, grid, note, paragraphs, say, show, stdout
from .flags import Json, Overwrite

if TYPE_CHECKING:
    import pyarrow as pa

_Words = Annotated[
    list[str],
    typer.Argument(
        metavar="SQL PATH…", help="One SELECT, - (stdin) or :NAME (saved), and what it reads; in any order."
    ),
]
_Csv = Annotated[bool, typer.Option("--csv", help="Print CSV.")]
_Full = Annotated[bool, typer.Option("--full", help="Print whole values: conversations, lists of IDs.")]
_Database = Annotated[
    Path | None,
    typer.Option("--database", metavar="FILE.duckdb", help="Write the views to a file for any DuckDB client."),
]
_List = Annotated[bool, typer.Option("--list", help="List saved queries.")]
_Output = Annotated[Path | None, typer.Option("-o", "--output", help="Write to a .parquet, .csv or .jsonl file.")]
#: Significant digits of a float in a table; --full, --json, --csv and -o have all.
_DIGITS = 6
#: Longer tables are truncated.
_SHOWN = 1_000


def query(
    words: _Words = [],  # noqa: B006  # typer makes a list of its own
    csv: _Csv = False,
    output: _Output = None,
    overwrite: Overwrite = False,
    full: _Full = False,
    database: _Database = None,
    list_: _List = False,
    json: Json = False,
) -> None:
    """Tables: rollouts, turns, messages, failures, scores, comparisons, pairs, experiences, violations and audit.
    Read-only. find_ids(turns, [22, 426]) finds a sequence of token IDs.
    """
    from gymdata.commands.query.run import check_target, json_rows, write_result, write_text
    from gymdata.commands.query.statement import run_statement

    if csv + json + (output is not None) > 1:
        raise UsageError("--csv, --json and -o exclude each other", hint="-o FILE.csv writes CSV to a file")
    if list_:
        from gymdata.commands.query.saved import SAVED

        if json:
            emit_json({"saved": SAVED})
        for name, sql in SAVED.items() if not json else ():
            paragraphs(f":{name}\n{textwrap.indent(sql, '    ')}", 2)
        return
    if database is not None:
        from gymdata.commands.query.database import write_database

        if csv or json or full or output is not None or any(" " in word and not Path(word).exists() for word in words):
            hint = "leave out the SQL, --csv, --json, --full and -o"
            raise UsageError("--database writes views, no result", hint=hint)
        note(f"{', '.join(write_database(database, words, overwrite=overwrite))} in {database}")
        return
    sql, paths = _split_words(words)
    if output is not None:
        check_target(output, *paths)
    with run_statement(sql, paths, as_json=output is None or output.suffix != ".parquet") as reader:
        if output is not None:
            note(f"{counted(write_result(reader, output, overwrite=overwrite), 'row')} in {output}")
        elif csv:
            write_text(reader, _Printable() if stdout().isatty() else stdout(), "csv")
        elif json:
            names = reader.schema.names
            rows = [dict(zip(names, row, strict=True)) for row in json_rows(reader)]
            emit_json({"columns": names, "rows": rows, "row_count": len(rows)})
        elif full:
            _show_whole(reader)
        else:
            _show(reader)


class _Printable(io.TextIOBase):
    """The terminal, without the escape sequences that data may hold."""

    def write(self, text: str) -> int:
        return stdout().write(printable(text))


def _split_words(words: Sequence[str]) -> tuple[str, list[str]]:
    """The statement and the paths, which may come in either order. A word that is a file or folder is a path; of the
    others the first with a blank, ``-`` or ``:NAME`` is the statement."""
    from gymdata.commands.query.saved import saved
    from gymdata.store.fetch import is_url

    paths = [word for word in words if is_url(word) or os.path.exists(word)]  # noqa: PTH110 - Path.exists raises for a long SELECT
    rest = [word for word in words if word not in paths]
    statements = [word for word in rest if word == "-" or word.startswith(":") or any(c.isspace() for c in word)]
    if not statements and len(rest) == 1 and paths:
        statements = rest
    # The readers report a missing path.
    paths = [word for word in words if word not in statements]
    if len(statements) != 1:
        sql = "no SQL" if not statements else f"{len(statements)} statements"
        raise UsageError(f"got {sql}, expected one", hint='gymdata query "SELECT …" PATH, or --list for saved queries')
    if not paths:
        raise UsageError("no path given", hint='gymdata query "SELECT …" PATH')
    (statement,) = statements
    if statement.startswith(":"):
        statement = saved(statement)
    return sys.stdin.read() if statement == "-" else statement, paths


def _show_whole(reader: pa.RecordBatchReader) -> None:
    """Every value in full, one below the other; conversations message by message."""
    from gymdata.commands.query.run import json_rows

    for number, row in enumerate(json_rows(reader), 1):
        say(f"row {number:,}")
        for name, value in zip(reader.schema.names, row, strict=True):
            text = _whole(value, name)
            say(f"  {name}\n{textwrap.indent(text, '    ')}" if "\n" in text else f"  {name}  {text}")


def _whole(value: object, column: str) -> str:
    if not (isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value)):
        return repr(value) if isinstance(value, float) else show(value, column=column).replace("\\[", "[")
    parts = []
    for message in value:
        author = f" {message['name']}" if message.get("name") else ""
        texts = [str(message[key]) for key in ("reasoning", "content", "tool_calls") if message.get(key)]
        parts += [f"{message['role']}{author}:", *(textwrap.indent(text, "  ") for text in texts)]
    return "\n".join(parts)


def _show(reader: pa.RecordBatchReader) -> None:
    """As a table; on a terminal that it does not fit each row as a table of its own."""
    from gymdata.commands.query.run import json_rows, too_wide

    names, rows, total = reader.schema.names, list[list[object]](), 0
    for batch in reader:
        total += batch.num_rows
        rows += [[too_wide(v) or v for v in row] for row in json_rows([batch.slice(0, _SHOWN - len(rows))])]
    if not stdout().isatty() or fits(names, rows, digits=_DIGITS):
        grid(names, rows, digits=_DIGITS)
    elif not rows:
        note(f"no rows of {', '.join(names)}")
    else:
        for number, row in enumerate(rows, 1):
            facts(f"row {number:,}", zip(names, row, strict=True), digits=_DIGITS)
        if any("…" in str(value) for row in rows for value in row):
            note("values that end with … are cut: --json, --csv and -o hold them whole")
    if total > len(rows):
        note(f"{counted(total - len(rows), 'more row')}: add a LIMIT, or use --csv, --json or -o")
