"""``gymdata merge``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import Watch, command_words, facts, finish, grid
from .flags import DryRun, Json, Output, Overwrite

_Runs = Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders, or files of rollouts with a run.json.")]


def merge(
    path: _Runs, output: Output = None, overwrite: Overwrite = False, dry_run: DryRun = False, json: Json = False
) -> int:
    """Runs must have been collected with the same settings (except for the seed of runs with other IDs). A rollout that is
    in several runs is kept once.
    """
    from gymdata.merge.run import merge as run

    with Watch("merge") as watch:
        report = run(path, output, write=not dry_run, overwrite=overwrite, command=command_words(), progress=watch)

    def show() -> None:
        rows = [(run["path"], run["run_id"], run["shard"] or "all", run["rollouts"]) for run in report.runs]
        grid(("run", "run ID", "shard", "rollouts"), rows)
        facts("merge", report.rows())

    return finish(report, show, json=json, then="validate {}")
