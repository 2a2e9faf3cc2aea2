"""Checks that need all NeMo Gym rows of a path: duplicates, and groups whose rewards are all equal.

Invariants: of each row 33 bytes are kept and its id, compressed; rows are compared in parts, so that this takes little more.
Importing this loads neither pyarrow nor polars.
"""

from __future__ import annotations

import bisect
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from gymdata.checks.violations import Violation
from gymdata.interop.nemo_gym.rows import Row
from gymdata.rollouts.ragged import Ints, first_like

#: Flags of what a row has; 0 for a row that cannot be read.
_READ, _WITH_IDS, _GENERATED, _SCORED = 1, 2, 4, 8
#: The flags above; hashes of the id (of the line for a row without one), of the generations with the group, and of the
#: group; the reward.
_RECORD = np.dtype([("marks", "u1"), ("key", "<u8"), ("generations", "<u8"), ("group", "<u8"), ("reward", "<f8")])
_PACKED = struct.Struct("<BQQQd")
_BAD = bytes(_RECORD.itemsize)
_WHITE = frozenset(b" \t\r\n\v\f")
#: Ids that are compressed together; parts of all rows that are compared, one after the other.
_TOGETHER, _SHARES = 1024, 16


@dataclass(slots=True)
class Remembered:
    """The data kept of the rows of one file, or of one stretch of it."""

    records: bytearray = field(default_factory=bytearray)
    #: Compressed ids, in blocks of rows, and the ids of the next block.
    names: list[tuple[int, bytes]] = field(default_factory=list)
    _waiting: list[str | None] = field(default_factory=list, init=False)

    def __len__(self) -> int:
        return len(self.records) // _RECORD.itemsize

    def bad(self) -> None:
        """The next row cannot be read."""
        self.records += _BAD
        self._named(None)

    def add(self, line: bytes, row: Row, generations: Sequence[bytes], with_ids: bool) -> None:
        """The next row. ``with_ids``: whether one of its turns has ids of its prompt and its generation."""
        name, reward = row.rollout_id, row.reward
        # A seed of their own, so that no id is taken for a line.
        key = xxhash.xxh3_64_intdigest(_bare(line)) if name is None else xxhash.xxh3_64_intdigest(_bytes(name), 1)
        group = xxhash.xxh3_64_intdigest(_bytes(row.group))
        generated = xxhash.xxh3_64_intdigest(b"".join(generations), group) if generations else 0
        marks = _READ | _WITH_IDS * with_ids | _GENERATED * bool(generations) | _SCORED * (reward is not None)
        self.records += _PACKED.pack(marks, key, generated, group, 0.0 if reward is None else reward)
        self._named(name)

    def close(self) -> None:
        """After the last row."""
        if self._waiting:
            self.names.append((len(self._waiting), zlib.compress(json.dumps(self._waiting).encode(), 1)))
            self._waiting = []

    def append(self, other: Remembered) -> None:
        """Join what another that was closed remembers of the rows that follow."""
        self.close()
        self.records += other.records
        self.names += other.names

    def column(self, name: str) -> npt.NDArray[Any]:
        """One number per row."""
        column: npt.NDArray[Any] = np.frombuffer(self.records, _RECORD)[name]
        return column

    @property
    def with_ids(self) -> int:
        """How many rows have a turn with ids of its prompt and its generation."""
        return int(np.count_nonzero(self.column("marks") & _WITH_IDS))

    def has_ids(self, row: int) -> bool:
        """Whether this one has."""
        return bool(self.records[row * _RECORD.itemsize] & _WITH_IDS)

    @property
    def first(self) -> int | None:
        """The first row that can be read."""
        return next(iter(np.flatnonzero(self.column("marks")).tolist()), None)

    @property
    def rewards(self) -> npt.NDArray[np.float64]:
        """The rewards of the rows that can be read; NaN for a missing one."""
        marks = self.column("marks")
        return np.where(marks & _SCORED, self.column("reward"), np.nan)[marks > 0]

    def _named(self, name: str | None) -> None:
        self._waiting.append(name)
        if len(self._waiting) == _TOGETHER:
            self.close()


