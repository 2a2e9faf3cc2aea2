"""Items that are made in threads come in order, faults in their place, and a caller that stops is not kept waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from gymdata.workers.tuning import ahead


def test_items_come_in_order():
    """What another thread makes is what this one would have made, and ends where it ends."""
    assert list(ahead(iter(range(50)), depth=2)) == list(range(50))
    assert list(ahead(iter(()))) == []


def test_a_fault_is_raised_in_its_place():
    """Items before it are given, and the fault is the one that was raised."""

    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("third")

    made = ahead(items())
    assert [next(made), next(made)] == [1, 2]
    with pytest.raises(KeyError, match="third"):
        next(made)


def test_a_caller_that_stops_leaves_no_thread():
    """Closing ends the thread; no more than the items under way were made."""
    made, before = [], threading.active_count()

    def items() -> Iterator[int]:
        for k in range(1000):
            made.append(k)
            yield k

    taken = ahead(items(), depth=2)
    assert next(taken) == 0
    taken.close()
    assert threading.active_count() == before
    assert len(made) <= 4
