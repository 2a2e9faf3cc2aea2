"""``gymdata demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gymdata.commands.demo.run import DemoConfig, planned
from gymdata.commands.demo.run import demo as run

from .console import finish, note, say
from .flags import DryRun, Json, Overwrite, with_flags

_Output = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", help="Output folder (default: runs/demo; with --real runs/demo-real).", show_default=False
    ),
]


@with_flags(DemoConfig)
def demo(
    output: _Output = None,
    *,
    settings: DemoConfig,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> int:
    """Held-out accuracy is measured before and after."""
    if dry_run:
        plan = planned(output, settings, overwrite=overwrite)
        code = finish(plan, lambda: say("\n".join(plan.steps)), json=json)
        note("the shipped files are there; nothing was run")
        if plan.install:
            note(f"the steps need more than is installed here: {plan.install}")
        return code
    report = run(output, **(dict(settings) | {"threshold": False}), overwrite=overwrite, say=note)
    code = finish(report, "demo", json=json)
    if settings.threshold:  # after the figures, which say by how much it was missed
        report.require_rise()
    return code
