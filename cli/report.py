"""``gymdata report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gymdata.commands.report.settings import ReportConfig

from .console import facts, finish, fits, grid, say
from .flags import Json, with_flags

_Paths = Annotated[
    list[Path], typer.Argument(metavar="PATH…", help="Run, stage or model folder or file; several are compared.")
]


@with_flags(ReportConfig, file=False)
def report(paths: _Paths, *, settings: ReportConfig, json: Json = False) -> int:
    """Rewards, pass@k, lengths, endings, speed, validation, judges, pairs, training and lineage, with charts and examples.
    Of two paths: the paired difference on the tasks that both have, and which tasks changed; of more, each against
    the first. Of trainings their curves, and of all the settings that differ.
    """
    from gymdata.commands.report.run import report as make

    # With --json alone nothing is written.
    summary = make(*paths, config=settings, write=settings.output is not None or not json)

    def show() -> None:
        say(summary.headline)
        cells = []
        for row in (rows := summary.figures.get("compared")) or ():
            gap = row.get("difference")
            ends = "–" if gap is None or not gap["ci95"] else "{:+.4g} to {:+.4g}".format(*gap["ci95"])
            rate = "first" if gap is None else f"{gap['rate']:+.4g}"
            cells.append((row["name"], f"{row['mean']:.4g}", rate, ends, row["tasks"]))
        if by_setting := summary.figures.get("by_setting"):
            gaps = [row.get("difference") for row in by_setting]
            cells_of = [
                (
                    row["name"],
                    row["seeds"],
                    f"{row['mean']:.4g}",
                    "first" if gap is None else f"{gap['rate']:+.4g}",
                    row["tasks"],
                )
                for row, gap in zip(by_setting, gaps, strict=True)
            ]
            grid(("setting", "seeds", "mean", "difference", "tasks"), cells_of)
        if cells:
            grid(("run", "mean", "difference", "95 %", "tasks"), cells)
        if rows is not None and (settings := summary.figures["settings"]):
            columns = ("setting", *summary.figures["names"])
            lines = [(key, *("–" if v is None else str(v) for v in values)) for key, values in settings.items()]
            if fits(columns, lines):
                grid(columns, lines)
            else:
                for key, *values in lines:
                    facts(key, zip(columns[1:], values, strict=True))
        say(f"written to {summary.path}")

    return finish(summary, show, json=json)
