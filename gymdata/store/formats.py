"""Which format of another project a file is in. Every command that reads JSON lines asks here.

Formats are files of ``gymdata/interop/formats/`` and entry points of the group ``gymdata.formats``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

from gymdata.errors import DataError
from gymdata.registry import Registry
from gymdata.store.lines import decode, iter_lines
from gymdata.store.paths import Source

#: Rows that are looked at.
_LOOKED_AT = 20


class ForeignFormat:
    """What reading needs to know of a format; formats are subclasses of ``gymdata.interop.formats.Format``."""

    #: What a file of this format holds, for messages: "ATIF trajectories".
    content: ClassVar[str] = ""
    #: A file in whose first rows none of these bytes occurs is not in this format. Empty: it is never imported.
    marks: ClassVar[tuple[bytes, ...]] = ()
    #: Whether it is answers or preferences as text, without token ids.
    holds_text: ClassVar[bool] = False
    #: Whether commands read its rollouts without an import.
    read_in_place: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self.name = name

    def recognise(self, value: Any) -> bool:
        """Whether a JSON value, a row or a whole file, is in this format."""
        raise NotImplementedError

    def rollouts(self, source: Source) -> Iterator[Mapping[str, Any]]:
        """The rollouts rows of a file that is read in place (arrays are numpy, times are text)."""
        raise NotImplementedError


FORMATS: Registry[type[ForeignFormat]] = Registry("format", "gymdata.interop.formats", "gymdata.formats")


def head(source: Source) -> list[bytes]:
    """The first lines of a JSON lines file that are not blank."""
    return [line for _, line in islice(iter_lines(source), _LOOKED_AT)]


def format_of(source: Source) -> ForeignFormat | None:
    """The format of a file, by its first rows or the one value that it is; None for gymdata's own, for one that is not
    known, and for a file that cannot be read."""
    if source.kind != "jsonl":
        return None
    try:
        lines = head(source)
        known = [entry.object(entry.name) for entry in FORMATS]
        formats = [one for one in known if any(mark in line for mark in one.marks for line in lines)]
        if formats:
            for value in _values(source, lines):
                for one in formats:
                    if one.recognise(value):
                        return one
    except (DataError, OSError):
        # The reader reports what is wrong with the file.
        return None
    return None


def _values(source: Source, lines: Sequence[bytes]) -> Iterator[Any]:
    """The values of ``lines``, or of the whole file when its first line is not one."""
    whole = False
    for number, line in enumerate(lines):
        try:
            yield decode(line)
        except ValueError:
            whole = whole or number == 0
    if whole:
        try:
            yield decode(b"\n".join(line for _, line in iter_lines(source)))
        except ValueError:
            return
