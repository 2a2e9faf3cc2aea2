"""``gymdata export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gymdata.commands.import_export.settings import ExportConfig
from gymdata.errors import counted

from .console import finish, note
from .flags import Json, Overwrite, with_flags

_Path = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, file or glob; pairs for pair formats.")]
_Output = Annotated[
    Path, typer.Option("-o", "--output", help="File to write: .jsonl; verl: .parquet; trajectories: also .json.")
]


@with_flags(ExportConfig)
def export(
    path: _Path, output: _Output, *, settings: ExportConfig, overwrite: Overwrite = False, json: Json = False
) -> int:
    """What the format cannot hold is reported."""
    from gymdata.commands.import_export.run import export as run

    done = run(path, output, settings.format, reward=settings.reward, overwrite=overwrite)
    # The table shows people what is lost; a script that reads stdout may log this.
    for part, n in done.lost.items() if json else ():
        note(f"{settings.format} cannot hold: {part} ({n:,} of {counted(done.rows_out + done.skipped, 'row')})")
    return finish(done, "export", json=json)
