"""Messages as lines of JSON, a batch at a time: texts are spelled a column at once, and lines put together from numbered
pieces of what that gives.

Invariants: a line says what orjson would write of its messages as dicts; no Python object is made of a message or of its
text, only of what differs (roles, tool calls, tools). What JSON cannot hold raises what orjson and Python's json raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from gymdata.rollouts.messages import has_long_number, parsed
from gymdata.rollouts.ragged import Array, Ints, Ragged, list_parts, offsets_of
from gymdata.store.lines import encode_finite, spelled

if TYPE_CHECKING:
    import pyarrow as pa

Mask = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int32]
#: What stands before a message: nothing, another one, or the end of the prompt.
FIRST, NEXT, COMPLETION = range(3)
_LEADS = (b"", b",", b'],"completion":[')
#: JSON's spelling of NUL, which hardly any text has; as a text of its own it separates others.
_NUL = "\\u0000"
_BETWEEN = f',"{_NUL}",'
#: Content: a text, null beside calls, or nothing.
_CONTENTS = (b'"', b'null,"tool_calls":', b'""')


class Lines(NamedTuple):
    """``text``: JSON lines with their ends, of so many ``rows``."""

    rows: int
    text: pa.Buffer


@dataclass(frozen=True, slots=True)
class Shape:
    """How a format has messages. ``texts``: the columns of texts that a message may lack, and their keys; ``roles``: those
    that it knows, others become "user" (None: all); ``calls``: what it makes of the value of tool calls."""

    texts: Sequence[tuple[str, str]]
    roles: frozenset[str] | None = None
    calls: Callable[[list[Any]], Any] = list

    def lacks(self, role: str) -> bool:
        return self.roles is not None and role not in self.roles


class Heap:
    """Pieces of JSON, numbered as they are added."""

    def __init__(self) -> None:
        self._data: list[bytes] = []
        self._offsets: list[Ints] = []
        self._size = self._count = 0
        self._short: list[bytes] = []

    def add(self, texts: Sequence[bytes]) -> int:
        """Pieces as they are; returns the number of the first."""
        first = self._count + len(self._short)
        self._short += texts
        return first

    def spelled(self, column: pa.StringArray) -> Numbers:
        """The texts of a column without their quotation marks; returns the number of each, −1 where it is null."""
        if column.null_count == len(column):
            return np.full(len(column), -1, np.int32)
        first = self._append(*_spelled(column))
        number = np.arange(first, first + len(column), dtype=np.int32)
        return only(_mask(column.is_valid()), number)

    def joined(self, order: Numbers) -> pa.Buffer:
        """The pieces with these numbers, one after the other."""
        import pyarrow as pa

        self._flush()
        # 64 bits: the texts of several columns are here, each of up to 2³¹ bytes.
        offsets, data = np.concatenate(self._offsets), b"".join(self._data)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        made = pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers).take(pa.array(order))
        _, ends, text = made.buffers()
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
        # What lies between the last piece of these and the next one's has a number, too.
        self._count += len(offsets)
        return first


class Chat:
    """A column of messages: n rows with m messages."""

    def __init__(self, column: pa.ListArray, shape: Shape) -> None:
        self.offsets, self._flat = list_parts(column)
        self._shape = shape
        self._roles, self._role = distinct(self._flat.field("role"))
        self._calls, self._call = distinct(self._flat.field("tool_calls"))

    def of_role(self, chosen: Callable[[str], bool]) -> Mask:
        """(m,) the messages whose role is ``chosen``."""
        return np.array([*map(chosen, self._roles), False])[self._role]

    def sampled(self) -> Mask:
        """(m,) the messages with tool calls that a turn wrote."""
        return np.array([*map(bool, self._calls), False])[self._call] & self.known("turn")

    def known(self, name: str) -> Mask:
        """(m,) the messages in which a column is not null."""
        return _mask(self._flat.field(name).is_valid())

    def rows(self, messages: Mask) -> Mask:
        """(n,) the rows with one of these messages."""
        return np.asarray(Ragged(messages, self.offsets).sums(messages) > 0)

    def leads(self) -> Numbers:
        """(m,) what stands before each message where a row's are one list."""
        leads = np.full(len(self._flat), NEXT, np.int32)
        leads[self.offsets[:-1][np.diff(self.offsets) > 0]] = FIRST
        return leads

    def pieces(self, heap: Heap, leads: Numbers) -> Ragged:
        """The pieces of each row's messages."""
        content, *texts = (
            heap.spelled(self._flat.field(name)) for name in ("content", *(n for n, _ in self._shape.texts))
        )
        calls = written(heap, self._calls, self._call, self._shape.calls)
        has_text, has_calls = content >= 0, calls >= 0
        roles = ["user" if self._shape.lacks(role) else role for role in self._roles]
        heads = heap.add([
            lead + b'{"role":' + orjson.dumps(role) + b',"content":' + begun
            for lead, role, begun in product(_LEADS, roles, _CONTENTS)
        ])  # fmt: skip
        # Of `_CONTENTS`: nothing, calls alone, text alone, text and calls.
        begun = np.array([2, 1, 0, 0], np.int32)[2 * has_text.view(np.uint8) + has_calls.view(np.uint8)]
        head = heads + (leads * len(roles) + self._role) * len(_CONTENTS) + begun
        columns = [head, content, only(has_text & has_calls, heap.add([b'","tool_calls":'])), calls]
        quoted = has_text & ~has_calls
        for text, (_, key) in zip(texts, self._shape.texts, strict=True):
            has = text >= 0
            if has.any():
                opened = b',"%b":"' % key.encode()
                columns += [only(has, heap.add([opened, b'"' + opened]) + quoted.astype(np.int32)), text]
                quoted |= has
        columns.append(heap.add([b"}", b'"}']) + quoted.astype(np.int32))
        return present(columns, self.offsets)


