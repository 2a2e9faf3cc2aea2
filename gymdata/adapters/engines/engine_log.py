"""Where an engine's own processes write: a file, so that the terminal belongs to the command.

What always holds: the file is kept, and named, when the engine failed; it is removed when the engine was closed in order.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


class EngineLog:
    """A log file for one engine."""

    def __init__(self) -> None:
        self.path: Path | None = None

    @contextlib.contextmanager
    def children_write_here(self) -> Iterator[None]:
        """Processes started inside inherit this file as their stderr; what this process writes still reaches its own."""
        handle, name = tempfile.mkstemp(prefix="gymdata-engine-", suffix=".log")
        self.path = Path(name)
        sys.stderr.flush()
        own = os.dup(2)
        with os.fdopen(handle, "ab") as log, os.fdopen(os.dup(own), "w", buffering=1, errors="replace") as ours:
            os.dup2(log.fileno(), 2)
            before, sys.stderr = sys.stderr, ours
            try:
                yield
            finally:
                sys.stderr = before
                os.dup2(own, 2)
                os.close(own)

    def remove(self) -> None:
        """The engine ended in order: its log has nothing to say."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
