"""``gymdata view``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gymdata.commands.view.settings import ViewConfig

from .console import note
from .flags import with_flags

_Paths = Annotated[
    list[Path], typer.Argument(metavar="PATH…", help="Run, stage and model folders, files, globs, or a folder of runs.")
]


@with_flags(ViewConfig)
def view(path: _Paths, *, settings: ViewConfig) -> None:
    """Pages: rollouts, tokens, breaks, groups, pairs, comparisons, training. A run that is being collected
    grows in the page. Nothing is loaded from the network.
    """
    from gymdata.commands.view.run import view as serve

    serve(path, config=settings, say=note)
