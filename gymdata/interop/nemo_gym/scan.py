"""NeMo Gym rollouts (JSONL): recognised, and scanned for faults at the speed of the JSON parser.

A row has ``responses_create_params`` and ``response.output``; items of the output that end a model call carry
``prompt_token_ids``, ``generation_token_ids`` and ``generation_log_probs``. A turn is a model call: a run of items that the
model wrote (reasoning, function_call, assistant message), ended by the item with the ids or by what others wrote.

Rows are read by ``rows.RowReader``, as the import reads them; what the import makes of a row costs 3.5 times as much as
finding its faults (200 MB/s against 57 MB/s in one process), so faults are found here.

Invariants: no Python loop over tokens; importing this loads neither pyarrow nor polars. The result does not depend on the
number of processes; a child that fails takes the whole scan with it, never a part of the rows; memory is a block, not the
file.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gymdata.checks.violations import Violation
from gymdata.errors import DataError
from gymdata.interop.nemo_gym import rows as nemo_rows
from gymdata.interop.nemo_gym.across import Remembered
from gymdata.interop.nemo_gym.acts import Odd, PathActs
from gymdata.interop.nemo_gym.cut import CutRow, all_below, all_negative, cut_row
from gymdata.interop.nemo_gym.rows import Row
from gymdata.rollouts.logprobs import POSITIVE_TOLERANCE
from gymdata.rollouts.ragged import Ragged, offsets_of
from gymdata.store.paths import BOM, Source
from gymdata.store.paths import Part as FilePart
from gymdata.workers.tuning import rare_collections

if TYPE_CHECKING:
    from gymdata.checks.breaks import Reader

_BLOCK = 1 << 20
#: Below this many bytes a second process costs more than it gives.
WORTH_SPLITTING = 24 << 20
#: Modules that start threads of their own: forking beside them is not safe.
_THREADED = ("pyarrow", "polars", "torch", "duckdb", "ray")


def may_fork() -> bool:
    return (
        hasattr(os, "fork")
        and sys.platform == "linux"
        and threading.active_count() == 1
        and not any(name in sys.modules for name in _THREADED)
    )


def scan_stretch(path: Path, start: int, end: int, scanner: Scanner) -> Part:
    with rare_collections():
        for line in _lines(path, start, end):
            scanner.line(line)
    return scanner.finish()


def _lines(path: Path, start: int, end: int) -> Iterator[bytes]:
    """Non-blank lines, with their newlines, that begin at ``start`` or later and before ``end``."""
    with path.open("rb", buffering=_BLOCK) as file:
        at = 0
        if start:
            # A line that begins before `start` belongs to the previous stretch.
            file.seek(start - 1)
            at = start - 1 + len(file.readline())
        for line in file:
            if at >= end:
                return
            text = line.removeprefix(BOM) if at == 0 else line
            at += len(line)
            if not text.isspace():
                yield text


def _forked(path: Path, size: int, scanner: Callable[[], Scanner], processes: int) -> Part:
    bounds = [size * k // processes for k in range(processes + 1)]
    children = [_child(path, bounds[k], bounds[k + 1], scanner) for k in range(1, processes)]
    whole = scan_stretch(path, 0, bounds[1], scanner())
    failed = False
    for pid, pipe in children:
        # Read from the pipe as it is unpickled: all bytes at once would double the memory.
        with os.fdopen(pipe, "rb") as stream:
            part = _received(stream)
        failed = os.waitpid(pid, 0)[1] != 0 or part is None or failed
        if part is not None and not failed:
            whole.append(part)
    # A child that died (out of memory, killed) proves nothing about its rows: scan again in this process.
    return scan_stretch(path, 0, size, scanner()) if failed else whole


def _received(stream: BinaryIO) -> Part | None:
    """A child's findings; None when it died before it had sent everything."""
    try:
        part: Part = pickle.load(stream)
    except (EOFError, pickle.UnpicklingError):
        return None
    return part


def _child(path: Path, start: int, end: int, scanner: Callable[[], Scanner]) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    status = 1
    try:
        os.close(reader)
        with os.fdopen(writer, "wb") as stream:
            pickle.dump(scan_stretch(path, start, end, scanner()), stream, pickle.HIGHEST_PROTOCOL)
        status = 0
    finally:
        # Whatever happened, the child must not run the parent's exit handlers.
        os._exit(status)
    raise AssertionError


