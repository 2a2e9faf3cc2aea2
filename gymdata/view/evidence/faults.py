"""Which rollouts have faults: the errors that ``gymdata validate`` finds in single rows, looked for beside the pages."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gymdata.checks.breaks import Reader, Reading
from gymdata.errors import GymdataError
from gymdata.rollouts.messages import RolloutRow
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.show.rollout import violations
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
_CHECKED = [
    *("rollout_id", "run_id", "group_id", "policy", "reward", "rewards", "temperature"),
    *("n_turns", "n_context_tokens", "n_generated_tokens", "messages", "turns"),
]
#: The vocabulary of a rollout's tokenizer, of its run_id and policy.
VocabularyOf = Callable[[RolloutRow], Any]


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
            if (index := np.searchsorted(rows, row)) < len(rows) and rows[index] == row
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


class Faults:
    """The faults of all rollouts, found by a thread of its own. ``unasked``: up to this many are checked without a
    request."""

    def __init__(self, vocabulary_of: VocabularyOf, unasked: int = UNASKED) -> None:
        self._vocabulary_of, self._unasked = vocabulary_of, unasked
        self._guard = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "gymdata-view-faults")
        #: By the id of its owner: the unit itself, so that the id stays its own, and the rows of each code, from 0.
        self._checks: dict[int, tuple[_Unit, Future[dict[str, Rows]]]] = {}
        self._wanted = self._ended = False
        self._merged: tuple[tuple[int, bool, int], Found] | None = None

    def close(self) -> None:
        """End the thread, after the rows that it is at."""
        self._ended = True
        self._thread.shutdown(cancel_futures=True)

    def of(self, snapshot: Snapshot, *, check_all: bool = False) -> Found:
        """The faults known so far of the rows of ``snapshot``. ``check_all``: check them all, however many there are."""
        units: list[_Unit] = []
        for part in snapshot.parts:
            if part.source.kind == "parquet":
                units.append(_Unit(part, part.source.path, part.table.num_rows))
            else:
                units += (_Unit(group, part.source.path, group.rows) for group in part.groups)
        with self._guard:
            self._wanted = self._wanted or check_all or len(snapshot) <= self._unasked
            if self._wanted and not self._ended:
                self._checks = {
                    id(unit.owner): self._checks.get(id(unit.owner)) or (unit, self._thread.submit(self._faulty, unit))
                    for unit in units
                }
            checks = [self._checks.get(id(unit.owner)) for unit in units]
        left = [(unit.rows, future) for unit, future in filter(None, checks) if not future.done()]
        if sum(rows for rows, _ in left) <= _WAITED_FOR:
            wait([future for _, future in left], _WAIT_S)
        by_unit = [check[1].result() if check is not None and check[1].done() else None for check in checks]
        state = (snapshot.version, self._wanted, sum(rows is not None for rows in by_unit))
        if self._merged is None or self._merged[0] != state:
            self._merged = state, _merged(units, by_unit, running=self._wanted)
        return self._merged[1]

    def _faulty(self, unit: _Unit) -> dict[str, Rows]:
        rows, first = dict[str, set[int]](), 0
        try:
            vocab = vocabulary(unit.path)
            for batch in unit.batches():
                if self._ended:
                    break
                about = dict(next(iter(batch.slice(0, 1).select(["run_id", "policy"]).to_pylist()), {}))
                reader = reader_of(functools.partial(self._vocabulary_of, about))
                for violation in violations(batch, first, vocab, reader):
                    if violation.severity == "error":
                        rows.setdefault(violation.code, set()).add(violation.row)
                first += len(batch)
        except (GymdataError, OSError, pa.ArrowException):
            return {}  # a file that cannot be read: the pages say so
        return {code: np.array(sorted(numbers), np.int64) for code, numbers in rows.items()}


def _merged(units: Sequence[_Unit], by_unit: Sequence[dict[str, Rows] | None], *, running: bool) -> Found:
    """The faults of all units by the numbers of a snapshot's rows."""
    rows: dict[str, list[Rows]] = {}
    start = unchecked = 0
    for unit, by_code in zip(units, by_unit, strict=True):
        for code, of_unit in (by_code or {}).items():
            rows.setdefault(code, []).append(of_unit + start)
        unchecked += unit.rows if by_code is None else 0
        start += unit.rows
    return Found({code: np.concatenate(rows[code]) for code in sorted(rows)}, unchecked, running)


def reader_of(load: Callable[[], Any]) -> Reader:
    """The reader of ids, loaded at the first break; None without a tokenizer."""

    def reading() -> Reading | None:
        vocab = load()
        return Reading(vocab.decode, vocab.special) if vocab is not None else None

    return reading
