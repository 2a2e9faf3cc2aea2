"""``gymdata status``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from .console import facts, finish, paragraphs, say
from .flags import Json

if TYPE_CHECKING:
    from gymdata.status.run import StatusReport

_Path = Annotated[
    str, typer.Argument(metavar="[PATH]", help="Run folder, folder of runs, or a run's URL (default: this one).")
]


def status(path: _Path = ".", json: Json = False) -> int:
    """Rows or steps done, speed, time left, failures and servers of a run, or of every run below a folder that is not
    complete, from the files that are there.

    Exit code 1 when one is interrupted, has rollouts pending or is damaged.
    """
    from gymdata.status.run import status as run

    report = run(path)
    return finish(report, lambda: _show(report), json=json)


def _show(report: StatusReport) -> None:
    if not report.runs:
        paragraphs(f"every run below {report.path} is complete")
    for one in report.runs:
        facts(f"{one.path} ({one.kind})", one.rows())
    if report.disk_free is not None:
        say(f"disk: {decimal(report.disk_free)} free")