#: (row, rollout id, turn, offset of the part in its list, prompt or generation)
IdOwner = tuple[int, str | None, int, int, str]
#: (row, rollout id, turn)
LogProbOwner = tuple[int, str | None, int]


def odd_ids(parts: Sequence[bytes], owners: Sequence[IdOwner], limit: int) -> list[Violation]:
    """T206 for every id that is negative or not below ``limit``. ``parts``: bytes of int64, one part per owner."""
    ids = np.frombuffer(b"".join(parts), np.int64)
    places = np.flatnonzero((ids < 0) | (ids >= limit))
    found = []
    ends = np.cumsum([len(part) // 8 for part in parts])
    for place in places:
        k = int(np.searchsorted(ends, place, side="right"))
        row, name, turn, offset, what = owners[k]
        position = offset + int(place - (ends[k - 1] if k else 0))
        found.append(
            Violation("T206", row, name, turn, position, f"0 to {limit - 1}", str(ids[place]), f"in the {what}")
        )
    return found


def odd_log_probs(parts: Sequence[bytes], owners: Sequence[LogProbOwner]) -> list[Violation]:
    """L302 and L303 for every log-probability that is not finite, or positive. ``parts``: float64 bytes, one per owner."""
    values = np.frombuffer(b"".join(parts), np.float64)
    places = np.flatnonzero(~np.isfinite(values) | (values > POSITIVE_TOLERANCE))
    found = []
    ends = np.cumsum([len(part) // 8 for part in parts])
    for place in places:
        k = int(np.searchsorted(ends, place, side="right"))
        position = int(place - (ends[k - 1] if k else 0))
        code, expected = ("L303", "at most 0") if np.isfinite(values[place]) else ("L302", "a finite number")
        found.append(Violation(code, *owners[k], position, expected, str(values[place])))
    return found


def relations(number: int, row: Row, reader: Reader | None = None) -> list[Violation]:
    """Breaks, branches and turns out of order of one row, in which some prompt does not extend the one before."""
    from gymdata.checks import breaks
    from gymdata.rollouts import turns as tokens

    turns, calls = [], []
    for turn, call in enumerate(row.calls):
        if call is not None and call[0]:
            turns.append(turn)
            calls.append(tokens.Call(_int32(call[0]), _int32(call[1]), np.empty(0, np.float32), "stop"))
    return [
        Violation(found.code, number, row.rollout_id, **{**found.place(), "turn": turns[found.turn]})
        for found in breaks.relations(tokens.encode_turns(calls), reader)
    ]


def _int32(data: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(data, np.int64).astype(np.int32)


#: Numbers that are checked together. More of them are no longer in the processor's cache, and their memory is touched
#: for the first time, which takes a tenth of a scan.
_CHECK_EVERY = 100_000
#: After this many consecutive rows that the fast reader could not read, it tries only one row in this many.
_TRIES = 16


#: A quote right after a key is never inside a JSON text.
REQUEST = b'"responses_create_params"'


def recognise(line: bytes) -> bool:
    """Whether a row is one of NeMo Gym's, by its keys."""
    if REQUEST in line:
        return True
    return b'"response"' in line and b'"output"' in line and b'"turns"' not in line and b'"chosen"' not in line


@dataclass(slots=True)
class Part:
    """The findings in one file, or one stretch of it. Rows count from the stretch's first."""

    rows: int = 0
    rollouts: int = 0
    turns: int = 0
    tokens: int = 0
    turns_with_ids: int = 0
    turns_with_log_probs: int = 0
    violations: list[Violation] = field(default_factory=list)
    across: Remembered = field(default_factory=Remembered)
    settings: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    #: What the model did, and (row, rollout id, turn, period, start, end, sampled tokens) of loops.
    acts: PathActs = field(default_factory=PathActs)
    loops: list[tuple[int, str | None, int, int, int, int, int]] = field(default_factory=list)

    def append(self, other: Part) -> None:
        """Join the stretch that follows this one."""
        base = self.rows
        self.rows += other.rows
        self.rollouts += other.rollouts
        self.turns += other.turns
        self.tokens += other.tokens
        self.turns_with_ids += other.turns_with_ids
        self.turns_with_log_probs += other.turns_with_log_probs
        self.violations += [v._replace(row=v.row + base) for v in other.violations]
        self.across.append(other.across)
        known = {repr(s) for _, s in self.settings}
        self.settings += [(row + base, s) for row, s in other.settings if repr(s) not in known]
        self.acts.append(other.acts, base)
        self.loops += [(one[0] + base, *one[1:]) for one in other.loops]


class Scanner:
    """Scans lines one after another. ``vocab_size`` bounds ids when it is known; ``reader`` finds the cause of breaks;
    ``odd`` finds repetition and other odd behavior; without it no data about behavior is collected."""

    def __init__(self, vocab_size: int | None = None, reader: Reader | None = None, odd: Odd | None = None) -> None:
        self.part = Part()
        self._reader = reader
        self._limit = vocab_size if vocab_size is not None else 2**31
        self._read = nemo_rows.RowReader(acts=odd is not None)
        self._odd = odd
        self._parser, self._refused = nemo_rows.fast_parser(), 0
        # Lists waiting for the next range check, as bytes, and their owners (``IdOwner``, ``LogProbOwner``).
        self._ids: list[bytes] = []
        self._id_owner: list[IdOwner] = []
        self._lps: list[bytes] = []
        self._lp_owner: list[LogProbOwner] = []
        # Sampled ids waiting for the search for loops, as bytes, and the owner and size of each list in them.
        self._sampled: list[bytes] = []
        self._sampled_owner: list[LogProbOwner] = []
        self._sizes: list[int] = []
        self._waiting = 0
        self._known_settings: set[str] = set()

    def line(self, line: bytes) -> None:
        number = self.part.rows
        self.part.rows += 1
        if (found := self._quick(line)) is not None:
            self._complete(number, line, found)
            return
        try:
            row = self._read(line)
        except nemo_rows.BadRow as bad:
            self.part.violations.append(Violation(bad.code, number, detail=bad.detail, **bad.more))
            self.part.across.bad()
            return
        self._row(number, line, row)

    def _quick(self, line: bytes) -> CutRow | None:
        """The row as the fast reader returns it, if all its numbers are in range; None when ``RowReader`` must read the
        line."""
        if self._parser is None or (self._refused > _TRIES and self.part.rows % _TRIES):
            return None
        found = cut_row(line, self._parser, self._odd is not None)
        if found is not None and not (all_below(found.ids, self._limit) and all_negative(found.log_probs)):
            found = None
        self._refused = 0 if found is not None else self._refused + 1
        return found

    def finish(self) -> Part:
        """Run the remaining checks, after the last line; returns the findings, sorted."""
        self._check()
        self.part.across.close()
        self.part.violations.sort(key=lambda v: (v.row, -1 if v.turn is None else v.turn, v.code, v.position or 0))
        return self.part

    def _row(self, number: int, line: bytes, row: nemo_rows.Row) -> None:
        part = self.part
        part.turns += len(row.calls)
        say = part.violations.append
        name = row.rollout_id
        # The prompt and generation of the call before, as bytes; a prompt that begins with them continues.
        held_prompt = held_generation = b""
        held, first, odd = 0, True, False
        generations: list[bytes] = []
        before = part.turns_with_ids
        for turn, call in enumerate(row.calls):
            if call is None:
                say(Violation("T205", number, name, turn, detail="the model call has no ids"))
                continue
            prompt, generation, log_probs = call
            if prompt and generation:
                part.turns_with_ids += 1
            else:
                lost = (
                    "prompt and generation"
                    if not prompt and not generation
                    else "prompt"
                    if generation
                    else "generation"
                )
                say(Violation("T205", number, name, turn, detail=f"{lost} ids missing, null or empty"))
            if generation:
                generations.append(generation)
                if log_probs is None or len(log_probs) != len(generation):
                    got = "none" if log_probs is None else str(len(log_probs) // 8)
                    say(Violation("L301", number, name, turn, expected=str(len(generation) // 8), got=got))
                self._ids.append(generation)
                self._id_owner.append((number, name, turn, 0, "generation"))
                self._sampled.append(generation)
                self._sampled_owner.append((number, name, turn))
                self._sizes.append(len(generation) // 8)
            if log_probs:
                part.turns_with_log_probs += 1
                self._lps.append(log_probs)
                self._lp_owner.append((number, name, turn))
            if not prompt:
                continue
            held = len(held_prompt) + len(held_generation)
            if first or (prompt.startswith(held_prompt) and prompt.startswith(held_generation, len(held_prompt))):
                new = prompt[held:]
            else:
                new, odd, held = prompt, True, 0
            held_prompt, held_generation, first = prompt, generation, False
            self._ids.append(new)
            self._id_owner.append((number, name, turn, held // 8, "prompt"))
            part.tokens += len(new) // 8 + len(generation) // 8
            self._waiting += len(new) // 8 + len(generation) // 4
        if odd:
            part.violations += relations(number, row, self._reader)
        self._beside(number, line, row, generations, part.turns_with_ids > before)

    def _complete(self, number: int, line: bytes, found: CutRow) -> None:
        """A row of which only its behavior and what is beside its tokens are still to be checked."""
        part, turns = self.part, len(found.sampled)
        part.turns += turns
        part.turns_with_ids += turns
        part.turns_with_log_probs += turns
        part.tokens += len(found.ids)
        sampled = found.ids[-len(found.log_probs) :].tobytes()
        if self._odd is not None:
            self._sampled.append(sampled)
            self._sampled_owner += [(number, found.row.rollout_id, turn) for turn in range(turns)]
            self._sizes += found.sampled
            self._waiting += len(found.log_probs)
        self._beside(number, line, found.row, [sampled], with_ids=True)

    def _beside(self, number: int, line: bytes, row: Row, generations: list[bytes], with_ids: bool) -> None:
        """Faults and data of a row besides its tokens."""
        part, name = self.part, row.rollout_id
        part.rollouts += 1
        for fault in row.faults:
            part.violations.append(
                Violation(
                    fault.code, number, name, fault.turn, expected=fault.expected, got=fault.got, detail=fault.detail
                )
            )
        if self._odd is not None and row.acts is not None:
            part.acts.add(row.acts, number, name, self._odd)
        self._reward(number, row)
        part.across.add(line, row, generations, with_ids)
        self._settings(number, row)
        if self._waiting > _CHECK_EVERY:
            self._check()

    def _reward(self, number: int, row: nemo_rows.Row) -> None:
        if row.reward is None:
            self.part.violations.append(Violation("R501", number, row.rollout_id))
        elif not math.isfinite(row.reward):
            self.part.violations.append(
                Violation("R502", number, row.rollout_id, expected="a finite number", got=str(row.reward))
            )

    def _settings(self, number: int, row: nemo_rows.Row) -> None:
        key = repr(row.settings)
        if row.settings and key not in self._known_settings:
            self._known_settings.add(key)
            self.part.settings.append((number, row.settings))

    def _check(self) -> None:
        """Ranges of all ids and log-probabilities since the last time, and loops; positions are computed only when a
        number is out of range."""
        if not all_below(np.frombuffer(b"".join(self._ids), np.int64), self._limit):
            self.part.violations += odd_ids(self._ids, self._id_owner, self._limit)
        if not all_negative(np.frombuffer(b"".join(self._lps))):
            self.part.violations += odd_log_probs(self._lps, self._lp_owner)
        if self._odd is not None:
            ids = np.frombuffer(b"".join(self._sampled), np.int64)
            for k, period, start, end in self._odd.loops(Ragged(ids, offsets_of(self._sizes))):
                self.part.loops.append((*self._sampled_owner[k], period, start, end, self._sizes[k]))
        self._ids, self._id_owner, self._lps, self._lp_owner = [], [], [], []
        self._sampled, self._sampled_owner, self._sizes, self._waiting = [], [], [], 0


def scan(
    path: Path,
    compression: Any = None,
    vocab_size: int | None = None,
    processes: int = 1,
    reader: Reader | None = None,
    odd: Odd | None = None,
    part: FilePart | None = None,
) -> Part:
    """All rows of one file, or of a ``part`` of one, which count from its first. ``processes`` > 1 cuts a plain file by
    bytes, where forking is safe. Raises DataError when the file cannot be read to its end."""

    def scanner() -> Scanner:
        return Scanner(vocab_size, reader, odd)

    if compression is not None:
        from gymdata.store.lines import iter_lines

        one = scanner()
        for _, line in iter_lines(Source(path, "jsonl", compression)):
            one.line(line)
        return one.finish()
    try:
        if part is not None:
            return scan_stretch(path, part.start, part.end, scanner())
        size = path.stat().st_size
        if processes > 1 and size >= WORTH_SPLITTING and may_fork():
            return _forked(path, size, scanner, processes)
        return scan_stretch(path, 0, size, scanner())
    except OSError as error:
        raise DataError.unreadable(path, str(error)) from error
