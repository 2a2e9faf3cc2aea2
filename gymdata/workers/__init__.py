"""Servers, child processes, signals and threads: ends of every kind, less memory and rarer garbage collection."""

import sys
from pathlib import Path


def safe_path() -> bool:
    """Whether this process does without modules of the working folder, where `python -m` would look first: a user's
    datasets.py or rich.py would stand in for the library there."""
    return {"", str(Path.cwd())}.isdisjoint(sys.path)


def python_module(name: str) -> list[str]:
    """The command that runs a module in a process that finds others where this one does."""
    return [sys.executable, *(["-P"] if safe_path() else []), "-m", name]
