"""``gymdata ls``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import finish, grid, note
from .flags import Json

if TYPE_CHECKING:
    from gymdata.ls.run import LsReport

_Path = Annotated[Path, typer.Argument(metavar="[PATH]", help="Folder to look below (default: this one).")]


def ls(path: _Path = Path(), json: Json = False) -> int:
    """Kind, rows, size, last change, state and parents of each, from its run.json.

    Exit code 1 when a run.json is damaged.
    """
    from gymdata.ls.run import ls as run

    report = run(path)
    code = finish(report, lambda: _show(report), json=json)
    if report.unfinished:
        states = ", ".join(sorted({output.state for output in report.unfinished}))
        note(f"{states}: rows may be missing; rerun the same command to resume")
    return code


def _show(report: LsReport) -> None:
    rows = [
        (
            o.path,
            o.kind,
            o.rows,
            f"{o.bytes / 1e6:,.1f}",
            o.changed[:16].replace("T", " "),
            o.state,
            ", ".join(o.parents),
        )
        for o in report.outputs
    ]
    grid(("path", "kind", "rows", "MB", "changed (UTC)", "state", "parents"), rows)
