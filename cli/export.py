"""``gymdata export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gymdata.interop.settings import ExportConfig

from .console import command_words, emit_json, facts, note
from .flags import Json, Overwrite, with_flags

_Path = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, file or glob; pairs for pair formats.")]
_Output = Annotated[
    Path,
    typer.Option("-o", "--output", help="File to write: .jsonl; verl: .parquet; trajectories: also .json."),
]


@with_flags(ExportConfig)
def export(
    path: _Path, settings: ExportConfig, output: _Output, overwrite: Overwrite = False, json: Json = False
) -> int:
    """What the format cannot hold is reported."""
    from gymdata.interop.run import export as run

    format = settings.format
    done = run(path, output, format, overwrite=overwrite, command=command_words())
    if json:
        # The table tells people what is lost; a script that reads stdout may log this.
        for what, n in done.lost.items():
            note(f"{format} cannot hold: {what} ({n:,} of {done.rows + done.skipped:,} rows)")
        emit_json(done.to_dict())
    else:
        lines = [("rows", done.rows), *((f"  lost: {what}", n) for what, n in done.lost.items())]
        if done.skipped:
            lines.insert(1, ("left out", done.skipped))
        turns = [("turns delivered", done.turns - done.turns_lost)] if format == "nemo-gym" else []
        facts("export", [*lines, *turns, ("written to", str(output))])
    # Nothing that this format can hold: a script must not go on with an empty file.
    return 0 if done.rows else 1
