"""Which rollouts have faults: the errors that ``gymdata validate`` finds in single rows, looked for beside the pages.

Invariants: a file is checked once, and of one that grows only what was added; a page never waits for more than a
moment, and says how many rollouts are not checked yet; many rollouts are checked only on request, a thousand at a time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gymdata.errors import GymdataError
from gymdata.rollouts.breaks import Reader, Reading
from gymdata.rollouts.checks import check_batch
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.turn_columns import from_arrow
from gymdata.rollouts.violations import CODES, Violation
from gymdata.store.lineage import vocabulary
from gymdata.store.partial_reads import RowGroup
from gymdata.store.tables import scan_batches
from gymdata.view.evidence.index import Snapshot

Rows = npt.NDArray[np.int64]
_BATCH_ROWS = 1_024
#: Most rollouts that are checked without a request, and most that are checked before their page is shown.
UNASKED = 20_000
_WAITED_FOR = 5_000
_WAIT_S = 0.5
#: Columns that the checks read.
_CHECKED = ["rollout_id", "run_id", "group_id", "policy", "reward", "rewards", "temperature", "n_turns", "n_context_tokens",
            "n_generated_tokens", "messages", "turns"]  # fmt: skip
#: The vocabulary of a rollout's tokenizer, of its run_id and policy.
VocabularyOf = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Found:
    """``rows``: by code, the rows of a snapshot with that error, rising; ``unchecked``: rollouts not looked at yet;
    ``running``: whether they are being looked at."""

    rows: Mapping[str, Rows] = field(default_factory=dict)
    unchecked: int = 0
    running: bool = False

    @property
    def any(self) -> Rows:
        """The rows with an error."""
        return np.unique(np.concatenate([np.zeros(0, np.int64), *self.rows.values()]))

    def with_code(self, code: str) -> Rows:
        """The rows with that error, or, for ``any``, with one of them."""
        return self.any if code == "any" else self.rows.get(code, np.zeros(0, np.int64))

    def of(self, row: int) -> list[str]:
        """The codes of a row."""
        return [
            code
            for code, rows in self.rows.items()
            if (at := np.searchsorted(rows, row)) < len(rows) and rows[at] == row
        ]


@dataclass(frozen=True)
class _Unit:
    """Rows that are checked together. ``owner`` is the same object as long as they are the same rows."""

    owner: object
    path: Path
    rows: int

    def batches(self) -> Iterator[pa.RecordBatch]:
        if isinstance(self.owner, RowGroup):
            yield from self.owner.load().combine_chunks().to_batches()
        else:
            yield from scan_batches(self.path, ROLLOUTS, _CHECKED, _BATCH_ROWS)


def _units(snapshot: Snapshot) -> Iterator[_Unit]:
    for part in snapshot.parts:
        if part.source.kind == "parquet":
            yield _Unit(part, part.source.path, part.table.num_rows)
        else:
            yield from (_Unit(group, part.source.path, group.rows) for group in part.groups)


class Faults:
    """The faults of all rollouts, found by a thread that runs while there is something to check. ``unasked``: up to
    this many are checked without a request."""

    def __init__(self, vocabulary_of: VocabularyOf, unasked: int = UNASKED) -> None:
        self._vocabulary_of, self._unasked = vocabulary_of, unasked
        self._guard = threading.Lock()
        #: By owner: the unit itself, so that the owner's id stays its own, and the rows of each code, from 0.
        self._known: dict[int, tuple[_Unit, dict[str, Rows]]] = {}
        self._thread: threading.Thread | None = None
        self._wanted = self._ended = False
        self._merged: tuple[Any, Found] = (None, Found())

    def close(self) -> None:
        """End the thread, after the rows that it is at."""
        self._ended = True
        if self._thread is not None:
            self._thread.join()

    def found(self, snapshot: Snapshot, *, wanted: bool = False) -> Found:
        """The faults known so far of the rows of ``snapshot``. ``wanted``: check them all, however many there are."""
        units = list(_units(snapshot))
        with self._guard:
            self._wanted = self._wanted or wanted or len(snapshot) <= self._unasked
            left = [unit for unit in units if id(unit.owner) not in self._known] if self._wanted else []
            if left and (self._thread is None or not self._thread.is_alive()):
                self._known = {id(u.owner): self._known[id(u.owner)] for u in units if id(u.owner) in self._known}
                self._thread = threading.Thread(
                    target=self._check, args=(left,), name="gymdata-view-faults", daemon=True
                )
                self._thread.start()
            thread = self._thread
        if left and thread is not None and sum(unit.rows for unit in left) <= _WAITED_FOR:
            thread.join(_WAIT_S)
        return self._of(snapshot.version, units)

    def _of(self, version: int, units: Sequence[_Unit]) -> Found:
        with self._guard:
            known = [self._known.get(id(unit.owner)) for unit in units]
        state = (version, self._wanted, sum(one is not None for one in known))
        if self._merged[0] == state:
            return self._merged[1]
        rows: dict[str, list[Rows]] = {}
        start = unchecked = 0
        for unit, one in zip(units, known, strict=True):
            for code, mine in (one[1] if one is not None else {}).items():
                rows.setdefault(code, []).append(mine + start)
            unchecked += unit.rows if one is None else 0
            start += unit.rows
        found = Found({code: np.concatenate(rows[code]) for code in sorted(rows)}, unchecked, self._wanted)
        self._merged = state, found
        return found

    def _check(self, units: Sequence[_Unit]) -> None:
        for unit in units:
            try:
                rows = self._faulty(unit)
            except (GymdataError, OSError, pa.ArrowException):
                rows = {}  # a file that cannot be read: the pages say so
            if self._ended:
                return
            with self._guard:
                self._known[id(unit.owner)] = unit, rows

    def _faulty(self, unit: _Unit) -> dict[str, Rows]:
        vocab, rows, first = vocabulary(unit.path), dict[str, set[int]](), 0
        for batch in unit.batches():
            if self._ended:
                return {}
            about = dict(next(iter(batch.slice(0, 1).select(["run_id", "policy"]).to_pylist()), {}))
            reader = reader_of(functools.partial(self._vocabulary_of, about))
            for one in errors_in(violations(batch, first, vocab, reader)):
                rows.setdefault(one.code, set()).add(one.row)
            first += len(batch)
        return {code: np.array(sorted(mine), np.int64) for code, mine in rows.items()}


def violations(batch: pa.RecordBatch, first: int, vocab: int | None, reader: Reader | None) -> list[Violation]:
    """The violations in the rows of a batch, each with its severity; ``first`` is the number of its first row."""
    evidence = from_arrow(batch, first)
    with_ids = set(evidence.rows[evidence.turns.has_ids()].tolist())
    found = []
    for one in check_batch(evidence, vocab_size=vocab, reader=reader):
        # A rollout without token ids is not damaged.
        texts = one.code == "T205" and one.row not in with_ids
        found.append(one._replace(severity="warning" if texts else one.severity or CODES[one.code].severity))
    return found


def errors_in(found: Sequence[Violation]) -> list[Violation]:
    return [one for one in found if one.severity == "error"]


def reader_of(load: Callable[[], Any]) -> Reader:
    """The reader of ids, loaded at the first break; None without a tokenizer."""

    def reading() -> Reading | None:
        known = load()
        return Reading(known.decode, known.special) if known is not None else None

    return reading