class Names:
    """The ids of the rows of one file; quick where they are looked up in order."""

    def __init__(self, remembered: Remembered) -> None:
        self._parts = remembered.names
        self._begin = [0, *accumulate(rows for rows, _ in remembered.names)]
        self._held: tuple[int, list[str | None]] = -1, []

    def __getitem__(self, row: int) -> str | None:
        part = bisect.bisect_right(self._begin, row) - 1
        if part != self._held[0]:
            self._held = part, json.loads(zlib.decompress(self._parts[part][1]))
        return self._held[1][row - self._begin[part]]


def across_rows(files: Sequence[tuple[str, Remembered]]) -> Iterator[Violation]:
    """D701, D702 and R503 over all rows of all files, which are closed; in the order of the rows."""
    begin = [0, *accumulate(len(of) for _, of in files)]
    names = [Names(of) for _, of in files]

    def place(r: int) -> tuple[int, int]:
        file = bisect.bisect_right(begin, r) - 1
        return file, r - begin[file]

    def shown_place(r: int) -> str:
        file, row = place(r)
        return f"{files[file][0]} row {row}"

    marks = _column(files, "marks")
    later = dict(_later(_column(files, "key"), marks > 0))
    found: list[tuple[int, str, dict[str, Any]]]
    found = [(r, "D701", {"detail": f"first seen at {shown_place(first)}"}) for r, first in later.items()]
    counts = np.ones(len(marks), np.bool_)
    counts[list(later)] = False
    twins = _later(_column(files, "generations"), counts & (marks & _GENERATED > 0))
    found += ((r, "D702", {"detail": f"same tokens as {shown_place(first)}"}) for r, first in twins)
    equal = _equal_rewards(_column(files, "group"), _column(files, "reward"), counts & (marks & _SCORED > 0))
    found += ((r, "R503", {"got": f"{reward:g} for all {n}"}) for r, reward, n in equal)
    for r, code, more in sorted(found, key=lambda one: one[:2]):
        file, row = place(r)
        yield Violation(code, row, names[file][row], file=files[file][0], **more)


def _equal_rewards(
    groups: npt.NDArray[np.uint64], rewards: npt.NDArray[np.float64], counts: npt.NDArray[np.bool_]
) -> Iterator[tuple[int, float, int]]:
    """(first row, reward, rows) of every group of two or more of the rows that count, whose rewards are all equal."""
    for rows in _shares(groups, counts):
        leads, inverse = np.unique(first_like(groups[rows]), return_inverse=True)
        n, reward = np.bincount(inverse), rewards[rows]
        varies = np.bincount(inverse, weights=reward != reward[leads][inverse]) > 0
        for g in np.flatnonzero((n > 1) & ~varies & np.isfinite(reward[leads])).tolist():
            yield int(rows[leads[g]]), float(reward[leads[g]]), int(n[g])


def _later(keys: npt.NDArray[np.uint64], counts: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """(row, the first before it that has its key) of the rows that count."""
    for rows in _shares(keys, counts):
        first = first_like(keys[rows])
        for k in np.flatnonzero(first != np.arange(len(rows))).tolist():
            yield int(rows[k]), int(rows[first[k]])


def _shares(keys: npt.NDArray[np.uint64], counts: npt.NDArray[np.bool_]) -> Iterator[Ints]:
    """The rows that count, in parts; those with one key are in one part, in order."""
    for share in range(_SHARES):
        rows = np.flatnonzero(counts & (keys % np.uint64(_SHARES) == share))
        if len(rows):
            yield rows


def _column(files: Sequence[tuple[str, Remembered]], name: str) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, _RECORD[name]), *(of.column(name) for _, of in files)])


def _bare(line: bytes) -> memoryview:
    """A line that is not blank, without the white space around it; ``strip`` would copy it."""
    begin, end = 0, len(line)
    while line[end - 1] in _WHITE:
        end -= 1
    while line[begin] in _WHITE:
        begin += 1
    return memoryview(line)[begin:end]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
