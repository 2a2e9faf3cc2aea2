"""``gymdata import``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gymdata.errors import counted
from gymdata.interop.settings import ImportConfig

from .console import command_words, finish, note
from .flags import Json, Overwrite, with_flags

_Files = Annotated[
    list[Path], typer.Argument(metavar="FILE…", help="JSON lines, JSON, CSV, TSV (.gz, .zst) or Parquet, or globs.")
]
_Output = Annotated[Path, typer.Option("-o", "--output", help="Run folder to write.")]


@with_flags(ImportConfig, {"source": ["--from"]})
def import_(
    files: _Files, output: _Output, *, settings: ImportConfig, overwrite: Overwrite = False, json: Json = False
) -> int:
    """Rollouts of NeMo Gym, NeMo Agent Toolkit, ATIF and other harnesses; answers and preferences as text of TRL, OpenAI,
    Alpaca and ShareGPT. With -m token IDs of text are rendered, proven, and marked as rendered (T213). Exit code 1 when some
    rows were rejected.
    """
    from gymdata.interop.run import REJECTED, import_rollouts

    done = import_rollouts(files, output, **dict(settings), overwrite=overwrite, command=command_words())
    if done.rejected:
        rejected = f"{done.rejected:,} of {counted(done.rows_in, 'row')} rejected"
        note(f"{rejected}: {output / REJECTED} has their lines and reasons")
    if done.duplicates:
        note(
            f"{done.duplicates:,} of {counted(done.rollouts, 'rollout')} are the same as an earlier one (D701): "
            f"`gymdata validate {output}` names them, `gymdata validate {output} --fix drop -o FILE` leaves them out"
        )
    if done.turns and done.without_token_data:
        note(
            f"{done.without_token_data:,} of {counted(done.rollouts, 'rollout')} have no token data: "
            "they cannot be trained as they were sampled"
        )
    if done.rendered:
        then = f"train-{'dpo' if done.pairs else 'sft'} {{}} -m MODEL -o POLICY --allow-rendered"
    else:
        then = "validate {}" if done.turns else f"import {' '.join(map(str, files))} -m MODEL -o TOKENS"
    return finish(done, "import", json=json, then=then)
