"""``gymdata tokenize``."""

from __future__ import annotations

from gymdata.tokenize.settings import TokenizeConfig

from .console import Watch, command_words, finish
from .flags import Json, Output, Overwrite, RunFiles, with_flags


@with_flags(TokenizeConfig)
def tokenize(
    path: RunFiles, output: Output = None, *, settings: TokenizeConfig, overwrite: Overwrite = False, json: Json = False
) -> int:
    """The IDs are marked as rendered and have no logprobs (T213). Pairs, SFT, DPO, KTO and reward models take them with
    --allow-rendered; batch RL does not.
    """
    from gymdata.tokenize.run import tokenize as run

    with Watch("tokenize") as watch:
        report = run(path, output, config=settings, overwrite=overwrite, command=command_words(), progress=watch)
    trainer = "train-dpo" if report.pairs else "train-sft"
    return finish(report, "tokenize", json=json, then=f"{trainer} {{}} -m MODEL -o POLICY --allow-rendered")
