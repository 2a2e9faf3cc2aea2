"""Folders that are made once and kept for this user, in ``~/.cache/gymdata``: they appear when they are complete."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def cached(*names: str) -> Path:
    """The path of ``names`` in the cache, which may not be there."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").joinpath("gymdata", *names)


def made_in_cache(folder: Path, write: Callable[[Path], None]) -> Path:
    """``folder``, with what ``write`` writes to the path that it is given; nothing is done where the folder is there."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as temporary:
        write(unfinished := Path(temporary) / folder.name)
        try:
            os.replace(unfinished, folder)  # noqa: PTH105 - it appears when it is complete
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    return folder