def only(has: Mask, numbers: Array | int) -> Numbers:
    """``numbers`` where ``has`` is true, else −1."""
    made = np.full(len(has), -1, np.int32)
    np.copyto(made, numbers, where=has)
    return made


def present(columns: Sequence[Array], offsets: Ints) -> Ragged:
    """The numbers that are not −1, message by message; ``offsets``: where lists of messages begin and end."""
    made = np.stack(columns, axis=1).ravel()
    at = np.flatnonzero(made >= 0)
    return Ragged(made[at], np.searchsorted(at, offsets * len(columns)))


def distinct(column: pa.StringArray) -> tuple[list[str], Numbers]:
    """The different texts of a column, and which of them each row has; −1 where it is null."""
    encoded = column.dictionary_encode()
    return encoded.dictionary.to_numpy(zero_copy_only=False).tolist(), encoded.indices.fill_null(-1).to_numpy()


def written(heap: Heap, texts: list[str], code: Numbers, make: Callable[[list[Any]], Any] = list) -> Numbers:
    """The piece of each row of a ``distinct`` column of JSON: what is made of its list, −1 where that is none, or empty."""
    # Looked for in all of them at once, what hardly any has.
    long = has_long_number("".join(texts).encode())
    made = None if long else _together(texts, make)
    if made is None:
        values = map(finite if long else _plain, texts)
        made = [encode_finite(make(value)) if isinstance(value, list) and value else b"" for value in values]
    first = heap.add(made)
    return np.array([first + k if text else -1 for k, text in enumerate(made)] + [-1], np.int32)[code]


def _together(texts: list[str], make: Callable[[list[Any]], Any]) -> list[bytes] | None:
    """What is made of each text, by one call of orjson each way. None where one is no JSON, or has what separates them."""
    joined = _BETWEEN.join(texts)
    if joined.count(_NUL) != len(texts) - 1:
        return None
    try:
        values = orjson.loads(f"[{joined}]")
        # So each text is one value: in a longer one a separator would lie inside.
        if values[1::2] != ["\0"] * (len(texts) - 1) or len(values) != 2 * len(texts) - 1:
            return None
        values[::2] = [make(value) if isinstance(value, list) and value else None for value in values[::2]]
        made = orjson.dumps(values)[1:-1].split(_BETWEEN.encode())
    except (ValueError, TypeError):
        return None
    return [b"" if text == b"null" else text for text in made]


def finite(text: str) -> Any:
    """The value of JSON text, numbers that are not finite spelled; None when it is no JSON."""
    try:
        value, plain = parsed(text)
    except (ValueError, RecursionError):
        return None
    try:
        return value if plain else spelled(value)
    except RecursionError:
        # Too deep for any writer, which then names its row.
        return value


def _plain(text: str) -> Any:
    """The same of a text without long numbers."""
    try:
        return orjson.loads(text)
    except ValueError:
        return finite(text)


def _spelled(column: pa.StringArray) -> tuple[bytes, Ints]:
    """JSON's spelling of all texts as one, and where each is in it. Raises ValueError for what is not UTF-8."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    raw = np.frombuffer(column.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
    at = offsets.astype(np.int64) - offsets[0]
    text = str(raw.data, "utf-8")
    if not text.isascii() and (raw[at[at < len(raw)]] & 0xC0 == 0x80).any():
        raise ValueError("text that is not UTF-8: a character that begins in another text")
    made = orjson.dumps(text)
    if len(made) != len(raw) + 2:
        spelled = np.frombuffer(made, np.uint8)
        slash = np.flatnonzero(spelled == ord("\\"))
        # One escapes what follows it, and what it escapes may be another one: of those side by side, every other one.
        number = np.arange(len(slash))
        begins = np.maximum.accumulate(np.where(np.diff(slash, prepend=-2) > 1, number, 0))
        slash = slash[np.flatnonzero((number - begins) % 2 == 0)]
        longer = offsets_of(np.where(spelled[slash + 1] == ord("u"), 5, 1))
        # What is escaped stands before the text's own places by what was added until then, and the quotation mark.
        at += longer[np.searchsorted(slash - longer[:-1] - 1, at)]
    return made, at + 1


def _mask(array: pa.BooleanArray) -> Mask:
    found: Mask = array.to_numpy(zero_copy_only=False)
    return found
