"""Lines of JSON with a checksum: rows on their way to a sealed file, failures.jsonl, and whatever else is appended to.

A line is a JSON object whose last key is "crc32", the crc32 of the line's bytes before that key (and its comma) as eight
hex digits, and a newline.

Invariants: a row is written with one call and is whole or torn, never mixed with another; only a line whose crc32 agrees
is a row; a good line is never rewritten. Synced to disk at most ``fsync_interval_s`` after it was written: a killed
process loses nothing that was appended, a machine that loses power loses at most what was appended in that time. A
failure is never a rollout and has no reward; a torn last line is cut off and kept aside.
"""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from gymdata.errors import EXIT_FAULTS, DataError, StoreError, option
from gymdata.rollouts.messages import FailureRow
from gymdata.store.lines import decode, row_lines
from gymdata.store.lock import sync
from gymdata.store.paths import PART, ROLLOUTS_FOLDER, RUN_JSON, FileEntry, Source, run_jsons
from gymdata.store.reading import report_lines

_BLOCK = 1 << 20
_KEY = b',"crc32":"'
#: The key, eight hex digits, and the end of the object.
_TAIL = len(_KEY) + 10


@dataclass(frozen=True, slots=True)
class Line:
    """One line, which is the ``number``-th from 1: its JSON without the checksum, or ``None`` when it is torn or damaged.
    ``raw`` is the line as read; ``offset``: None in a file that is read as a list of rows."""

    number: int
    offset: int | None
    raw: bytes
    body: bytes | None
    closed: bool = True


@dataclass(frozen=True, slots=True)
class Repair:
    """A line that was put aside on opening, and its position."""

    path: Path
    offset: int
    length: int
    truncated: bool

    def __str__(self) -> str:
        outcome = "torn tail cut off" if self.truncated else "broken line skipped"
        return f"{self.path.name}: {outcome} at byte {self.offset} ({self.length} bytes, kept in {self.path.name}.torn)"


def line_of(body: bytes) -> bytes:
    """The line of one object's JSON."""
    content = body[:-1]
    return b'%b%b%08x"}\n' % (content, _KEY, zlib.crc32(content))


def body_of(line: bytes) -> bytes | None:
    """The JSON in a line without its newline, or None where the checksum is missing or another."""
    content = line[:-_TAIL]
    return content + b"}" if line[-_TAIL:] == b'%b%08x"}' % (_KEY, zlib.crc32(content)) else None


def given_body(line: bytes) -> bytes | None:
    """The same of a line that another program may have written: one without a checksum is JSON as it is."""
    return body_of(line) if line[-_TAIL:].startswith(_KEY) else line


def scan(path: Path, offset: int = 0, *, ours: bool = True) -> Iterator[Line]:
    """Every line of a file with its offset, from the one that begins at ``offset``. A last line without newline is good
    when its crc32 is. ``ours``: no other program adds lines."""
    rest, number = b"", 0
    with path.open("rb") as file:
        file.seek(offset)
        while block := file.read(_BLOCK):
            *lines, rest = (rest + block).split(b"\n")
            for raw in lines:
                number += 1
                yield Line(number, offset, raw, body_of(raw) if ours else given_body(raw))
                offset += len(raw) + 1
    if rest:
        yield Line(number + 1, offset, rest, body_of(rest), closed=False)


def lines_of(source: Source) -> Iterator[Line]:
    """The lines of a segment, or the rows of another file of JSON, which may have checksums."""
    if source.kind == "segment":
        yield from scan(source.path)
        return
    for number, raw in row_lines(source):
        yield Line(number, None, raw, given_body(raw))


def repair(path: Path, *, ours: bool = True) -> tuple[int, list[Repair]]:
    """Check every line; copy bad ones to ``PATH.torn``; cut off a torn tail. Returns good rows and what was put aside.

    A bad line that is followed by others stays where it is, because taking it out would rewrite good rows; readers pass
    over it, and it is reported once. ``ours``: as for ``scan``.
    """
    rows, faulty = 0, list[Line]()
    if not path.exists():
        return 0, []
    torn = path.with_name(path.name + ".torn")
    reported = set[tuple[int, str]]()
    if torn.exists():
        with contextlib.suppress(orjson.JSONDecodeError):  # torn itself: its content is repeated
            lines = [orjson.loads(line) for line in torn.read_bytes().splitlines() if line]
            # Where a torn tail was cut off, another line begins.
            reported = {(line["offset"], line["text"]) for line in lines}
    unclosed_good = False
    for line in scan(path, ours=ours):
        if line.body is not None:
            rows += 1
            unclosed_good = not line.closed
        elif (line.offset, _text(line.raw)) not in reported or not line.closed:
            faulty.append(line)
    repairs = [Repair(path, line.offset or 0, len(line.raw), not line.closed) for line in faulty]
    if repairs:
        put_aside(torn, [(fault, line.raw) for fault, line in zip(repairs, faulty, strict=True)])
        if repairs[-1].truncated:
            os.truncate(path, repairs[-1].offset)
    if unclosed_good:
        with path.open("ab") as file:
            file.write(b"\n")
    return rows, repairs


