"""Journals: rows on their way to a sealed file, one line each; and failures.jsonl, the attempts without a rollout.

A line is JSON, a tab, the crc32 of the JSON as eight hex digits, and a newline.

Invariants: a row is written with one call and is whole or torn, never mixed with another; only a line whose crc agrees
is a row; a good line is never rewritten. Synced to disk at most ``fsync_interval_s`` after it was written: a killed
process loses nothing that was appended, a machine that loses power loses at most what was appended in that time. A
failure is never a rollout and has no reward; a torn last line is cut off and kept aside.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from gymdata.errors import DataError, StoreError, option
from gymdata.rollouts.messages import FailureRow
from gymdata.store.lines import decode
from gymdata.store.lock import is_held
from gymdata.store.paths import BOM, JOURNAL, PART, ROLLOUTS_FOLDER, RUN_JSON, FileEntry, run_jsons
from gymdata.store.reading import report_lines, warn
from gymdata.store.run_json import sync

_BLOCK = 1 << 20
#: A tab, eight hex digits.
_TRAILER = 9
#: Where simdjson finds the token lists of a turn.
_BUFFERS = {
    "prompt_delta_ids": ("i", np.int64),
    "generation_token_ids": ("i", np.int64),
    "generation_log_probs": ("d", np.float64),
}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a journal: its JSON without the crc, or ``None`` when it is torn. ``raw`` is the line as read."""

    offset: int
    raw: bytes
    body: bytes | None
    closed: bool


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


def frame(body: bytes) -> bytes:
    """The journal line of one row's JSON."""
    return b"%b\t%08x\n" % (body, zlib.crc32(body))


def unframe(raw: bytes) -> bytes | None:
    """The JSON in a line without its newline, or None when the crc disagrees."""
    body = raw[:-_TRAILER]
    if len(raw) <= _TRAILER or raw[-_TRAILER:] != b"\t%08x" % zlib.crc32(body):
        return None
    return body


def scan(path: Path, offset: int = 0) -> Iterator[Line]:
    """Every line of a journal with its offset, from the one that begins at ``offset``. A last line without newline is good
    when its crc is."""
    rest = b""
    with path.open("rb") as file:
        file.seek(offset)
        while block := file.read(_BLOCK):
            *lines, rest = (rest + block).split(b"\n")
            for raw in lines:
                yield Line(offset, raw, unframe(raw), True)
                offset += len(raw) + 1
    if rest:
        yield Line(offset, rest, unframe(rest), False)


def repair(path: Path) -> tuple[int, list[Repair]]:
    """Check every line; copy bad ones to ``PATH.torn``; cut off a torn tail. Returns good rows and what was put aside.

    A bad line that is followed by others stays where it is, because taking it out would rewrite good rows; readers pass
    over it, and it is reported once.
    """
    rows, faulty = 0, []
    torn = path.with_name(path.name + ".torn")
    reported = set[tuple[int, str]]()
    if torn.exists():
        with contextlib.suppress(orjson.JSONDecodeError):  # torn itself: its content is repeated
            lines = [orjson.loads(line) for line in torn.read_bytes().splitlines() if line]
            # Where a torn tail was cut off, another line begins.
            reported = {(line["offset"], line["text"]) for line in lines}
    unclosed_good = False
    for line in scan(path):
        if line.body is not None:
            rows += 1
            unclosed_good = not line.closed
        elif (line.offset, _text(line.raw)) not in reported or not line.closed:
            faulty.append((line, Repair(path, line.offset, len(line.raw), not line.closed)))
    if faulty:
        put_aside(torn, [(fault, line.raw) for line, fault in faulty])
        if faulty[-1][1].truncated:
            os.truncate(path, faulty[-1][1].offset)
    if unclosed_good:
        with path.open("ab") as file:
            file.write(b"\n")
    return rows, [fault for _, fault in faulty]


def put_aside(torn: Path, faulty: Iterable[tuple[Repair, bytes]]) -> None:
    """Add what was damaged to ``torn``, and bring it to the disk. Raises StoreError.from_os, StoreError.link."""
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


def read_rows(path: Path, *, report: bool = True) -> Iterator[tuple[int, Any, int]]:
    """The good rows of a journal: 1-based line, row, bytes of JSON. Lines that are damaged are left out and reported.

    ``report``: false where ``repair`` has reported them already.
    """
    parse = row_parser()
    damaged: list[tuple[int, int]] = []
    try:
        for number, line in enumerate(scan(path), 1):
            if line.body is not None:
                try:
                    yield number, parse(line.body), len(line.body)
                except orjson.JSONDecodeError as error:
                    raise DataError.bad_row(path, number, None, "text that is not JSON", "a journaled row") from error
            elif line.closed:
                damaged.append((number, line.offset))
            elif report and not is_held(path.parent.parent):
                # While a run is written, its last line may be incomplete.
                where = f"{path}: its last line is torn (byte {line.offset:,})"
                warn(f"{where}: a writer was killed; the same `gymdata collect` command samples that rollout again")
    finally:
        if report:
            report_lines(path, damaged, "row", "their checksums do not match; `gymdata validate` shows them")


def drop_journal(journal: Path) -> None:
    """The last step: the rows are sealed and named."""
    journal.unlink(missing_ok=True)
    sync(journal.parent)


@dataclass(frozen=True, slots=True)
class Segment:
    """A journal that is not sealed yet."""

    index: int
    path: Path
    rows: int


@dataclass(slots=True)
class Recovered:
    """Findings on opening: unsealed journals in order, and repairs made."""

    journals: list[Segment] = field(default_factory=list)
    repairs: list[Repair] = field(default_factory=list)
    next_segment: int = 0


