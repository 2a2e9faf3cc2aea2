"""Which format of another project a file is in. Every command that reads JSON lines asks here.

Formats are files of ``gymdata/interop/formats/`` and entry points of the group ``gymdata.formats``.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar

from gymdata.errors import DataError
from gymdata.registry import Registry
from gymdata.rollouts.messages import RolloutRow
from gymdata.store.lines import decode, iter_lines
from gymdata.store.paths import Source

#: Rows that are looked at.
_LOOKED_AT = 20
#: Columns of gymdata's own tables.
OWN = frozenset({"rollout_id", "pair_id", "comparison_id", "policy_hash", "rollout_index"})


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
    #: Whether rows of other formats have its columns as well: those are asked first.
    general: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self.name = name

    def recognise(self, value: Any) -> bool:
        """Whether a JSON value, a row or a whole file, is in this format."""
        raise NotImplementedError

    def refused(self, source: Source, wanted: str) -> DataError:
        """The error of a command that reads ``wanted`` from a file of this format."""
        trains = "; the training commands take it as it is" if self.holds_text else ""
        hint = f"`gymdata import {shlex.quote(str(source.path))} -o RUN` reads it{trains}"
        content = self.content + " as text" * self.holds_text
        return DataError(f"{source.path}: contains {content}, expected {wanted}", hint=hint)

    def rollouts(self, source: Source) -> Iterator[RolloutRow]:
        """The rollouts rows of a file that is read in place (arrays are numpy, times are text)."""
        raise NotImplementedError


FORMATS: Registry[type[ForeignFormat]] = Registry("format", "gymdata.interop.formats", "gymdata.formats")


def head(source: Source) -> list[bytes]:
    """The first lines of a JSON lines file that are not blank."""
    return [line for _, line in islice(iter_lines(source), _LOOKED_AT)]


def format_of(source: Source) -> ForeignFormat | None:
    """The format of a file, by its first rows or the one value that it is; None for gymdata's own, for one that is not
    known, and for a file that cannot be read."""
    if source.kind == "journal":
        return None
    try:
        known = sorted((entry.object(entry.name) for entry in FORMATS), key=lambda one: one.general)
        if source.kind == "parquet":
            values: Iterable[Any] = _rows(source)
            formats = [one for one in known if one.marks] if values else []
        else:
            lines = head(source)
            formats = [one for one in known if any(mark in line for mark in one.marks for line in lines)]
            values = _values(source, lines)
        for value in values if formats else ():
            if (found := next((one for one in formats if one.recognise(value)), None)) is not None:
                return found
            if isinstance(value, dict) and not OWN.isdisjoint(value):
                return None
    except (DataError, OSError, ValueError):  # Arrow's errors of a Parquet file are ValueErrors
        # The reader reports what is wrong with the file.
        return None
    return None


def _values(source: Source, lines: Sequence[bytes]) -> Iterator[Any]:
    """The values of ``lines``, or of the whole file when its first line is not one; after a list the first of its rows."""
    whole = False
    for number, line in enumerate(lines):
        try:
            value = decode(line)
        except ValueError:
            whole = whole or number == 0
        else:
            yield from (value, *(value[:_LOOKED_AT] if isinstance(value, list) else ()))
    if whole:
        with contextlib.suppress(ValueError):
            value = decode(b"\n".join(line for _, line in iter_lines(source)))
            yield from (value, *(value[:_LOOKED_AT] if isinstance(value, list) else ()))


def _rows(source: Source) -> list[Any]:
    """The first rows of a Parquet file, without their empty columns; none of gymdata's own."""
    from gymdata.remote.reading import parquet_file

    with parquet_file(source.path) as file:
        if not OWN.isdisjoint(file.schema_arrow.names):
            return []
        batch = next(file.iter_batches(_LOOKED_AT), None)
        rows = batch.to_pylist() if batch is not None else []
    return [{name: cell for name, cell in row.items() if cell is not None} for row in rows]
