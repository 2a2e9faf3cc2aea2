"""Files of a few rows have several batches and row groups, so that there is something to divide."""

from __future__ import annotations

import pytest

from gymdata.store import tables


@pytest.fixture(autouse=True)
def _in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read at a time is a few rows, and a row group of what is written is, too."""
    monkeypatch.setattr(tables.ParquetSink, "group_tokens", 150)
    monkeypatch.setattr(tables, "PARSE_BYTES", 20_000)
