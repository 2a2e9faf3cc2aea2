"""Rollouts in other projects' JSON lines: recognised and read wherever a path to rollouts is taken.

Invariant: the store knows no format but its own; the others are named in one table, and nothing of them is loaded before a
file is looked at.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
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


#: Name → the module that has its ``recognise`` and the one that has its ``table_rows``; imported when a file is looked at.
_FORMATS = {"nemo-gym": ("gymdata.interop.nemo_gym.scan", "gymdata.interop.nemo_gym.read")}


def _formats() -> list[Foreign]:
    return [
        Foreign(name, importlib.import_module(scan).recognise, partial(_rows, read))
        for name, (scan, read) in _FORMATS.items()
    ]


def _rows(module: str, source: Source) -> Iterator[Mapping[str, Any]]:
    rows: Iterator[Mapping[str, Any]] = importlib.import_module(module).table_rows([source])
    return rows


def foreign_format(source: Source) -> Foreign | None:
    """The format of a JSON lines file that is not ours, by one of its first lines."""
    if source.kind != "jsonl":
        return None
    from gymdata.store.lines import iter_lines

    formats = _formats()

    try:
        for _, line in islice(iter_lines(source), _LOOKED_AT):
            if found := next((f for f in formats if f.recognise(line)), None):
                return found
    except (DataError, OSError):
        # Whoever reads the file says what is wrong with it.
        return None
    return None
