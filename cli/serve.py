"""``gymdata serve``."""

from __future__ import annotations

from typing import Annotated

import typer

from gymdata.commands.serve.settings import ServerConfig

from .console import note, say
from .flags import DryRun, with_flags


@with_flags(ServerConfig, keys={"named": "model"})
def serve(
    settings: ServerConfig,
    *,
    named: Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.")] = None,
    dry_run: DryRun = False,
) -> None:
    """The command line that it prints starts the same server by itself; --dry-run prints it only."""
    from gymdata.commands.serve.run import serve as run

    run(settings, dry_run=dry_run, say=note, show=say)
