"""``gymdata doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import finish
from .flags import Json

_Folder = Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Folder or URL to work in (default: this one).")]


def doctor(folder: _Folder = Path(), json: Json = False) -> int:
    """Python, GPU, versions and their clashes, extras, disk, locks, and a self-test on shipped rollouts. Exit code 1 when
    something is wrong."""
    from gymdata.commands.doctor.run import doctor as run

    return finish(run(folder), "doctor", json=json)
