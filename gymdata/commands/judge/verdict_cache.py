"""Results of judge calls, which must not be paid for twice: records by key, and rows appended to a file.

Invariants: a record that ``put`` returned for survives a killed process; a power cut may take the last second; a
torn line is put aside on opening and everything before it is kept; one process writes at a time.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import orjson

from gymdata.rollouts.messages import JsonObject
from gymdata.store.journal import Journal, Repair, line_of, repair, scan
from gymdata.store.lines import encode

_SYNC_S = 1.0


class _Journaled:
    """Lines that are added to a journal, or without a file nowhere. ``repairs``: what a crash had torn."""

    def __init__(self) -> None:
        self.repairs: list[Repair] = []
        self._journal: Journal | None = None
        self._synced = time.monotonic()

    def _opened(self, file: Path) -> list[Any]:
        """What is in ``file``, without what a crash had torn."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self.repairs = repair(file)[1]
        return [orjson.loads(line.body) for line in scan(file) if line.body is not None] if file.exists() else []

    def _append(self, line: bytes) -> None:
        if self._journal is not None:
            self._journal.append(line)
            now = time.monotonic()
            if now - self._synced >= _SYNC_S:
                self._synced = now
                self._journal.sync()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()


class VerdictCache(_Journaled):
    """Records by key in one journal, or without a file in memory alone; the last record of a key counts.

    ``repairs``: what a crash had torn. Raises DataError for a file that is not such a journal.
    """

    def __init__(self, file: Path | None) -> None:
        super().__init__()
        self._records: JsonObject = {}
        if file is not None:
            for entry in self._opened(file):
                self._records |= entry["records"]
            self._journal = Journal(file, len(self._records))

    def get(self, key: str) -> Any:
        """The record, or None."""
        return self._records.get(key)

    def put(self, records: JsonObject) -> None:
        """Keep JSON values by key: a process that is killed kept all of them or none. Raises StoreError.from_os."""
        if records:
            self._append(line_of(encode({"records": dict(records)})))
            self._records.update(records)

    def __len__(self) -> int:
        return len(self._records)


class VerdictLog(_Journaled):
    """JSON rows added to one ``.jsonl`` file, each once: a row whose ``key`` is there already is left out.

    Without a file rows are only counted.
    """

    def __init__(self, file: Path | None, key: str) -> None:
        super().__init__()
        self.path = file
        self._key = key
        self._there: set[Any] = set()
        if file is not None:
            self._there = {row[key] for row in self._opened(file)}
            self._journal = Journal(file, len(self._there))

    def add(self, row: JsonObject) -> bool:
        """Append one row; False when it was there. Raises StoreError.from_os."""
        if row[self._key] in self._there:
            return False
        self._append(line_of(encode(dict(row))))
        self._there.add(row[self._key])
        return True

    def __len__(self) -> int:
        return len(self._there)
