"""Files cut into parts that several processes read: row groups of Parquet, lines of JSON.

Invariants: the parts of a file, one after the other, are the file; the places that readers report are those in the
file. Files that cannot be cut (compressed files, journals), were changed, or cannot be opened stay whole, so that the
reader reports the fault as in one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from gymdata.store.paths import BOM, Part, Source
from gymdata.store.reading import is_as_recorded

if TYPE_CHECKING:
    from gymdata.rollouts.schema import Table

#: Bytes of a part: uncompressed ones of Parquet, whose row groups are not divided.
PIECE_BYTES = 8 << 20
_DIVIDED = 4


def pieces(
    sources: Iterable[Source], table: Table | None = None, *, lines: bool = True, rows: int | None = None
) -> Iterator[Source]:
    """``sources`` in order, in parts where they can be cut. ``lines``: JSON lines, too, and not only Parquet. ``rows``:
    large row groups are divided at multiples of this many rows, for work that costs much more than reading does: the
    rows in front are read once more.

    With ``table`` only files that ``check_source`` lets pass are cut, and their parts are not checked again.
    """
    for source in sources:
        cuttable = source.kind == "parquet" or (lines and source.kind == "jsonl" and source.compression is None)
        try:
            cuttable = cuttable and (table is None or is_as_recorded(source, table))
            size = source.path.stat().st_size
        except OSError:
            cuttable = False
        if not cuttable or (source.kind == "jsonl" and size <= PIECE_BYTES):
            yield source
        elif source.kind == "parquet":
            for part in _groups(source):
                yield from _divided(part, rows)
        else:
            yield from _lines(source)


def name_of(source: Source) -> str:
    """The name of a piece in messages."""
    if source.part is None:
        return str(source.path)
    what = "row groups" if source.kind == "parquet" else "bytes"
    rows = f", from row {source.part.rows:,}" if source.part.skip else ""
    return f"{source.path} ({what} {source.part.start:,} to {source.part.end - 1:,}{rows})"


def _groups(source: Source) -> Iterator[Source]:
    import pyarrow as pa

    from gymdata.store.objects.streams import parquet_file

    try:
        with parquet_file(source.path) as file:
            groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
            whole = sum(group.num_rows for group in groups) == file.metadata.num_rows
    except (pa.ArrowException, OSError):
        whole = False
    if not whole or not groups:
        yield source
        return
    start = size = before = rows = 0
    for index, group in enumerate(groups):
        size, rows = size + group.total_byte_size, rows + group.num_rows
        if size >= PIECE_BYTES or index + 1 == len(groups):
            yield replace(source, part=Part(start, index + 1, before, before))
            start, size, before, rows = index + 1, 0, before + rows, 0


def _divided(source: Source, rows: int | None) -> Iterator[Source]:
    """One row group in up to ``_DIVIDED`` parts of about twice ``PIECE_BYTES``; several, or a whole file, as they are."""
    from gymdata.store.objects.streams import parquet_file

    part = source.part
    if rows is None or part is None or part.end - part.start > 1:
        yield source
        return
    with parquet_file(source.path) as file:
        group = file.metadata.row_group(part.start)
    parts = min(_DIVIDED, group.total_byte_size // (2 * PIECE_BYTES))
    each = math.ceil(group.num_rows / max(parts, 1) / rows) * rows
    if each >= group.num_rows:
        yield source
        return
    for skip in range(0, group.num_rows, each):
        yield replace(source, part=Part(part.start, part.end, 0, part.rows + skip, skip, each))


def _lines(source: Source) -> Iterator[Source]:
    start = lines = rows = 0
    with source.path.open("rb") as file:
        while data := file.read(PIECE_BYTES):
            data += file.readline()
            yield replace(source, part=Part(start, start + len(data), lines, rows))
            more, blank = _counted(data if start else data.removeprefix(BOM))
            start += len(data)
            lines, rows = lines + more, rows + more - blank


def _counted(data: bytes) -> tuple[int, int]:
    """Lines, and how many of them are blank; the last line may have no end."""
    begin = lines = blank = 0
    while begin < len(data):
        end = data.find(b"\n", begin)
        end = len(data) if end < 0 else end
        lines += 1
        # Only lines that begin with white space can be blank, and there are few.
        if (end == begin or data[begin : begin + 1].isspace()) and not data[begin:end].strip():
            blank += 1
        begin = end + 1
    return lines, blank
