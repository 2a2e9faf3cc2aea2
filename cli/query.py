"""``gymdata query``."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import emit_json, fits, grid, note, records, room_beside, say, show
from .flags import Json

if TYPE_CHECKING:
    import pyarrow as pa

_Sql = Annotated[str, typer.Argument(metavar="SQL", help="One SELECT, in DuckDB's SQL.")]
_Paths = Annotated[list[Path], typer.Argument(metavar="PATH…", help="Run folders, stage folders, files, globs.")]
_Csv = Annotated[bool, typer.Option("--csv", help="Print CSV.")]
_Output = Annotated[Path | None, typer.Option("-o", "--output", help="Write to a .parquet, .csv or .jsonl file.")]
#: Longer tables are truncated.
_SHOWN = 1_000


def query(
    sql: _Sql,
    paths: _Paths,
    csv: _Csv = False,
    output: _Output = None,
    json: Json = False,
) -> None:
    """Tables: rollouts, turns, messages, pairs, failures and scores. Read-only."""
    from gymdata.errors import UsageError
    from gymdata.query.run import check_target, run_query, write_result, write_text
    from gymdata.query.types import json_value, python_values

    if csv + json + (output is not None) > 1:
        raise UsageError("--csv, --json and -o exclude each other", hint="-o FILE.csv writes CSV to a file")
    if os.path.exists(sql):  # noqa: PTH110 - Path.exists raises for a long SELECT
        raise UsageError.bad_value(
            "SQL", sql, "a SELECT; this is a path", hint=f'the SQL stands first: gymdata query "SELECT …" {sql}'
        )
    if output is not None:
        check_target(output, *paths)
    with run_query(sql, *paths, as_text=output is None or output.suffix != ".parquet") as reader:
        if output is not None:
            note(f"{write_result(reader, output):,} rows in {output}")
        elif csv:
            write_text(reader, sys.stdout, "csv")
        elif json:
            names = reader.schema.names
            columns = ([python_values(column) for column in batch.columns] for batch in reader)
            rows = [
                json_value(dict(zip(names, row, strict=True))) for batch in columns for row in zip(*batch, strict=True)
            ]
            emit_json({"columns": names, "rows": rows, "row_count": len(rows)})
        else:
            _show(reader)


def _show(reader: pa.RecordBatchReader) -> None:
    from gymdata.query.run import too_wide
    from gymdata.query.types import python_values

    names, terminal = reader.schema.names, sys.stdout.isatty()
    width = room_beside(names)
    rows: list[list[object]] = []
    # The same rows for one value a line, which may have more room than a cell.
    longer: list[list[object]] = []
    total = 0
    for batch in reader:
        total += batch.num_rows
        if room := _SHOWN - len(rows):
            columns = [python_values(column) for column in batch.slice(0, room).columns]
            whole = list(zip(*columns, strict=True))
            rows += [[too_wide(v) or v for v in row] for row in whole]
            if terminal:
                longer += [[too_wide(v, width) or v for v in row] for row in whole]
    if not terminal:
        _aligned(names, rows)
    elif fits(names, rows):
        grid(names, rows)
    elif not rows:
        note(f"no rows of {', '.join(names)}")
    elif records(names, longer):
        note("values that end with … are cut: --json, --csv and -o hold them whole")
    if total > len(rows):
        note(f"{total - len(rows):,} more rows: add a LIMIT, or use --csv, --json or -o")


def _aligned(names: list[str], rows: list[list[object]]) -> None:
    """Plain columns, for pipes and files: no box, no colour, no wrapping."""
    texts = [[show(value).replace("\\[", "[").replace("\n", "\\n") for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *texts, strict=True)]
    numeric = [
        bool(rows) and all(isinstance(row[i], (int, float, type(None))) for row in rows) for i in range(len(names))
    ]
    for line in itertools.chain([names], texts):
        cells = [c.rjust(w) if right else c.ljust(w) for c, w, right in zip(line, widths, numeric, strict=True)]
        say("  ".join(cells).rstrip())
