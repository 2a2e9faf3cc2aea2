"""JSON values of a file: one document over many lines, or one a line.

Invariants: a value that is no JSON is told with its line and hides no other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from gymdata.interop.nemo_gym.read import ODD as ODD
from gymdata.interop.nemo_gym.read import Check as Check
from gymdata.interop.nemo_gym.read import Reject as Reject
from gymdata.interop.nemo_gym.read import Rejected as Rejected
from gymdata.interop.nemo_gym.read import reason_of
from gymdata.store.lines import decode, iter_lines
from gymdata.store.paths import Source


class BadItem(Exception):  # noqa: N818 - caught nearby, never shown as an error
    """Why a trajectory or pair cannot be used: the code and the reason."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason

    @classmethod
    def of(cls, error: Exception) -> BadItem:
        """``error``, or the bad item that one of ``ODD`` makes of its row."""
        return error if isinstance(error, BadItem) else cls("S102", reason_of(error))


def documents(source: Source) -> Iterator[tuple[int, Any, bytes]]:
    """(line, value, text) of each document; the value is a BadItem where the text is no JSON. Line 1 is the whole file
    when that is one document."""
    lines = iter_lines(source)
    first = next(lines, None)
    if first is None:
        return
    try:
        decode(first[1])
    except ValueError:
        # Either one document over several lines, or lines of which the first is bad.
        rest = list(lines)
        whole = b"\n".join(line for _, line in (first, *rest))
        try:
            yield 1, decode(whole), whole[:1000]
            return
        except ValueError:
            lines = iter(rest)
    for number, line in itertools.chain([first], lines):
        try:
            value = decode(line)
        except ValueError as error:
            value = BadItem("S101", f"no JSON: {error}")
        yield number, value, line


def first_value(source: Source) -> Any:
    """The first document that is JSON; None when there is none."""
    return next((value for _, value, _ in documents(source) if not isinstance(value, BadItem)), None)
