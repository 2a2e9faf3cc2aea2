"""A forked child makes items while its parent works, and ends with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from gymdata.workers.forked import in_child


def test_items_come_in_order_from_another_process() -> None:
    """Large ones, too, which do not fit into a pipe."""
    with in_child((os.getpid(), bytes([k]) * 200_000) for k in range(5)) as items:
        made = list(items)
    assert [text[0] for _, text in made] == [0, 1, 2, 3, 4]
    assert os.getpid() not in {process for process, _ in made}


def _failing() -> Iterator[int]:
    yield 1
    raise ValueError("no second")


def test_what_the_child_raises_is_raised_after_its_items() -> None:
    """Nothing that it made is lost."""
    with in_child(_failing()) as items:
        assert next(items) == 1
        with pytest.raises(ValueError, match="no second"):
            next(items)


def _killed() -> Iterator[int]:
    yield 1
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_child_that_is_killed_is_no_end_of_its_items() -> None:
    """The items that it did not make would be missing in silence."""
    with in_child(_killed()) as items, pytest.raises(RuntimeError, match="was killed before its work was done"):
        list(items)


def test_a_parent_that_stops_early_leaves_no_child() -> None:
    """Its child ends when it has no reader."""
    with in_child((os.getpid(), bytes(100_000)) for _ in range(10**9)) as items:
        child, _ = next(items)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
