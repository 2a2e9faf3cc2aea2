"""``gymdata collect``."""

from __future__ import annotations

from typing import Annotated

import typer

from gymdata.collect.settings import CollectConfig

from .console import Watch, command_words, emit_json, facts, prints_apart
from .flags import DryRun, Json, Overwrite, with_flags


@with_flags(CollectConfig)
def collect(
    settings: CollectConfig,
    tasks: Annotated[
        str | None, typer.Argument(help="Task file or glob: .jsonl or .parquet, also .gz and .zst.")
    ] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> int:
    """An existing run is resumed."""
    from gymdata.collect import run as collecting

    if dry_run:
        with prints_apart():
            planned = collecting.plan(config=settings)
        if json:
            emit_json(planned)
        else:
            facts("Dry run: nothing was started or written", collecting.plan_table(planned))
        return 0
    with Watch("collect") as watch:
        summary = collecting.collect(config=settings, progress=watch, command=command_words())
    if json:
        emit_json(summary.to_dict())
    else:
        facts("Rollouts", summary.table())
    return summary.exit_code
