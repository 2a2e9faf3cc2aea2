"""``gymdata doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import finish
from .flags import Json

_Folder = Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Folder or URL to work in (default: this one).")]


_Model = Annotated[
    str | None,
    typer.Option("-m", "--model", help="Model folder: estimate memory, speed and the time of a next command."),
]


def doctor(folder: _Folder = Path(), model: _Model = None, json: Json = False) -> int:
    """Python, GPU, versions and their clashes, extras, disk, locks, and a self-test on shipped rollouts. Exit code 1 when
    something is wrong.

    With a model, also estimates of the memory and speed of sampling and of every trainer here, and of the time of a next
    command, which trains on FOLDER where that is a run.
    """
    from gymdata.doctor.run import doctor as run

    return finish(run(folder, model), "doctor", json=json)
