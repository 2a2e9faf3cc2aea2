"""``gymdata import``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gymdata.interop.settings import ImportConfig

from .console import command_words, emit_json, facts, note
from .flags import Json, Overwrite, with_flags

_Files = Annotated[list[Path], typer.Argument(metavar="FILE…", help="JSON lines or JSON (.gz, .zst), or globs.")]
_Output = Annotated[Path, typer.Option("-o", "--output", help="Run folder to write.")]


@with_flags(ImportConfig, {"source": ["--from"]})
def import_(
    files: _Files, settings: ImportConfig, output: _Output, overwrite: Overwrite = False, json: Json = False
) -> int:
    """NeMo Gym rows, trajectories and DPO rows of the NeMo Agent Toolkit, ATIF trajectories. Exit code 1 when some rows were
    rejected.
    """
    from gymdata.interop.run import NOT_REBUILT, REJECTED, SOURCES, import_rollouts

    done = import_rollouts(files, output, **dict(settings), overwrite=overwrite, command=command_words())
    if done.rejected:
        note(f"{done.rejected:,} of {done.rows:,} rows rejected: {output / REJECTED} has their lines and reasons")
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
    if json:
        emit_json(done.to_dict())
    else:
        about = [
            ("rollouts", done.rollouts),
            ("turns with token ids", done.turns),
            ("breaks", done.breaks),
            ("rollouts without token data", done.without_token_data),
            ("rollouts without reward", done.without_reward),
            ("duplicate rollouts", done.duplicates),
        ]
        if settings.tokenizer is not None:
            about += [("prompts rebuilt", done.prompts_rebuilt), ("prompts not rebuilt", done.prompts_refused)]
        counts = [("pairs, without token data", done.pairs)] if SOURCES[done.format] == "pairs" else about
        rejected = [(f"  rejected, {code}", n) for code, n in done.reasons.items()]
        rows = [("format", done.format), ("rows", done.rows), *rejected, *counts, ("written to", str(output))]
        facts("import", rows)
    return 1 if done.rejected else 0
