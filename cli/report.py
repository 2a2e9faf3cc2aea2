"""``gymdata report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gymdata.report.settings import ReportConfig

from .console import finish, say
from .flags import Json, with_flags

_Paths = Annotated[
    list[Path], typer.Argument(metavar="PATH [PATH]", help="Run, stage or model folder or file; two are compared.")
]


@with_flags(ReportConfig, file=False)
def report(paths: _Paths, *, settings: ReportConfig, json: Json = False) -> int:
    """Rewards, pass@k, lengths, endings, speed, validation, judges, pairs, training and lineage, with charts and examples.
    Of two paths: the paired difference on the tasks that both have, and which tasks changed.
    """
    from gymdata.errors import UsageError
    from gymdata.report.run import report as make

    if len(paths) > 2:
        raise UsageError(f"got {len(paths)} paths, expected one, or two to compare")
    # With --json alone nothing is written.
    made = make(*paths, config=settings, write=settings.output is not None or not json)

    def show() -> None:
        say(made.headline)
        for path in [made.path, *made.charts]:
            say(f"written to {path}")

    return finish(made, show, json=json)
