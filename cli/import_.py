"""``gymdata import``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from gymdata.commands.import_export.settings import ImportConfig
from gymdata.errors import counted

from .console import command_words, finish, note
from .flags import Json, Overwrite, with_flags

_Files = Annotated[
    list[Path], typer.Argument(metavar="FILE…", help="JSON lines, JSON, CSV, TSV (.gz, .zst) or Parquet, or globs.")
]
_Output = Annotated[Path, typer.Option("-o", "--output", help="Run folder to write.")]


def _same(settings: ImportConfig) -> list[str]:
    """The flags without which another import would not read the same rows."""
    named = {"--from": settings.source, "--test-share": settings.test_share, "--seed": settings.seed or None}
    words = [f"--map {shlex.quote(column)}" for column in settings.map]
    words += [f"{flag} {value}" for flag, value in named.items() if value is not None]
    return words + ["--keep-contradicting"] * settings.keep_contradicting


@with_flags(ImportConfig, {"source": ["--from"]})
def import_(
    files: _Files, output: _Output, *, settings: ImportConfig, overwrite: Overwrite = False, json: Json = False
) -> int:
    """Rollouts of NeMo Gym, NeMo Agent Toolkit, ATIF and other harnesses; answers and preferences as text of TRL, OpenAI,
    Alpaca and ShareGPT. With -m token IDs of text are rendered, proven, and marked as rendered (T213). Exit code 1 when some
    rows were rejected.
    """
    from gymdata.commands.import_export.rows import REJECTED
    from gymdata.commands.import_export.run import import_rollouts

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
        data = shlex.quote(f"{done.run}/split/train.parquet") if done.tasks else "{}"
        # train-sft takes the rollouts with the best rewards, where there are rewards.
        chosen = "" if done.pairs or done.without_reward < done.rollouts else " --select all"
        then = f"train-{'dpo' if done.pairs else 'sft'} {data} -m MODEL -o POLICY --allow-rendered{chosen}"
    elif done.turns:
        then = "validate {}"
    else:
        then = " ".join(["import", shlex.join(map(str, files)), "-m MODEL -o TOKENS", *_same(settings)])
    return finish(done, "import", json=json, then=then)
