"""``gymdata export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import JsonFlag, OverwriteFlag, command_words, emit_json, facts, note

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
