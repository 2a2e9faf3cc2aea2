"""Rollouts in other projects' JSON lines: recognised and read wherever a path to rollouts is taken.

What always holds: the store knows no format but its own; ``gymdata.api`` registers the others, and nothing of them is
loaded before a file is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from gymdata.errors import DataError

if TYPE_CHECKING:
    from gymdata.store.paths import Source

_LOOKED_AT = 20


class Foreign(NamedTuple):
    """A format: whether a line is one of its rows, and the rollouts rows of a file (arrays are numpy, times are text)."""

    name: str
    recognise: Callable[[bytes], bool]
    rows: Callable[[Source], Iterator[Mapping[str, Any]]]


_formats: list[Foreign] = []


def register(kind: Foreign) -> None:
    """Make a format known. A second one of the same name replaces the first."""
    _formats[:] = [*(f for f in _formats if f.name != kind.name), kind]


def foreign_format(source: Source) -> Foreign | None:
    """The format of a JSON lines file that is not ours, by one of its first lines."""
    if source.kind != "jsonl" or not _formats:
        return None
    from gymdata.store.lines import iter_lines

    try:
        for _, line in islice(iter_lines(source), _LOOKED_AT):
            if found := next((f for f in _formats if f.recognise(line)), None):
                return found
    except (DataError, OSError):
        # Whoever reads the file says what is wrong with it.
        return None
    return None
