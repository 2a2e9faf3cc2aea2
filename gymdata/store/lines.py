"""JSON lines: plain and compressed files, and non-finite numbers.

Invariants: a non-finite number is written as the string "NaN", "Infinity" or "-Infinity", because JSON has no literal
for it and a null would lose it; what Python's json writes for them (bare NaN) is read too. Needs no pyarrow.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from gymdata.errors import DataError
from gymdata.rollouts.messages import JsonObject
from gymdata.store.paths import BOM, Compression, Source, packed_as, resolve

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_UTC_Z
_BLOCK = 1 << 22
_LONG = re.compile(rb"[0-9]{20}")
#: Separators of the cells of a text table; where the first does not divide header and first row alike, the next is tried.
SEPARATORS = {".csv": ",;\t", ".tsv": "\t"}
#: The line by which Excel is told the separator of the lines below it.
_SEPARATOR_LINE = re.compile(r"sep=([,;\t])", re.IGNORECASE)


def encode(row: Any) -> bytes:
    """``row`` as one line of JSON without the newline. Arrays are numpy, contiguous; floats round-trip bit for bit.

    Raises TypeError (orjson's) for a value that JSON cannot hold, such as text that is not UTF-8.
    """
    line = orjson.dumps(row, option=_OPTIONS)
    # orjson writes a non-finite number as null. Arrays have no other nulls, so these show in the bytes; the few numbers
    # outside arrays are checked one by one.
    if b",null" in line or b"[null" in line or b'"log_prob":null' in line or _has_odd_number(row):
        return orjson.dumps(name_non_finite(row), option=_OPTIONS)
    return line


def encode_any(value: Any) -> bytes:
    """``value``, of any depth, as one line of JSON without the newline."""
    try:
        return orjson.dumps(name_non_finite(value), option=_OPTIONS)
    except TypeError:
        return _slowly(name_non_finite(value))


def encode_finite(value: Any) -> bytes:
    """The same for a value whose numbers are known to be finite."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return _slowly(value)


def _slowly(value: Any) -> bytes:
    """With Python's json, because orjson refuses integers of more than 64 bits. Raises TypeError or ValueError for what
    JSON cannot hold."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_values).encode()


def _values(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return array.tolist()
    raise TypeError(f"{type(array).__name__} is no value of JSON")


def decode(line: bytes, *, exact: bool = False) -> Any:
    """The value of a line. ``exact``: integers of more than 64 bits are kept; otherwise they become floats, as orjson
    reads them. Raises ValueError when it is not JSON, or nested deeper than can be read."""
    try:
        if exact and _LONG.search(line):
            raise orjson.JSONDecodeError("a number may be too long", "", 0)
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            return json.loads(line.decode("utf-8"))
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


class RepeatedKeyError(Exception):
    """An object of JSON has a key twice, which is the only argument."""


def unique_keys(pairs: list[tuple[str, Any]]) -> JsonObject:
    """An object of JSON, for ``json.loads``. Raises RepeatedKeyError."""
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedKeyError(next(name for name in names if names.count(name) > 1))
    return value


def decode_row(line: bytes) -> Any:
    """As ``decode``; an object that has a key twice raises RepeatedKeyError."""
    row, chars = decode(line), np.frombuffer(line, np.uint8)
    # A key ends with a quote and a colon; inside a text that quote is escaped.
    keys = left = int(np.count_nonzero((chars[2:] == ord(":")) & (chars[1:-1] == ord('"')) & (chars[:-2] != ord("\\"))))
    if type(row) is not dict:
        return row
    # What is deeper than the last of the keys is not looked at, nor are lists of tokens: a list whose first item is a
    # number has no keys.
    values: Iterable[Any] = [row]
    while left and (level := [v for v in values if type(v) is dict or type(v) is list]):
        lists = [v for v in level if type(v) is list and v and type(v[0]) in (dict, list)]
        objects = [v for v in level if type(v) is dict]
        left -= sum(map(len, objects))
        values = chain(*map(dict.values, objects), *lists)
    if left or not keys:
        with contextlib.suppress(ValueError, RecursionError):  # a reader that decodes it otherwise has read it
            json.loads(line, object_pairs_hook=unique_keys)
    return row


def iter_lines(source: Source) -> Iterator[tuple[int, bytes]]:
    """Each non-blank line with its 1-based number in the file. Raises DataError when the file cannot be read to its end."""
    number = 0
    try:
        for line in _raw_lines(source):
            if number == 0:
                line = line.removeprefix(BOM)
            number += 1
            if line and not line.isspace():
                yield number, line
    except FileNotFoundError:
        raise
    except (OSError, EOFError) as error:
        why = f"{error} (after line {number})" if number else str(error)
        raise DataError.unreadable(source.path, why) from error


def value_over_lines(source: Source) -> tuple[int, Any, bytes] | None:
    """(line that it begins on, value, text) of a file that is one value over several lines, such as a pretty-printed
    array; None for any other text."""
    lines = list(iter_lines(source))
    content = b"\n".join(text for _, text in lines)
    with contextlib.suppress(ValueError):
        return lines[0][0], decode(content, exact=True), content
    return None


def row_lines(source: Source) -> Iterator[tuple[int, bytes]]:
    """As ``iter_lines``, of a file that is a list of rows, or one row over several lines, too: each row as one line, with
    the number of the line that the value begins on."""
    lines = iter_lines(source)
    first = next(lines, None)
    if first is None:
        return
    text = first[1].lstrip()
    whole = None
    if text[:1] == b"[" or (text[:1] == b"{" and text.rstrip()[-1:] != b"}"):
        whole = value_over_lines(source)
    if whole is None:
        yield from chain([first], lines)
        return
    number, value, content = whole
    if not isinstance(value, list):
        # Line breaks of JSON are outside of its texts.
        yield number, content.replace(b"\r", b" ").replace(b"\n", b" ")
        return
    for row in value:
        if isinstance(row, dict):
            row.pop("crc32", None)  # of the line that it was
        try:
            # As ``decode`` reads it again, also with numbers that are not finite and texts that are not Unicode.
            line = json.dumps(row, separators=(",", ":")).encode()
        except RecursionError:
            line = b"nested too deeply"
        yield number, line


def line_numbers(path: str | Path, rows: Collection[int]) -> dict[int, int]:
    """0-based row → 1-based line of a JSONL file, as editors count them; blank lines are not rows. Rows that cannot be
    found are left out; empty for files of other kinds."""
    numbers: dict[int, int] = {}
    with contextlib.suppress(DataError, OSError):
        for source in resolve(path) if Path(path).is_file() and rows else ():
            if source.kind != "parquet":
                lines = enumerate(islice(iter_lines(source), max(rows) + 1))
                numbers |= {row: number for row, (number, _) in lines if row in rows}
    return numbers


def _raw_lines(source: Source) -> Iterator[bytes]:
    """Raises OSError or EOFError when the file is broken or cut off."""
    if source.compression is not None:
        rest = b""
        with source.path.open("rb") as file:
            for block in _blocks(file, source.compression):
                *lines, rest = (rest + block).split(b"\n")
                yield from lines
        if rest:
            yield rest
        return
    with source.path.open("rb", buffering=_BLOCK // 4) as file:
        for line in file:
            yield line.removesuffix(b"\n")


def _blocks(file: io.BufferedReader, compression: Compression) -> Iterator[bytes]:
    """The content of a compressed file, and of a text table, which may be compressed, as lines of JSON."""
    import zlib

    if compression in ("csv", "tsv"):
        packed = packed_as(file.peek(4))
        yield from _table_rows(
            io.BufferedReader(_Unpacked(_blocks(file, packed))) if packed else file, f".{compression}"
        )
        return
    if compression == "gzip":
        import gzip

        try:
            with gzip.open(file) as content:
                while block := content.read(_BLOCK):
                    yield block
        except zlib.error as error:
            raise OSError(f"broken gzip data: {error}") from error
        return
    import zstandard

    # Frame by frame, because the stream reader of zstandard takes a cut-off file for a whole one.
    frame, inside = zstandard.ZstdDecompressor().decompressobj(), False
    try:
        while data := file.read(_BLOCK // 16):
            while data:
                if block := frame.decompress(data):
                    yield block
                inside, data = not frame.eof, frame.unused_data
                if frame.eof:
                    frame = zstandard.ZstdDecompressor().decompressobj()
    except zstandard.ZstdError as error:
        raise OSError(f"broken zstd data: {error}") from error
    if inside:
        raise EOFError("the file ends before its last zstd frame does")


class _Unpacked(io.RawIOBase):
    """The blocks of a compressed file as a file, because a text table is read by the lines of its cells."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        while not self._rest and (block := next(self._blocks, None)) is not None:
            self._rest = memoryview(block)
        into = memoryview(buffer)
        n = min(len(into), len(self._rest))
        into[:n], self._rest = self._rest[:n], self._rest[n:]
        return n


def _table_rows(file: io.BufferedReader, kind: str) -> Iterator[bytes]:
    """The rows of a text table with a header as lines of JSON; cells are text, an empty one is no value. The header is a
    blank line."""
    import csv

    csv.field_size_limit(1 << 30)
    try:
        lines = iter(io.TextIOWrapper(file, "utf-8-sig", newline=""))
        separators = SEPARATORS[kind]
        for first in lines:
            if line := _SEPARATOR_LINE.fullmatch(first.rstrip("\r\n")):
                separators = line[1]
            elif first.strip():
                break
            yield b"\n"
        else:
            first = ""
        while first.count('"') % 2 and (more := next(lines, "")):
            first += more
        second = next(lines, "")
        divided = {mark: [*csv.reader([first, second], delimiter=mark)] for mark in separators}
        # A comma or a semicolon may be in a name: then the first row has other cells.
        fitting = (mark for mark, (head, *row) in divided.items() if len(head) > 1 and [len(head)] == [*map(len, row)])
        separator = next(fitting, max(divided, key=lambda mark: len(divided[mark][0])))
        rows = csv.reader(chain([first, second], lines), delimiter=separator, strict=True)
        header = next(rows, [])
        if twice := next((name for name in header if name and header.count(name) > 1), None):
            raise OSError(f"its header has two columns {twice!r}")
        yield b"\n"
        for row in rows:
            # A text instead of an object is the fault of its row.
            is_even = len(row) == len(header)
            value = (
                {k: v for k, v in zip(header, row, strict=True) if v}
                if is_even
                else f"{len(row)} cells, of {len(header)}"
            )
            yield json.dumps(value).encode() + b"\n" if row else b"\n"
    except (csv.Error, UnicodeDecodeError) as error:
        raise OSError(f"no text table in UTF-8 with a header: {error}") from error


def _odd(value: Any) -> bool:
    return isinstance(value, (float, np.floating)) and not math.isfinite(value)


def _has_odd_number(row: Any) -> bool:
    """Whether a number directly in the row, or in a list of objects in it, is not finite."""
    if not isinstance(row, dict):
        return name_non_finite(row) is not row
    for value in row.values():
        if type(value) is list:
            for item in value:
                if type(item) is dict:
                    for inner in item.values():
                        if type(inner) is float and inner - inner != 0:
                            return True
        elif any(map(_odd, value.values())) if type(value) is dict else _odd(value):
            return True
    return False


def name_non_finite(value: Any) -> Any:
    """``value``, of any depth, with non-finite numbers as "NaN", "Infinity" and "-Infinity"; the same object when it
    has none."""
    if isinstance(value, dict):
        fields = {k: name_non_finite(v) for k, v in value.items()}
        return fields if any(fields[k] is not value[k] for k in value) else value
    if isinstance(value, np.ndarray):
        if value.dtype.kind != "f" or np.isfinite(value).all():
            return value
        return [name_non_finite(v) for v in value]
    if isinstance(value, (list, tuple)):
        items = [name_non_finite(v) for v in value]
        return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if _odd(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a torn last line is left out."""
    rows = []
    with contextlib.suppress(OSError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]
