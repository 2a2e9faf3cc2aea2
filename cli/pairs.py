"""``gymdata pairs``."""

from __future__ import annotations

from gymdata.commands.pairs.settings import PairsConfig

from .console import command_words, finish, warn_once
from .flags import Json, Output, Overwrite, RunFiles, with_flags


@with_flags(PairsConfig, {"source": ["--from"]})
def pairs(
    path: RunFiles, output: Output = None, *, settings: PairsConfig, overwrite: Overwrite = False, json: Json = False
) -> int:
    """Pairs hold the saved token IDs and masks.

    Exit code 1 when there are no pairs.
    """
    from gymdata.commands.pairs.run import pairs as run

    report = run(path, output=output, config=settings, overwrite=overwrite, command=command_words())
    code = finish(report, "pairs", json=json, then="train-dpo {} -m MODEL -o POLICY")
    warn_once(report.notes)
    return code
