"""``gymdata ls``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from .console import finish, fits, grid, note, paragraphs, say
from .flags import Json

_SPARED = ("parents", "size", "changed (UTC)", "kind")

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
            (o.path, o.kind, o.rows, decimal(o.bytes), o.changed[:16].replace("T", " "), o.state, ", ".join(o.parents))
            for o in report.outputs
        ]
        names = ("path", "kind", "rows", "size", "changed (UTC)", "state", "parents")
        # Folded paths cannot be copied: on a narrow terminal the least important columns are left out.
        for count in range(len(_SPARED) + 1):
            indices = [i for i, name in enumerate(names) if name not in _SPARED[:count]]
            shown = [names[i] for i in indices], [[row[i] for i in indices] for row in rows]
            if fits(*shown):
                break
        grid(*shown)
        for output in report.outputs:
            if output.progress is not None:
                say(f"{output.path}: {output.progress}")
        if count:
            note(f"left out on this terminal: {', '.join(_SPARED[:count])} (--json gives all)")

    code = finish(report, show, json=json)
    if report.unfinished:
        states = ", ".join(sorted({output.state for output in report.unfinished}))
        note(f"{states}: rows may be missing; rerun the same command to resume")
    return code
