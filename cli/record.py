"""``gymdata record``."""

from __future__ import annotations

from typing import Annotated

import typer

from gymdata.commands.record.settings import RecordConfig

from .console import command_words, finish, note
from .flags import Json, with_flags


@with_flags(RecordConfig)
def record(
    settings: RecordConfig,
    agent: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND …]", help="Agent to run and record; it ends the recording."),
    ] = None,
    json: Json = False,
) -> int:
    """An existing run is resumed: clients continue with the same keys."""
    from gymdata.commands.record.run import record as run

    # Standard output is the summary's alone.
    output = 2 if json else None
    summary = run(settings, agent=agent or (), say=note, command=command_words(), agent_output=output)
    return finish(summary, "record", json=json, then="validate {}")
