"""``gymdata report``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from gymdata.commands.report.settings import ReportConfig
from gymdata.public import Figures

from .console import Grid, finish
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

    return finish(summary, summary.headline, json=json, above=_tables(summary.figures))


def _tables(figures: Figures) -> Iterator[Grid]:
    """Of several paths: the settings and runs by their rewards, and the settings that differ."""
    compared, by_setting = figures.get("compared") or (), figures.get("by_setting") or ()
    settings = [(r["name"], r["seeds"], f"{r['mean']:.4g}", _gap(r), r["tasks"]) for r in by_setting]
    yield ("setting", "seeds", "mean", "difference", "tasks"), settings, ""
    runs = [(r["name"], f"{r['mean']:.4g}", _gap(r), _interval(r), r["tasks"]) for r in compared]
    yield ("run", "mean", "difference", "95 %", "tasks"), runs, ""
    if "compared" in figures:
        lines = [(key, *("–" if v is None else str(v) for v in of)) for key, of in figures["settings"].items()]
        yield ("setting", *figures["names"]), lines, ""


def _gap(row: Figures) -> str:
    gap = row.get("difference")
    return "first" if gap is None else f"{gap['rate']:+.4g}"


def _interval(row: Figures) -> str:
    gap = row.get("difference")
    return "–" if gap is None or not gap["ci95"] else "{:+.4g} to {:+.4g}".format(*gap["ci95"])
