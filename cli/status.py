"""``gymdata status``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.filesize import decimal

from .console import facts, finish, paragraphs, say
from .flags import Json

_Path = Annotated[
    str, typer.Argument(metavar="[PATH]", help="Run folder, folder of runs, or a run's URL (default: this one).")
]


_Notify = Annotated[
    str | None,
    typer.Option("--notify", metavar="URL", help="Wait until no run is written any more, or all stall; POST it there."),
]
_Stalled = Annotated[
    float, typer.Option("--stalled-after", min=0.0, help="Seconds without progress that count as stalled (--notify).")
]


def status(path: _Path = ".", notify: _Notify = None, stalled_after: _Stalled = 600.0, json: Json = False) -> int:
    """Rows or steps done, speed, time left, failures and servers of a run, or of every run below a folder that is not
    complete, from the files that are there.

    Exit code 1 when one is interrupted, has rollouts pending or is damaged.
    """
    from gymdata.status.run import status as run

    report = run(path, notify=notify, stalled_after=stalled_after)

    def show() -> None:
        if not report.runs:
            paragraphs(f"every run below {report.path} is complete")
        for run_status in report.runs:
            facts(f"{run_status.path} ({run_status.kind})", run_status.rows())
        if report.disk_free is not None:
            say(f"disk: {decimal(report.disk_free)} free")

    return finish(report, show, json=json)
