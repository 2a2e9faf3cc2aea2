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
    """Lines that are added to a file, or without one nowhere. ``repairs``: what a crash had torn."""

    def __init__(self, file: Path | None) -> None:
        self.repairs: list[Repair] = []
        #: What was there, without what a crash had torn.
        self._found: list[JsonObject] = []
        self._journal: Journal | None = None
        self._synced = time.monotonic()
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            self.repairs = repair(file)[1]
            if file.exists():
                self._found = [orjson.loads(line.body) for line in scan(file) if line.body is not None]
            self._journal = Journal(file, len(self._found))

    def _append(self, row: JsonObject) -> None:
        """Raises StoreError.from_os."""
        if self._journal is not None:
            self._journal.append(line_of(encode(row)))
            now = time.monotonic()
            if now - self._synced >= _SYNC_S:
                self._synced = now
                self._journal.sync()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()


class VerdictCache(_Journaled):
    """Records by key; the last record of a key counts. Raises DataError for a file that is not such a journal."""

    def __init__(self, file: Path | None) -> None:
        super().__init__(file)
        self._records = {key: record for line in self._found for key, record in line["records"].items()}
        self._found.clear()

    def get(self, key: str) -> Any:
        """The record, or None."""
        return self._records.get(key)

    def put(self, records: JsonObject) -> None:
        """Keep JSON values by key: a process that is killed kept all of them or none."""
        if records:
            self._append({"records": records})
            self._records.update(records)


class VerdictLog(_Journaled):
    """JSON rows in one ``.jsonl`` file, each once: a row whose ``key`` is there already is left out."""

    def __init__(self, file: Path | None, key: str) -> None:
        super().__init__(file)
        self._key = key
        self._there = {row[key] for row in self._found}
        self._found.clear()

    def add(self, row: JsonObject) -> None:
        """Append one row, unless it was there."""
        if row[self._key] not in self._there:
            self._append(row)
            self._there.add(row[self._key])

    def __len__(self) -> int:
        return len(self._there)