def put_aside(torn: Path, faulty: Iterable[tuple[Repair, bytes]]) -> None:
    """Add what was damaged to ``torn``, and bring it to the disk. Raises StoreError.from_os."""
    try:
        fd = os.open(torn, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        with os.fdopen(fd, "ab") as file:
            for fault, raw in faulty:
                file.write(orjson.dumps({"offset": fault.offset, "length": fault.length, "text": _text(raw)}) + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError.from_os(torn, error) from error


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


class Journal:
    """An open journal that rows are appended to. Not for several threads, except that another thread may sync."""

    def __init__(self, path: Path, rows: int = 0) -> None:
        self.path = path
        self.rows = rows
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(path, flags, 0o644)
        except OSError as error:
            raise StoreError.from_os(path, error, journaled=rows > 0) from error
        self.size = os.fstat(self._fd).st_size
        self._synced = self.size
        self._closing = threading.Lock()

    def append(self, line: bytes) -> None:
        """Write one line whole, or nothing. Raises StoreError.from_os."""
        written = 0
        try:
            while written < len(line):
                written += os.write(self._fd, line[written:] if written else line)
        except OSError as error:
            if written:
                os.ftruncate(self._fd, self.size)
            raise StoreError.from_os(self.path, error, journaled=self.rows > 0) from error
        self.size += len(line)
        self.rows += 1

    def empty(self) -> None:
        """Forget every line. Raises StoreError.from_os."""
        with self._closing:
            try:
                os.ftruncate(self._fd, 0)
            except OSError as error:
                raise StoreError.from_os(self.path, error) from error
            self.size = self._synced = self.rows = 0

    def sync(self) -> None:
        """Bring what was written to the disk. Raises StoreError.from_os."""
        with self._closing:
            size = self.size
            if self._fd < 0 or size == self._synced:
                return
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise StoreError.from_os(self.path, error, journaled=self.rows > 0) from error
            self._synced = size

    def close(self, *, keep: bool = True) -> None:
        """Close it; unless it is to be removed, bring it to the disk first."""
        try:
            if keep:
                self.sync()
        finally:
            with self._closing:
                if self._fd >= 0:
                    os.close(self._fd)
                    self._fd = -1


def drop_lines(segment: Path) -> None:
    """The last step: the rows are in a part that is sealed and named."""
    segment.unlink(missing_ok=True)
    sync(segment.parent)


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows that are not sealed yet."""

    index: int
    path: Path
    rows: int


@dataclass(slots=True)
class Recovered:
    """Findings on opening: segments that are not sealed, in order, and repairs made."""

    segments: list[Segment] = field(default_factory=list)
    repairs: list[Repair] = field(default_factory=list)
    next_segment: int = 0


def recover(folder: Path, files: Sequence[FileEntry]) -> Recovered:
    """Bring the rollouts folder into a state that can be resumed. ``files``: what run.json names as sealed."""
    rollouts = folder / ROLLOUTS_FOLDER
    state = Recovered(repairs=repair(folder / FAILURES, ours=False)[1])
    named = {rollouts / Path(f["path"]).name for f in files}
    for part in sorted(named):
        if not part.is_file():
            raise StoreError(
                f"{part}: is named in run.json but not there",
                hint=f"bring the file back, or start again with {option('overwrite', True)}",
            )
    for leftover in rollouts.glob(".part-*.tmp"):
        leftover.unlink()
    parts = {path: int(m[1]) for path in rollouts.iterdir() if (m := PART.fullmatch(path.name))}
    for part in [path for path in parts if path.suffix == ".parquet"]:
        lines = part.with_suffix(".jsonl")
        if lines in parts and lines not in named:
            # A part that was renamed but not named goes: its lines still hold the rows, and sealing gives the same file.
            gone = lines if part in named else part
            drop_lines(gone)
            parts.pop(gone)
        elif part not in named:
            # Lines are dropped after their part is named, so this part is of another run.
            text = f"{part}: is not among the files of {folder / RUN_JSON}"
            raise DataError(text, hint="move it out", exit_code=EXIT_FAULTS)
    for path in sorted(parts.keys() - named, key=parts.__getitem__):
        rows, repairs = repair(path)
        state.repairs += repairs
        if rows or path.with_name(path.name + ".torn").exists():
            state.segments.append(Segment(parts[path], path, rows))
        else:
            drop_lines(path)
            parts.pop(path)
    state.next_segment = max(parts.values(), default=-1) + 1
    return state


FAILURES = "failures.jsonl"
#: Why lines are damaged.
NO_RECORD = "their checksums do not match, or they are not JSON objects"


def read_failures(path: str | Path) -> list[FailureRow]:
    """Every failure of the run that a path argument belongs to; empty when there were none. Damaged lines are left out
    and reported."""
    return [row for run_json in run_jsons(path) for row in read_failure_file(run_json.parent / FAILURES)]


def read_failure_file(file: Path) -> list[FailureRow]:
    """The records of one failures.jsonl. Damaged lines are left out and reported."""
    records, damaged = sound_failures(file)
    report_lines(file, damaged, "record", NO_RECORD)
    return records


def sound_failures(file: Path) -> tuple[list[FailureRow], list[tuple[int, int | None]]]:
    """The records of one failures.jsonl, without their checksums, and number and offset of each damaged line. A last line
    without newline is being written, or was torn by a crash: opening the run then cuts it off and reports it."""
    records, damaged = list[FailureRow](), list[tuple[int, int | None]]()
    for line in scan(file, ours=False) if file.exists() else ():
        try:
            record = decode(line.body or b"")
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif line.closed:
            damaged.append((line.number, line.offset))
    return records, damaged
