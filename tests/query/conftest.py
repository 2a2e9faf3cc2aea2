"""A run to ask about, and terminals of several widths."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollout_files import rollout, two_turns, write_run

#: A break, a branch off an earlier turn, and a retry: prompts that only the right parent rebuilds.
ODD = [
    [([1, 2], [10, 11]), ([1, 2, 99, 3], [12]), ([1, 2, 99, 3, 12, 4], [13])],
    [([1, 5], [9, 2]), ([1, 5, 9, 2, 30], [7, 2]), ([1, 5, 9, 2, 31], [8, 2]), ([1, 5, 9, 2, 30, 7, 2, 6], [4])],
    [([1, 5], [77, 2]), ([1, 5], [78, 2]), ([1, 5, 77, 2, 8], [3])],
]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A run of one rollout."""
    return write_run(tmp_path / "small", [rollout("a", 0, 0.0, two_turns(1, 50))])


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int | None:
    """Standard output is a terminal of so many columns, or a pipe."""
    columns: int | None = request.param
    if columns is not None:
        monkeypatch.setenv("TERM", "dumb")
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    return columns
