"""Python's search for reference cycles, made rarer while many objects live for a moment."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

#: Net allocations before a search of the youngest objects, and how many of these before one of the next older.
_THRESHOLDS = (100_000, 20, 100)


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Requests in flight, and rows that are read, are many objects that live for a moment and form no cycles. Searched every
    700 of them, as Python does by itself, they cost a collecting process a fifth of its time, on a processor for which the
    engine waits, and an import a tenth."""
    before = gc.get_threshold()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
