"""Chat messages as JSON lines, built a batch at a time from Arrow columns.

A column of texts is JSON-escaped by one call. A line is the concatenation of numbered *pieces*: escaped texts, and
fragments of JSON such as ``,"content":"``.

Invariants: a line has the bytes that orjson writes for its messages as dicts; Python objects are made of distinct roles,
tool calls and tools, never of each message. Values that JSON cannot hold raise the errors of orjson and Python's json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from gymdata.rollouts.messages import has_long_number, loads, object_of, parsed
from gymdata.rollouts.ragged import Array, Ints, Ragged, list_parts, offsets_of
from gymdata.store.lines import encode_finite, name_non_finite

if TYPE_CHECKING:
    import pyarrow as pa

Mask = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int32]
#: What precedes a message in its line: nothing, another message, or the end of the prompt.
FIRST, NEXT, COMPLETION = range(3)
_LEADS = (b"", b",", b'],"completion":[')
#: How the value of "content" begins: with a text; null, before tool calls; an empty text, with neither.
_CONTENTS = (b'"', b'null,"tool_calls":', b'""')


class Lines(NamedTuple):
    """``text``: the JSON lines of ``rows`` rows, UTF-8, each with its newline."""

    rows: int
    text: pa.Buffer


@dataclass(frozen=True, slots=True)
class Shape:
    """The fields that a format gives a message. ``texts``: (column, key) of texts that a message may lack; ``roles``: the
    roles of the format, others become "user" (None: any role); ``calls``: converts a list of tool calls."""

    texts: Sequence[tuple[str, str]]
    roles: frozenset[str] | None = None
    calls: Callable[[list[Any]], Any] = list

    def lacks(self, role: str) -> bool:
        return self.roles is not None and role not in self.roles


class Pieces:
    """Pieces of JSON text, numbered from 0 as they are added."""

    def __init__(self) -> None:
        self._data: list[bytes] = []
        self._offsets: list[Ints] = []
        self._size = self._count = 0
        self._short: list[bytes] = []

    def add(self, texts: Sequence[bytes]) -> int:
        """Add each text as one piece; returns the number of the first."""
        first = self._count + len(self._short)
        self._short += texts
        return first

    def add_column(self, column: pa.StringArray) -> Numbers:
        """Add each text of a column, JSON-escaped, without quotation marks. Returns the piece of each, (n,), −1 for null."""
        if column.null_count == len(column):
            return np.full(len(column), -1, np.int32)
        first = self._append(*_escape(column))
        number = np.arange(first, first + len(column), dtype=np.int32)
        return where(_mask(column.is_valid()), number)

    def joined(self, order: Numbers) -> pa.Buffer:
        """The pieces numbered ``order``, (k,), as one text."""
        import pyarrow as pa

        self._flush()
        # 64-bit offsets: several columns are joined, each of up to 2³¹ bytes.
        offsets, data = np.concatenate(self._offsets), b"".join(self._data)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        selected = pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers).take(pa.array(order))
        _, ends, text = selected.buffers()
        return text.slice(0, int(np.frombuffer(ends, np.int64)[len(order)]))

    def _flush(self) -> None:
        short, self._short = self._short, []
        if short:
            self._append(b"".join(short), offsets_of([len(text) for text in short]))

    def _append(self, data: bytes, offsets: Ints) -> int:
        self._flush()
        first = self._count
        self._data.append(data)
        self._offsets.append(offsets + self._size)
        self._size += len(data)
        # One more than there are pieces: the gap before the next append has a number, too, which is never used.
        self._count += len(offsets)
        return first


class Chat:
    """A column of messages: n rows with m messages in all; ``offsets``: where each row's messages begin, (n + 1,)."""

    def __init__(self, column: pa.ListArray, shape: Shape) -> None:
        self.offsets, self._flat = list_parts(column)
        self._shape = shape
        self._roles, self._role_codes = distinct(self._flat.field("role"))
        self._calls, self._call_codes = distinct(self._flat.field("tool_calls"))

    def of_role(self, chosen: Callable[[str], bool]) -> Mask:
        """(m,) the messages for whose role ``chosen`` returns True."""
        return np.array([*map(chosen, self._roles), False])[self._role_codes]

    def sampled(self) -> Mask:
        """(m,) the messages with tool calls that the policy generated in a turn."""
        return np.array([*map(bool, self._calls), False])[self._call_codes] & self.not_null("turn")

    def untrained(self) -> Mask:
        """(m,) the assistant's messages that their source does not train."""
        texts, codes = distinct(self._flat.field("extra"))
        is_untrained = [object_of(loads(text)).get("weight") == 0 for text in texts]
        return np.array([*is_untrained, False])[codes] & self.of_role("assistant".__eq__)

    def not_null(self, name: str) -> Mask:
        """(m,) the messages whose column ``name`` is not null."""
        return _mask(self._flat.field(name).is_valid())

    def rows(self, messages: Mask) -> Mask:
        """(n,) the rows with at least one of ``messages``, (m,)."""
        return np.asarray(Ragged(messages, self.offsets).sums(messages) > 0)

    def leads(self) -> Numbers:
        """(m,) FIRST or NEXT: what precedes each message when the messages of a row are one list."""
        leads = np.full(len(self._flat), NEXT, np.int32)
        leads[self.offsets[:-1][np.diff(self.offsets) > 0]] = FIRST
        return leads

    def pieces(self, pieces: Pieces, leads: Numbers) -> Ragged:
        """Adds the messages to ``pieces``; returns the numbers of each row's pieces, n lists. ``leads``: (m,), FIRST, NEXT
        or COMPLETION per message."""
        content, *texts = (
            pieces.add_column(self._flat.field(name)) for name in ("content", *(n for n, _ in self._shape.texts))
        )
        calls = add_lists(pieces, self._calls, self._call_codes, self._shape.calls)
        has_text, has_calls = content >= 0, calls >= 0
        roles = ["user" if self._shape.lacks(role) else role for role in self._roles]
        heads = pieces.add(
            [
                lead + b'{"role":' + orjson.dumps(role) + b',"content":' + begins
                for lead, role, begins in product(_LEADS, roles, _CONTENTS)
            ]
        )
        # Indices into `_CONTENTS` of a message with neither, with calls alone, with text alone, with both.
        begins = np.array([2, 1, 0, 0], np.int32)[2 * has_text.view(np.uint8) + has_calls.view(np.uint8)]
        head = heads + (leads * len(roles) + self._role_codes) * len(_CONTENTS) + begins
        columns = [head, content, where(has_text & has_calls, pieces.add([b'","tool_calls":'])), calls]
        quoted = has_text & ~has_calls
        for text, (_, key) in zip(texts, self._shape.texts, strict=True):
            has = text >= 0
            if has.any():
                opened = b',"%b":"' % key.encode()
                columns += [where(has, pieces.add([opened, b'"' + opened]) + quoted.astype(np.int32)), text]
                quoted |= has
        end = pieces.add([b"}", b'"}', b',"weight":0}', b'","weight":0}'])
        columns.append(end + quoted.astype(np.int32) + 2 * self.untrained())
        return by_message(columns, self.offsets)


