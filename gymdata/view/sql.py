"""SQL over what the pages show, as ``gymdata query`` runs it: one SELECT, nothing outside the given files, bounded."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from markupsafe import Markup
from starlette.background import BackgroundTask
from starlette.responses import FileResponse

from gymdata.errors import GymdataError
from gymdata.public import Figures
from gymdata.query.child import run_query
from gymdata.query.guard import Limits
from gymdata.query.run import write_result
from gymdata.query.types import json_value, python_values
from gymdata.report.charts import Chart, bars
from gymdata.report.drawing import svg
from gymdata.report.rollouts import histogram
from gymdata.view.evidence.selection import MOST_IDS, condition_of
from gymdata.view.settings import ViewConfig

FORMATS = {"csv": "text/csv", "jsonl": "application/jsonl", "parquet": "application/vnd.apache.parquet"}
CHARTS = ("bars", "line", "histogram")
#: Rows that are drawn as bars.
_MOST_BARS = 40
_MOST_TEXT = 400
#: Hints that only help with ``gymdata query``.
_OF_COMMAND = re.compile(r"`-|^query takes|given after it")


def limits_of(config: ViewConfig) -> Limits:
    return Limits(config.sql_seconds, config.sql_memory, threads=2)


def answer(sql: str, paths: Sequence[Path], config: ViewConfig) -> dict[str, Any]:
    """The first rows of a result: ``columns`` (name and whether it is a number), ``rows`` of shown values, ``more``: there
    are others. Raises UsageError for SQL that is wrong, does more than read, or takes too long."""
    began = time.monotonic()
    with run_query(sql, *paths, as_text=True, limits=limits_of(config)) as reader:
        of_numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
        fields = [(field.name, any(test(field.type) for test in of_numbers)) for field in reader.schema]
        rows: list[tuple[Any, ...]] = []
        for batch in reader:
            rows += zip(*(python_values(column) for column in batch.columns), strict=True)
            if len(rows) > config.sql_rows:
                break
    names = [name for name, _ in fields]
    ids = [row[names.index("rollout_id")] for row in rows] if "rollout_id" in names else []
    ids = list(dict.fromkeys(rollout_id for rollout_id in ids if isinstance(rollout_id, str)))
    is_named = 0 < len(ids) <= MOST_IDS and len(rows) <= config.sql_rows
    # Nested values are JSON in their cells, and text is shortened.
    shown = [
        [json.dumps(json_value(v), default=str, ensure_ascii=False) if isinstance(v, (dict, list)) else v for v in row]
        for row in rows[: config.sql_rows]
    ]
    for cells in shown:
        for n, text in enumerate(cells):
            if isinstance(text, str) and len(text) > _MOST_TEXT:
                cells[n] = "".join(itertools.islice(text, _MOST_TEXT)) + "…"
    return {
        "columns": fields,
        "rows": shown,
        "more": len(rows) > config.sql_rows,
        "seconds": time.monotonic() - began,
        "condition": condition_of(ids) if is_named else None,
    }


def chart_of(result: Figures, kind: str = "", x: str = "", y: str = "") -> Figures | None:
    """A chart of a result: ``kind``, ``x`` and ``y``, by its columns where they are not given, and its ``svg``. None where
    there are no two numbers to draw."""
    names = [name for name, _ in result["columns"]]
    numeric = [name for name, is_number in result["columns"] if is_number]
    if not numeric or len(result["rows"]) < 2:
        return None
    x = x if x in names else names[0]
    y = y if y in numeric else next((name for name in numeric if name != x), numeric[0])
    if kind not in CHARTS:
        few = len(result["rows"]) <= _MOST_BARS and x != "rollout_id"
        kind = "histogram" if x == y else "line" if x in numeric else "bars" if few else "histogram"
    cells = [(row[names.index(x)], row[names.index(y)]) for row in result["rows"]]
    points = [(key, float(value)) for key, value in cells if value is not None and math.isfinite(value)]
    if kind == "line":
        points = sorted((float(key), value) for key, value in points if isinstance(key, (int, float, Decimal)))
    if len(points) < 2:
        return {"kind": kind, "x": x, "y": y, "svg": None}
    values = [value for _, value in points]
    if kind == "histogram":
        drawn = bars("result", y, histogram(np.array(values)), y)
    elif kind == "line":
        drawn = Chart("result", y, "lines", x=x, series={y: points})
    else:
        lowest = min(0.0, *values)
        rows = [(str(key), value, min(0.0, value), max(0.0, value)) for key, value in points[:_MOST_BARS]]
        drawn = Chart("result", y, "rates", rates=rows, bounds=(lowest, max(0.0, *values)))
    return {"kind": kind, "x": x, "y": y, "svg": Markup(svg(drawn))}


def page_error(error: Exception) -> str:
    """An error without the hints for the command line; the views are listed on the page already."""
    if not isinstance(error, GymdataError):
        return str(error)
    message = error.message.removesuffix(": query only reads")
    hint = (error.hint or "").partition("available views:")[0].strip(" ;")
    return f"{message}\n  → {hint}" if hint and not _OF_COMMAND.search(hint) else message


def download(sql: str, paths: Sequence[Path], config: ViewConfig, kind: str) -> FileResponse:
    """The whole result as a file that is removed once it is sent."""
    folder = Path(tempfile.mkdtemp(prefix="gymdata-view-"))
    try:
        target = folder / f"result.{kind}"
        with run_query(sql, *paths, as_text=kind != "parquet", limits=limits_of(config)) as reader:
            write_result(reader, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    gone = BackgroundTask(shutil.rmtree, folder, ignore_errors=True)
    return FileResponse(target, media_type=FORMATS[kind], filename=target.name, background=gone)
