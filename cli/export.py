"""``gymdata export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import JsonFlag, OverwriteFlag, command_words, finish, note

_Path = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, file or glob; pairs for pair formats.")]
_Format = Annotated[
    str,
    typer.Option(
        "--format",
        help="nemo-gym, nat-trajectories, nat-dpo, nat-dpo-items, atif, trl-messages, trl-prompt-completion, "
        "trl-preference, openai or verl.",
    ),
]
_Output = Annotated[
    Path,
    typer.Option("-o", "--output", help="File to write: .jsonl; verl: .parquet; trajectories: also .json."),
]
_Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show the traceback of an error.")]


def export(
    path: _Path,
    format: _Format,
    output: _Output,
    overwrite: OverwriteFlag = False,
    json: JsonFlag = False,
    verbose: _Verbose = False,
) -> int:
    """Write rollouts (or pairs) in another project's format, and report what that format loses."""
    from gymdata.interop.run import export_rollouts

    done = export_rollouts(path, output, format, overwrite=overwrite, command=command_words())
    # The table tells people what is lost; a script that reads stdout may log this.
    for what, n in done.lost.items() if json else ():
        note(f"{format} cannot hold: {what} ({n:,} of {done.rows_out + done.skipped:,} rows)")
    return finish(done, "export", json=json)
