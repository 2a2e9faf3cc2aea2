"""``gymdata prune``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import facts, finish, grid, note
from .flags import Json

if TYPE_CHECKING:
    from gymdata.ls.prune import Pruned, PruneReport

_Path = Annotated[Path, typer.Argument(metavar="PATH", help="Folder to look below.")]
_Keep = Annotated[
    list[Path] | None,
    typer.Option("--keep", metavar="PATH", help="Keep this too, and what it was made from; repeatable."),
]
_Delete = Annotated[bool, typer.Option("--delete", help="Delete what is not needed (default: only list it).")]


def prune(path: _Path, keep: _Keep = None, delete: _Delete = False, json: Json = False) -> int:
    """Needed is every trained model and finetuning run below PATH, and all that they were made from. Models elsewhere are
    not seen: name them with --keep. Files that gymdata did not write are never deleted.
    """
    from gymdata.ls.prune import prune as run

    report = run(path, keep=keep or (), delete=delete)
    code = finish(report, lambda: _show(report), json=json)
    if report.idle and not delete:
        note("nothing was deleted: --delete removes what is not needed")
    return code


def _show(report: PruneReport) -> None:
    rows = [
        (o.path, o.kind, f"{o.bytes / 1e6:,.1f}", o.changed[:16].replace("T", " "), _why(o, report.deleted))
        for o in report.outputs
    ]
    grid(("path", "kind", "MB", "changed (UTC)", "needed by"), rows)
    facts("prune", report.rows())


def _why(output: Pruned, deleted: bool) -> str:
    why = output.needed_by or ("nothing: deleted" if deleted else "nothing")
    return f"{why} (interrupted, not whole)" if output.state == "interrupted" else why
