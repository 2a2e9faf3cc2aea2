"""``gymdata import``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import JsonFlag, OverwriteFlag, command_words, finish, note

_Files = Annotated[list[Path], typer.Argument(metavar="FILE…", help="JSON lines or JSON (.gz, .zst), or globs.")]
_From = Annotated[
    str | None,
    typer.Option("--from", help="nemo-gym, nat-trajectories, nat-dpo, nat-dpo-items or atif (default: auto-detect)."),
]
_Output = Annotated[Path, typer.Option("-o", "--output", help="Run folder to write.")]
_RunId = Annotated[str | None, typer.Option("--run-id", help="Run ID (default: random).")]
_Format = Annotated[str, typer.Option("--format", help="File format: parquet or jsonl.")]
_Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", help="Policy tokenizer folder: rebuild prompts that NeMo Gym rows lack (default: do not)."
    ),
]
_Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show the traceback of an error.")]


def import_(
    files: _Files,
    output: _Output,
    from_: _From = None,
    run_id: _RunId = None,
    format: _Format = "parquet",
    tokenizer: _Tokenizer = None,
    overwrite: OverwriteFlag = False,
    json: JsonFlag = False,
    verbose: _Verbose = False,
) -> int:
    """Import rollouts or preference pairs of other projects. Exit code 1 when some rows were rejected.

    NeMo Gym rows, trajectories and DPO rows of the NeMo Agent Toolkit, ATIF trajectories.
    """
    from gymdata.errors import UsageError
    from gymdata.interop.run import NOT_REBUILT, REJECTED, import_rollouts

    if format not in ("parquet", "jsonl"):
        raise UsageError.unknown_choice("--format", format, ("parquet", "jsonl"))
    done = import_rollouts(
        files,
        output,
        source=from_,
        run_id=run_id,
        overwrite=overwrite,
        format=format,
        tokenizer=tokenizer,
        command=command_words(),
    )
    if done.rejected:
        note(f"{done.rejected:,} of {done.rows_in:,} rows rejected: {output / REJECTED} has their lines and reasons")
    if done.duplicates:
        note(
            f"{done.duplicates:,} of {done.rollouts:,} rollouts are the same as an earlier one (D701): "
            f"`gymdata validate {output}` names them, `gymdata validate {output} --fix drop -o FILE` leaves them out"
        )
    if done.prompts_refused:
        note(f"{done.prompts_refused:,} prompts cannot be rebuilt: {output / NOT_REBUILT} lists where and why")
    if done.without_token_data:
        note(
            f"{done.without_token_data:,} of {done.rollouts:,} rollouts have no token data: "
            "they cannot be trained as they were sampled"
        )
    return finish(done, "import", json=json)
