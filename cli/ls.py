"""``gymdata ls``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from .console import finish, fits, grid, note, paragraphs, say
from .flags import Json

_COLUMNS = ("path", "kind", "rows", "state", "size", "changed (UTC)", "parents")
#: The first columns, which every terminal shows.
_FEWEST = 4

_Path = Annotated[Path, typer.Argument(metavar="[PATH]", help="Folder to look below (default: this one).")]


_Experiment = Annotated[
    str | None, typer.Option("--experiment", metavar="NAME", help="Only outputs of this experiment.")
]
_Tags = Annotated[
    list[str] | None, typer.Option("--tag", metavar="TEXT", help="Only outputs with this tag; repeatable.")
]


def ls(
    path: _Path = Path(),
    experiment: _Experiment = None,
    tag: _Tags = None,
    json: Json = False,
) -> int:
    """Kind, rows, size, last change, state and parents of each, from its run.json; of what is not complete what is done,
    the rate, the time left, failed attempts, and whether a server is away.

    Exit code 1 when a run.json is damaged.
    """
    from gymdata.commands.ls.run import ls as run

    report = run(path, experiment=experiment, tags=tag or ())

    def show() -> None:
        if not report.outputs:
            paragraphs(f"no runs below {report.folder}")
            return
        rows = [
            (o.path, o.kind, o.rows, o.state, decimal(o.bytes), o.changed[:16].replace("T", " "), ", ".join(o.parents))
            for o in report.outputs
        ]
        # Folded paths cannot be copied: on a narrow terminal the last columns are left out.
        count = len(_COLUMNS)
        while count > _FEWEST and not fits(_COLUMNS[:count], [row[:count] for row in rows]):
            count -= 1
        grid(_COLUMNS[:count], [row[:count] for row in rows])
        for output in report.outputs:
            if output.progress is not None:
                say(f"{output.path}: {output.progress}")
        if left_out := _COLUMNS[count:]:
            note(f"left out on this terminal: {', '.join(left_out)} (--json gives all)")

    code = finish(report, show, json=json)
    if report.unfinished:
        states = ", ".join(sorted({output.state for output in report.unfinished}))
        note(f"{states}: rows may be missing; rerun the same command to resume")
    return code
