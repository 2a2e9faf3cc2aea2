"""``gymdata merge-adapter``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import command_words, finish
from .flags import Json, Overwrite

_Adapter = Annotated[str, typer.Argument(metavar="ADAPTER", help="LoRA adapter folder.")]
_Output = Annotated[Path, typer.Option("-o", "--output", help="Model folder to write.", show_default=False)]


def merge_adapter(adapter: _Adapter, output: _Output, overwrite: Overwrite = False, json: Json = False) -> int:
    """The base is the one that the adapter names. The model is in the base's number format, with tokenizer, chat template
    and generation config.
    """
    from gymdata.merge.adapter import merge_adapter as run

    report = run(adapter, output, overwrite=overwrite, command=command_words())
    return finish(report, "merge-adapter", json=json)
