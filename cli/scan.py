"""``gymdata scan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import Watch, facts, finish, grid
from .flags import Json

_Path = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run folder, file or glob of rollouts, pairs or other tables.")
]
#: Findings that people are shown; --json has all.
_LISTED = 20


def scan(path: _Path, json: Json = False) -> int:
    """Every text is searched: prompts, answers, tool calls and results, tasks, environment facts, run.json and logs.

    Exit code 1 when something was found.
    """
    from gymdata.scan.run import scan as run

    with Watch("scan") as watch:
        report = run(path, progress=watch)

    def show() -> None:
        listed = report.findings[:_LISTED]
        if listed:
            rows = [(one.kind, one.shown, one.rollout_id or one.file, one.row, one.field) for one in listed]
            more = len(report.findings) - len(listed)
            grid(("kind", "value", "rollout or file", "row", "field"), rows)
            facts(f"{more:,} more (--json lists all)" if more else "", [])
        facts("scan", report.rows())

    return finish(report, show, json=json)
