"""``gymdata collect``."""

from __future__ import annotations

from typing import Annotated

import typer

from gymdata.commands.collect.settings import CollectConfig
from gymdata.commands.collect.task_files import KINDS

from .console import Watch, command_words, finish, note
from .flags import DryRun, Json, with_flags


@with_flags(CollectConfig)
def collect(
    settings: CollectConfig,
    tasks: Annotated[str | None, typer.Argument(help=f"Task file or glob: {KINDS}.")] = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> int:
    """An existing run is resumed."""
    from gymdata.commands.collect import run as collecting

    with Watch("collect") as watch:
        summary = collecting.collect(config=settings, dry_run=dry_run, progress=watch, command=command_words())
    if isinstance(summary, collecting.CollectPlan):
        return finish(summary, "collect (dry run: nothing was sampled or written)", json=json)
    code = finish(summary, "collect", json=json, then="validate {}")
    for line in summary.remarks():
        note(line)
    return code
