"""``gymdata serve``."""

from __future__ import annotations

from typing import Annotated

import typer

from gymdata.serve.settings import ServerConfig

from .console import note, say
from .flags import DryRun, with_flags


@with_flags(ServerConfig, keys={"named": "model"})
def serve(
    settings: ServerConfig,
    *,
    named: Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.")] = None,
    dry_run: DryRun = False,
    background: Annotated[
        bool, typer.Option("--background", help="Leave the server running for later commands with this model.")
    ] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="Stop the model's background servers; without a model the only one.")
    ] = False,
) -> None:
    """The command line that it prints starts the same server by itself; --dry-run prints it only."""
    from gymdata.serve.run import serve as run

    run(settings, dry_run=dry_run, background=background, stop=stop, say=note, show=say)
