"""Shared by all formats that are imported: the documents of a file, rows that cannot be used, and the identity of each row's
rollout.

Invariants: a value that is no JSON is reported with its line and hides no other; a row of tokens that repeats an earlier
one, byte for byte or with the id that its source gave it, is the same rollout and gets the same index, so that the imported
run shows the duplicate (D701) as its file does.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from gymdata.errors import DataError
from gymdata.rollouts.messages import JsonObject as JsonObject
from gymdata.rollouts.messages import Message
from gymdata.rollouts.messages import TableRow as TableRow
from gymdata.store.lines import RepeatedKeyError, values_of
from gymdata.store.paths import Source

#: What begins the reason of a text that is no JSON.
NO_JSON = "no JSON: "
#: What unforeseen JSON values raise: the fault of their row, never of the whole import.
ODD = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, DataError)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row that cannot be a rollout: its file and 1-based line, why, and how it begins."""

    file: Path
    line: int
    code: str
    reason: str
    text: str


Reject = Callable[[Rejected], None]


class Origin(NamedTuple):
    """Where a row is: its file, 1-based line, and its place in a line that holds several, as it is put before a reason."""

    file: Path
    line: int
    place: str = ""

    def __str__(self) -> str:
        return f"{self.file} line {self.line}" + (f", {self.place.removesuffix(': ')}" if self.place else "")


