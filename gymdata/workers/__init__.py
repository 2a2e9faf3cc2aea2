"""Servers, child processes, signals and threads: ends of every kind, less memory and rarer garbage collection."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path


def end_after(wait: Callable[[], object]) -> None:
    """End this process, whatever it does, once ``wait`` returns or its other side is gone: it belongs to another one."""

    def body() -> None:
        with contextlib.suppress(EOFError, OSError):
            wait()
        os._exit(1)

    threading.Thread(target=body, daemon=True).start()


def safe_path() -> bool:
    """Whether this process does without modules of the working folder, where `python -m` would look first: a user's
    datasets.py or rich.py would stand in for the library there."""
    return {"", str(Path.cwd())}.isdisjoint(sys.path)


def python_module(name: str) -> list[str]:
    """The command that runs a module in a process that finds others where this one does."""
    return [sys.executable, *(["-P"] if safe_path() else []), "-m", name]
