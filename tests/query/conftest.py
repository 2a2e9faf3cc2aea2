"""A run to ask about, and the command ``gymdata query`` without a process for each statement."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gymdata.query.guard import Limits
from gymdata.query.statement import run_statement
from tests.rollout_files import rollout, two_turns, write_run


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A run of one rollout."""
    return write_run(tmp_path / "small", [rollout("a", 0, 0.0, two_turns(1, 50))])


@contextlib.contextmanager
def run_here(sql: str, *paths: Path, as_text: bool = False, limits: Limits = Limits()) -> Iterator[Any]:
    """``run_query`` without a process for the statement."""
    with run_statement(sql, list(map(str, paths)), as_text=as_text, limits=limits) as reader:
        yield reader


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statements of the command run in this process: for tests of what it prints. ``test_guard.py`` has its own process."""
    monkeypatch.setattr("gymdata.query.child.run_query", run_here)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int | None:
    """Standard output is a terminal of so many columns, or a pipe."""
    columns: int | None = request.param
    if columns is not None:
        monkeypatch.setenv("TERM", "dumb")
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    return columns