def where(has: Mask, numbers: Array | int) -> Numbers:
    """(k,) ``numbers`` where ``has``, (k,), is True, else −1."""
    return np.where(has, numbers, -1).astype(np.int32, copy=False)


def by_message(columns: Sequence[Array], offsets: Ints) -> Ragged:
    """The numbers of all ``columns``, each (m,), message by message and without −1. List i of the result has those of the
    messages ``offsets[i]`` to ``offsets[i + 1]``."""
    numbers = np.stack(columns, axis=1).ravel()
    positions = np.flatnonzero(numbers >= 0)
    return Ragged(numbers[positions], np.searchsorted(positions, offsets * len(columns)))


def distinct(column: pa.StringArray) -> tuple[list[str], Numbers]:
    """The distinct texts of a column, and the index of each row's, (n,), −1 where it is null."""
    encoded = column.dictionary_encode()
    return encoded.dictionary.to_numpy(zero_copy_only=False).tolist(), encoded.indices.fill_null(-1).to_numpy()


def add_lists(pieces: Pieces, texts: list[str], codes: Numbers, convert: Callable[[list[Any]], Any] = list) -> Numbers:
    """Adds JSON lists, each ``convert``-ed, as pieces. ``texts``, ``codes``: a column of JSON texts as ``distinct`` returns
    it. Returns the piece of each row, (n,), −1 where its text is not a list of JSON, or an empty one."""
    # One search of all texts: hardly any has such a number.
    long = has_long_number("".join(texts).encode())
    values = map(parse if long else _parse_short, texts)
    converted = [encode_finite(convert(value)) if isinstance(value, list) and value else b"" for value in values]
    first = pieces.add(converted)
    return np.array([first + k if text else -1 for k, text in enumerate(converted)] + [-1], np.int32)[codes]


def parse(text: str) -> Any:
    """The value of a JSON text, with non-finite numbers as strings; None when it is not JSON."""
    try:
        value, plain = parsed(text)
    except (ValueError, RecursionError):
        return None
    try:
        return value if plain else name_non_finite(value)
    except RecursionError:
        # Nested too deeply for every writer, whose error then names the row.
        return value


def _parse_short(text: str) -> Any:
    """``parse`` for a text without long numbers."""
    try:
        return orjson.loads(text)
    except ValueError:
        return parse(text)


def _escape(column: pa.StringArray) -> tuple[bytes, Ints]:
    """The texts of a column as one JSON string, and where each begins in it and the last ends, (n + 1,).

    Raises ValueError for text that is not UTF-8.
    """
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    raw = np.frombuffer(column.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
    starts = offsets.astype(np.int64) - offsets[0]
    text = str(raw.data, "utf-8")
    if not text.isascii() and (raw[starts[starts < len(raw)]] & 0xC0 == 0x80).any():
        raise ValueError("text that is not UTF-8: it begins inside a character")
    literal = orjson.dumps(text)
    if len(literal) != len(raw) + 2:
        escaped = np.frombuffer(literal, np.uint8)
        slash = np.flatnonzero(escaped == ord("\\"))
        # A backslash may itself be escaped: in a run of them, every other one begins an escape.
        index = np.arange(len(slash))
        run_start = np.maximum.accumulate(np.where(np.diff(slash, prepend=-2) > 1, index, 0))
        slash = slash[np.flatnonzero((index - run_start) % 2 == 0)]
        added = offsets_of(np.where(escaped[slash + 1] == ord("u"), 5, 1))
        # A position moves by what the escapes before it added. In raw positions, escape k is at slash − added − 1, for the
        # quotation mark.
        starts += added[np.searchsorted(slash - added[:-1] - 1, starts)]
    # Past the opening quotation mark.
    return literal, starts + 1


def _mask(array: pa.BooleanArray) -> Mask:
    mask: Mask = array.to_numpy(zero_copy_only=False)
    return mask
