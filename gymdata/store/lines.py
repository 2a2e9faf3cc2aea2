"""JSON lines: plain and compressed files, and non-finite numbers.

Invariants: a non-finite number is written as the string "NaN", "Infinity" or "-Infinity", because JSON has no literal
for it and a null would lose it; what Python's json writes for them (bare NaN) is read too. Plain files need no pyarrow.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import re
from collections.abc import Collection, Iterator
from itertools import chain, islice
from operator import is_not
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from gymdata.errors import DataError, abridged
from gymdata.rollouts.messages import JsonObject, drop_nulls
from gymdata.store.paths import BOM, Source, packed_as, resolve

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_UTC_Z
#: Bytes of a file, and of what a compressed one holds, that are read at once.
_BLOCK, _UNPACKED = 1 << 20, 1 << 16
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_LONG = re.compile(rb"[0-9]{20}")
_FINITE = frozenset((str, int, bool, type(None)))
#: Separators of the cells of a text table; where the first does not divide header and first row alike, the next is tried.
SEPARATORS = {".csv": ",;\t", ".tsv": "\t"}
#: The line by which Excel is told the separator of the lines below it.
_SEPARATOR_LINE = re.compile(r"sep=([,;\t])", re.IGNORECASE)


def encode_finite(value: Any) -> bytes:
    """As ``encode``, of a value without numbers that are not finite, or integers of more than 64 bits."""
    return orjson.dumps(value, option=_OPTIONS)


def encode(value: Any) -> bytes:
    """``value``, of any depth, as one line of JSON without the newline; floats round-trip bit for bit. Raises TypeError or
    ValueError for what JSON cannot hold, such as text that is not UTF-8."""
    try:
        line = encode_finite(value)
        # orjson writes a number that is not finite as null.
        named = name_non_finite(value) if b"null" in line else value
        return line if named is value else orjson.dumps(named, option=_OPTIONS)
    except TypeError:
        # It refuses integers of more than 64 bits.
        return json.dumps(
            name_non_finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_listed
        ).encode()


def _listed(array: Any) -> Any:
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

    def __str__(self) -> str:
        return f"the key {self.args[0]!r} is given twice"


def unique_keys(pairs: list[tuple[str, Any]]) -> JsonObject:
    """An object of JSON, for ``json.loads``. Raises RepeatedKeyError."""
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedKeyError(next(name for name in names if names.count(name) > 1))
    return value


def decode_row(line: bytes, *, exact: bool = False) -> Any:
    """As ``decode``; an object that has a key twice raises RepeatedKeyError."""
    row = decode(line, exact=exact)
    # A key ends with a quote and a colon; inside of a text that quote is escaped.
    if line.count(b'":') - line.count(b'\\":') != _count_keys(row):
        with contextlib.suppress(ValueError, RecursionError):  # a reader that decodes it otherwise has read it
            json.loads(line, object_pairs_hook=unique_keys)
    return row


def _count_keys(value: Any) -> int:
    """The keys of all objects in ``value``, but of those in a list whose first item is a number, such as token ids."""
    if type(value) is dict:
        return len(value) + sum([_count_keys(item) for item in value.values() if type(item) in (dict, list)])
    if type(value) is list and value and type(value[0]) in (dict, list):
        return sum(map(_count_keys, value))
    return 0


def iter_lines(source: Source) -> Iterator[tuple[int, bytes]]:
    """Each non-blank line with its 1-based number in the file. Raises DataError when the file cannot be read to its end."""
    if source.kind == "pickle":
        next(values_of(source))  # refuses one that cannot be read
        raise DataError.unreadable(source.path, "a pickle with other content than the batches that `import` reads")
    number = 0
    try:
        for number, line in _table_rows(source) if source.cells else _plain_lines(source):
            if line and not line.isspace():
                yield number, line
    except FileNotFoundError:
        raise
    except (OSError, EOFError) as error:
        why = f"{error} (after line {number:,})" if number else str(error)
        raise DataError.unreadable(source.path, why) from error


def value_over_lines(source: Source) -> tuple[int, Any, bytes] | None:
    """(line that it begins on, value, text) of a file that is one value over several lines, such as a pretty-printed
    array; None for any other text. Raises DataError for an object that has a key twice."""
    lines = list(iter_lines(source))
    content = b"\n".join(text for _, text in lines)
    try:
        return lines[0][0], decode_row(content, exact=True), content
    except RepeatedKeyError as error:
        raise DataError.unreadable(source.path, str(error)) from error
    except ValueError:
        return None


def fault_of_text(source: Source) -> str:
    """Why neither a file nor its first line is a value of JSON: where it is not UTF-8, or where the value that begins on its
    first line ends too early, or is wrong."""
    lines = list(iter_lines(source))
    try:
        json.loads(b"\n".join(text for _, text in lines).decode())
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        line, byte = lines[before.count(b"\n")][0], error.start - before.rfind(b"\n") - 1
        return f"not UTF-8: byte {byte:,} of line {line:,} is 0x{error.object[error.start]:02x}"
    except json.JSONDecodeError as error:
        is_torn = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated")
        place = f"line {lines[-1 if is_torn else error.lineno - 1][0]:,}"
        return f"its JSON ends too early, on {place}" if is_torn else f"no JSON on {place}: {error.msg}"
    except RecursionError:
        return "nested too deeply"
    return "no rows of JSON"


def values_of(source: Source, *, exact: bool = False) -> Iterator[tuple[int, Any, bytes]]:
    """(line, value, text) of each line, or of the one value that a file is; the ValueError where the text is no JSON, which
    is one for a file of other text. ``exact``: as for ``decode``; a RepeatedKeyError is the value where a key is given
    twice. A pickle is one value, with arrays; of Parquet each row is one, numbered from 1, without its nulls. Raises
    DataError for one that cannot be read."""
    if source.kind == "parquet":
        yield from _parquet_values(source)
        return
    if source.kind == "pickle":
        from gymdata.store._pickles import load

        yield 1, load(source.path), b""
        return
    for index, (number, line) in enumerate(iter_lines(source)):
        try:
            value = decode_row(line, exact=True) if exact else decode(line)
        except RepeatedKeyError as error:
            value = error
        except ValueError as error:
            value = error
            if index == 0 and (whole := value_over_lines(source)) is not None:
                yield whole[0], whole[1], whole[2][:1000]
                return
            if index == 0 and not any(map(_is_object, islice(iter_lines(source), 20))):
                yield number, ValueError(fault_of_text(source)), line
                return
        yield number, value, line


def _parquet_values(source: Source) -> Iterator[tuple[int, Any, bytes]]:
    """As ``values_of``. Parquet has every column in every row, and every key in every struct; JSON lines have not."""
    from gymdata.store.parquet import READ_FAULTS, parquet_file

    try:
        with parquet_file(source.path) as file:
            rows = (drop_nulls(row) for batch in file.iter_batches(256) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield number, row, encode({name: str(cell)[:200] for name, cell in row.items()})
    except READ_FAULTS as error:
        raise DataError.unreadable(source.path, str(error)) from error


def _is_object(numbered: tuple[int, bytes]) -> bool:
    try:
        return isinstance(decode(numbered[1]), (dict, list))
    except ValueError:
        return False


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


def _plain_lines(source: Source) -> Iterator[tuple[int, bytes]]:
    """Each line with its number. Raises OSError or EOFError when the file is broken or cut off."""
    with _opened(source) as file:
        for number, line in enumerate(file, 1):
            yield number, (line.removeprefix(BOM) if number == 1 else line).removesuffix(b"\n")


def _opened(source: Source) -> io.BufferedReader:
    """The content of a file, unpacked where its first bytes are those of a compressed one. Raises OSError for UTF-16."""
    file: io.BufferedReader = io.BufferedReader(source.path.open("rb", buffering=0), _BLOCK)
    if (packed := packed_as(file.peek(4))) is not None:
        file.close()
        import pyarrow as pa

        # Of a file that is cut off the lines before the last block are read.
        file = io.BufferedReader(pa.input_stream(source.path, compression=packed), _UNPACKED)
    if file.peek(2)[:2] in _UTF_16:
        file.close()
        raise OSError("its text is UTF-16, expected UTF-8 (`iconv -f UTF-16 -t UTF-8` converts it)")
    return file


def _table_rows(source: Source) -> Iterator[tuple[int, bytes]]:
    """The rows of a text table below its header as JSON, each with the number of the line that it begins on. Cells are text,
    an empty one is no value; a row with other cells than the header is a text instead of an object."""
    try:
        heads = {mark: [*islice(_cells(source, mark), 2)] for mark in SEPARATORS[f".{source.cells}"]}
        widths = {mark: [len(cells) for _, cells in rows] for mark, rows in heads.items()}
        # A comma or a semicolon may be in a name: then the first row has other cells.
        fitting = (mark for mark, (width, *below) in widths.items() if width > 1 and below == [width])
        separator = next(fitting, max(widths, key=lambda mark: widths[mark][:1]))
        rows = _cells(source, separator, strict=True)
        _, header = next(rows, (0, []))
        if twice := next((name for name in header if name and header.count(name) > 1), None):
            raise OSError(f"its header has two columns {twice!r}")
        line = None
        for line, cells in rows:
            value: Any = {name: cell for name, cell in zip(header, cells, strict=False) if cell}
            if len(cells) != len(header):
                value = f"{len(cells)} cells, of {len(header)}: {separator.join(cells)}"
            yield line, json.dumps(value).encode()
        if header and line is None:
            raise OSError(f"a header ({abridged(header)}), and no row below it")
    except (csv.Error, UnicodeDecodeError) as error:
        raise OSError(f"no text table in UTF-8 with a header: {error}") from error


def _cells(source: Source, separator: str, *, strict: bool = False) -> Iterator[tuple[int, list[str]]]:
    """The rows of a text table that are not blank, with the number of the line that each begins on. A separator that the
    file names in its first line holds instead."""
    csv.field_size_limit(1 << 30)
    with _opened(source) as file:
        lines = iter(io.TextIOWrapper(file, "utf-8-sig", newline=""))
        first = next(lines, "")
        named = _SEPARATOR_LINE.fullmatch(first.rstrip("\r\n"))
        below, skipped = (lines, 1) if named else (chain([first], lines), 0)
        rows = csv.reader(below, delimiter=named[1] if named else separator, strict=strict)
        begins = skipped + 1
        for cells in rows:
            if any(map(str.strip, cells)):
                yield begins, cells
            begins = skipped + rows.line_num + 1


def name_non_finite(value: Any) -> Any:
    """``value``, of any depth, with non-finite numbers as "NaN", "Infinity" and "-Infinity"; the same object when it
    has none."""
    if isinstance(value, dict):
        inner = {key: name_non_finite(item) for key, item in value.items() if type(item) not in _FINITE}
        return value | inner if any(item is not value[key] for key, item in inner.items()) else value
    if isinstance(value, np.ndarray):
        if value.dtype.kind != "f" or np.isfinite(value).all():
            return value
        return [name_non_finite(v) for v in value]
    if isinstance(value, (list, tuple)):
        items = [name_non_finite(v) for v in value]
        return items if any(map(is_not, items, value)) else value
    if isinstance(value, (float, np.floating)) and not math.isfinite(value):
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
