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
    from gymdata.progress import log_to

    done = import_rollouts(files, output, **dict(settings), overwrite=overwrite, command=command_words())
    log_to(Path(done.run))
    if done.rejected:
        rejected = f"{done.rejected:,} of {counted(done.rows_in, 'row')} rejected"
        note(f"{rejected}: {output / REJECTED} has their lines and reasons")
    if done.duplicates:
        note(
            f"{done.duplicates:,} of {counted(done.rollouts, 'rollout')} are the same as an earlier one (D701): "
            f"`gymdata validate {output}` names them, `gymdata validate {output} --fix drop -o FILE` leaves them out"
        )
    if done.rendered:
        data = shlex.quote(f"{done.run}/split/train.parquet") if done.tasks else "{}"
        # train-sft takes the rollouts with the best rewards, where there are rewards.
        chosen = "" if done.pairs or done.without_reward < done.rollouts else " --select all"
        then = f"train-{'dpo' if done.pairs else 'sft'} {data} -m MODEL -o POLICY --allow-rendered{chosen}"
    elif done.turns:
        then = "validate {}"
    else:
        # The same rows once more: the last -o wins, but one of two that is printed would be misread.
        words = command_words()[1:]
        for at in [at for at, word in enumerate(words) if word in ("-o", "--output")][::-1]:
            del words[at : at + 2]
        then = f"{shlex.join(words)} -m MODEL -o TOKENS"
    return finish(done, "import", json=json, then=then)