def recover(folder: Path, files: Sequence[FileEntry]) -> Recovered:
    """Bring the rollouts folder into a state that can be resumed. ``files``: what run.json names as sealed."""
    rollouts = folder / ROLLOUTS_FOLDER
    state = Recovered(repairs=repair_failures(folder / FAILURES))
    named = {Path(f["path"]).name for f in files}
    for name in sorted(named):
        if not (rollouts / name).is_file():
            raise StoreError(
                f"{rollouts / name}: is named in run.json but not there",
                hint=f"bring the file back, or start again with {option('overwrite', True)}",
            )
    journals = {int(m[1]): p for p in rollouts.iterdir() if (m := JOURNAL.fullmatch(p.name))}
    parts = {p.name: int(m[1]) for p in rollouts.iterdir() if (m := PART.fullmatch(p.name))}
    for leftover in rollouts.glob(".part-*.tmp"):
        leftover.unlink()
    for name, index in sorted(parts.items()):
        if name in named:
            if index in journals:
                drop_journal(journals.pop(index))
        elif index in journals:
            # Renamed but not named: the journal still holds these rows, and sealing gives the same file.
            (rollouts / name).unlink()
            parts.pop(name)
        else:
            # A journal is dropped after its part is named, so this part is of another run.
            raise DataError.unnamed(rollouts / name, folder / RUN_JSON)
    for index, path in sorted(journals.items()):
        rows, repairs = repair(path)
        state.repairs += repairs
        if rows or path.with_name(path.name + ".torn").exists():
            state.journals.append(Segment(index, path, rows))
        else:
            drop_journal(path)
    state.next_segment = max([*(segment.index for segment in state.journals), *parts.values()], default=-1) + 1
    return state


FAILURES = "failures.jsonl"
#: The end of a record with a checksum: of all before it, closed by a brace. Earlier versions wrote a journal's lines.
_CHECKSUM = re.compile(rb',"crc32":"[0-9a-f]{8}"\}\Z')
_JOURNALED = re.compile(rb"\t[0-9a-f]{8}\Z")


def read_failures(path: str | Path) -> list[FailureRow]:
    """Every failure of the run that a path argument belongs to; empty when there were none. Damaged lines are left out
    and reported."""
    return [row for run_json in run_jsons(path) for row in read_failure_file(run_json.parent / FAILURES)]


def read_failure_file(file: Path) -> list[FailureRow]:
    """The records of one failures.jsonl, without their checksums."""
    if not file.exists():
        return []
    records: list[FailureRow] = []
    damaged = []
    for number, line in enumerate(scan(file), 1):
        record = _record(line.raw)
        if record is not None:
            records.append(record)
        elif line.closed and not line.raw.isspace() and line.raw:
            damaged.append((number, line.offset))
        # A last line without newline is being written, or was torn by a crash: opening the run then cuts it off and
        # reports it.
    report_lines(file, damaged, "record", "their checksums do not match, or they are not JSON objects")
    return records


def failure_line(body: bytes) -> bytes:
    """The line of one record's JSON: a JSON object too, with the checksum of the others as its last key."""
    return b'%b,"crc32":"%08x"}\n' % (body[:-1], zlib.crc32(body))


def _record(line: bytes) -> FailureRow | None:
    """The record of a line; None when it is not JSON, or its checksum does not match."""
    body: bytes | None = line.removeprefix(BOM)
    if _JOURNALED.search(line):
        body = unframe(line)
    elif checksum := _CHECKSUM.search(line):
        body = line[: checksum.start()] + b"}"
        body = body if failure_line(body) == line + b"\n" else None
    try:
        value = decode(body) if body is not None else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def repair_failures(file: Path) -> list[Repair]:
    """Cut off a last line that is torn, keeping it in ``FILE.torn``."""
    if not file.exists():
        return []
    with file.open("rb") as handle:
        handle.seek(max(0, file.stat().st_size - (64 << 20)))
        base = handle.tell()
        tail = handle.read()
    if not tail or tail.endswith(b"\n"):
        return []
    cut = tail.rfind(b"\n") + 1
    torn = tail[cut:]
    if _record(torn) is not None:
        with file.open("ab") as handle:  # only the end of its line is missing
            handle.write(b"\n")
        return []
    fault = Repair(file, base + cut, len(torn), True)
    put_aside(file.with_name(file.name + ".torn"), [(fault, torn)])
    os.truncate(file, base + cut)
    return [fault]


def row_parser() -> Callable[[bytes], Any]:
    """A function from a journaled row's JSON to the row; lists of tokens may be arrays where simdjson is
    installed, and build the same columns. Only for rows that this code journaled: simdjson would flatten a nested list, and
    ``check_rollout`` lets none into a journal. Not for several threads."""
    try:
        import simdjson
    except ImportError:
        # Without simdjson (no wheel for this Python) it is slower, otherwise the same.
        return orjson.loads
    parser = simdjson.Parser()

    def parse(body: bytes) -> Any:
        try:
            document: Any = parser.parse(body)
            turns = []
            for turn in document["turns"]:
                values: dict[str, object] = {}
                for key in turn:
                    value = turn[key]
                    if key in _BUFFERS:
                        kind, dtype = _BUFFERS[key]
                        values[key] = np.frombuffer(value.as_buffer(of_type=kind), dtype)
                    else:
                        values[key] = python_value(value)
                turns.append(values)
            return {key: turns if key == "turns" else python_value(document[key]) for key in document}
        except (TypeError, ValueError):
            # A non-finite log-probability is a string, which does not fit the buffer.
            return orjson.loads(body)

    return parse


def python_value(value: Any) -> Any:
    """A simdjson value as Python's."""
    if hasattr(value, "as_list"):
        return value.as_list()
    return value.as_dict() if hasattr(value, "as_dict") else value