class BadItem(Exception):  # noqa: N818 - caught nearby, never shown as an error
    """Why a trajectory or pair cannot be used: the code and the reason."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason

    @classmethod
    def value(cls, where: str, got: object, expected: str, code: str = "S102") -> BadItem:
        """A value that is not ``expected``."""
        shown = "null" if got is None else f"{got!r:.60}"
        return cls(code, f"{where}: got {shown}, expected {expected}")

    @classmethod
    def of(cls, error: Exception) -> BadItem:
        """``error``, or the bad item that one of ``ODD`` makes of its row."""
        return error if isinstance(error, BadItem) else cls("S102", reason_of(error))


def reason_of(error: Exception) -> str:
    """Why one of ``ODD`` makes a row unusable, in words."""
    if isinstance(error, KeyError):
        return f"{error.args[0]}: is missing"
    return error.message if isinstance(error, DataError) else f"{type(error).__name__}: {error}"


def documents(source: Source) -> Iterator[tuple[int, Any, bytes]]:
    """(line, value, text) of each document; the value is a BadItem where the text is no JSON. Line 1 is the whole file
    when that is one document."""
    for number, value, text in values_of(source, exact=True):
        if isinstance(value, RepeatedKeyError):
            value = BadItem("S102", str(value))
        yield number, BadItem("S101", f"{NO_JSON}{value}") if isinstance(value, ValueError) else value, text


class CallIds(NamedTuple):
    """What a row has of the ids of a model call. ``is_whole``: all of them (None: none); ``missing``: what is missing where
    it is not whole; ``has_content``: whether the model wrote something in it, as far as the row says."""

    is_whole: bool | None
    missing: str
    has_content: bool


def has_content(message: Message) -> bool:
    """Whether a message has text, reasoning or tool calls. One without any field is not known, and counts as if."""
    text = (message.get("content") or "").strip()
    return not message or bool(text or message.get("reasoning") or message.get("tool_calls"))


def rollout_id_of(run: str, group: str, index: int) -> str:
    """The id of a row that has none of its own."""
    identity = json.dumps([run, group, index], ensure_ascii=False).encode()
    return hashlib.blake2b(identity, digest_size=16).hexdigest()


class Numbering:
    """Indices of the rows of one import, assigned in the order of the rows. ``text``: rows without tokens, of which one that
    repeats another is an example of its own, as in a data set that was put together."""

    def __init__(self, *, text: bool = False) -> None:
        self._text = text
        #: Hash of a row's content → the number of the first row that has it.
        self._first = dict[bytes, int]()
        #: Of each numbered row, its index in its group.
        self._indices = list[int]()
        self._sizes = Counter[str]()
        #: Group → hash of the first prompt that has it.
        self._prompts = dict[str, bytes]()

    def of_content(
        self, content: bytes, group: str | None, given: str = "", *, has_ids: bool = False
    ) -> tuple[str, int]:
        """(group, index in it) of a row. Without a ``group`` the row is a group of its own. ``given``: identifies the
        prompt of a row whose group is an id of its source; the id is the group of the first prompt that has it.
        ``has_ids``: the row has tokens, also where others of its format are text."""
        if group and given:
            # Files count from 0, each: the id may have been another prompt's before.
            prompt = xxhash.xxh3_128_digest(given.encode("utf-8", "surrogatepass"))[:6]
            group = group if self._prompts.setdefault(group, prompt) == prompt else f"{group}-{prompt.hex()}"
        new = len(self._indices)
        row = new if self._text and not has_ids else self._first.setdefault(xxhash.xxh3_128_digest(content), new)
        group = group or f"row-{row}"
        if row == new:
            self._indices.append(self._sizes[group])
            self._sizes[group] += 1
        return group, self._indices[row]


@dataclass(slots=True)
class Importing:
    """What rows get from their import, and what their format reports of them.

    ``reject``: gets rows that cannot be used (None: they raise DataError); ``keep_contradicting``: take pairs whose own
    scores prefer the rejected side.
    """

    run_id: str
    numbering: Numbering
    reject: Reject | None = None
    keep_contradicting: bool = False
    #: Field → column (``--map``).
    columns: Mapping[str, str] = field(default_factory=dict)
    #: File, line and place in the line of the row in hand.
    origin: tuple[str | int, ...] = ()
    #: Of each row that was read.
    origins: list[Origin] = field(default_factory=list)
    #: What is not read of rows → number of rows.
    unread: Counter[str] = field(default_factory=Counter)

    def turn_down(self, error: Exception, origin: Origin, value: Any) -> None:
        """Give a row that cannot be used to ``reject``. ``error``: a BadItem or one of ``ODD``; ``value``: the row, or its
        text. Raises DataError without a ``reject``."""
        bad, (file, line, place) = BadItem.of(error), origin
        reason = place + bad.reason
        if self.reject is None:
            why = f"one that cannot be imported ({bad.code}: {reason})"
            raise DataError.bad_row(file, line, None, why, "a rollout") from error
        is_text = isinstance(value, bytes)
        text = value.decode("utf-8", "replace") if is_text else json.dumps(value, ensure_ascii=False, default=str)
        self.reject(Rejected(file, line, bad.code, reason, text[:1000]))

    def check_ids(self, calls: Sequence[CallIds], column: str, *, is_own: bool = False) -> None:
        """``calls``: the model calls in the ``column`` of a row. ``is_own``: gymdata wrote the row, whose answers may be no
        turns.

        Raises BadItem for a call without all of its ids where others have theirs: what it sampled would be context of the
        next call, or not be trained. An end without ids in which nothing was written is no fault: no token was sampled, as
        when the prompt was too long. Where no call has all of its ids, those that there are are counted as not read."""
        last = max((number for number, call in enumerate(calls) if call.is_whole), default=None)
        if last is None:
            self.unread[_ids_in(column)] += any(call.is_whole is False for call in calls)
            return
        for number, call in enumerate(calls):
            is_lost = call.is_whole is None and not is_own and (number < last or call.has_content)
            if call.is_whole is False or is_lost:
                raise BadItem("T205", f"{call.missing}, and other model calls have their ids")

    def count_unread(self, row: JsonObject, column: str, *keys: str) -> None:
        """Count a row whose ``column`` is a list of steps with token ids, under one of these keys, that are not read."""
        steps = row[column] if isinstance(row.get(column), list) else []
        self.unread[_ids_in(column)] += any(isinstance(step, dict) and step.get(key) for step in steps for key in keys)


def _ids_in(column: str) -> str:
    return f"token ids in the `{column}`"
