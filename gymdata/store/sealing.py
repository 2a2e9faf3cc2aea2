"""Turning a closed journal into its sealed file, beside the collecting.

What always holds: temporary name, fsync, rename, fsync of the folder, name in run.json, drop the journal, in this order;
a crash between any two steps leaves every row readable, and sealing again gives the same file. Memory is bounded by one
row group.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from gymdata.core.schema import ROLLOUTS
from gymdata.errors import GymdataError
from gymdata.store.journal import read_rows
from gymdata.store.paths import JOURNAL, ROLLOUTS_FOLDER
from gymdata.store.run_json import describe_file, sync_folder
from gymdata.store.tables import row_batches, write_batches

#: Tokens of a file that is written at once: about 256 MB.
PART_TOKENS = 64_000_000


def seal_segment(journal: Path, suffix: str) -> dict[str, Any]:
    """Write ``part-k`` from ``k.journal``; the journal stays. Returns the file's entry for run.json."""
    match = JOURNAL.fullmatch(journal.name)
    if match is None:
        raise ValueError(f"{journal} is not a journal")
    part = journal.with_name(f"part-{match[1]}.{suffix}")
    batches = row_batches(read_rows(journal, report=False), ROLLOUTS, ROLLOUTS.schema.names, str(journal))
    rows = write_batches(batches, part, ROLLOUTS, ROLLOUTS.arrow)
    return describe(part, rows)


def describe(part: Path, rows: int) -> dict[str, Any]:
    """A sealed file's entry in run.json."""
    return describe_file(part, rows, path=f"{ROLLOUTS_FOLDER}/{part.name}")


def write_parts(
    rows: Iterable[tuple[Mapping[str, Any], int]], rollouts: Path, suffix: str, index: int, rows_per_file: int
) -> Iterator[dict[str, Any]]:
    """Write rows with their tokens into ``part-index`` and following, and tell each file's entry when it is there."""
    source = iter(rows)
    for first in source:

        def numbered(first: tuple[Mapping[str, Any], int] = first) -> Iterator[tuple[int, Any, int]]:
            tokens = 0
            for number, (row, size) in enumerate(chain((first,), source), 1):
                # About what the row's JSON would take, which bounds the rows that are turned into columns at once.
                yield number, row, 2000 + 12 * size
                tokens += size
                if tokens >= PART_TOKENS or number >= rows_per_file:
                    return

        part = rollouts / f"part-{index:05d}.{suffix}"
        batches = row_batches(numbered(), ROLLOUTS, ROLLOUTS.schema.names, str(part))
        yield describe(part, write_batches(batches, part, ROLLOUTS, ROLLOUTS.arrow))
        index += 1


def drop_journal(journal: Path) -> None:
    """The last step: the rows are sealed and named."""
    journal.unlink(missing_ok=True)
    sync_folder(journal.parent)


class Sealer:
    """Seals journals one after the other in a thread that starts with the first. ``trouble``: what stopped it."""

    def __init__(self, rollouts: Path, suffix: str, name_part: Callable[[dict[str, Any]], None]) -> None:
        self.trouble: Exception | None = None
        self._rollouts = rollouts
        self.suffix = suffix
        self._name_part = name_part
        self._waiting: queue.Queue[tuple[Path, int] | None] = queue.Queue()
        self._pending = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def pending_rows(self) -> int:
        return self._pending

    def add(self, journal: Path, rows: int) -> None:
        """Seal this closed journal when its turn comes."""
        with self._lock:
            self._pending += rows
        self._waiting.put((journal, rows))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="gymdata-seal", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until everything added is sealed, or trouble stopped it."""
        self._waiting.join()

    def stop(self) -> None:
        """Finish the file in hand and end the thread; what waits stays journaled."""
        if self._thread is None:
            return
        while True:
            try:
                self._waiting.get_nowait()
                self._waiting.task_done()
            except queue.Empty:
                break
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            journal, rows = item
            try:
                if self.trouble is None:
                    self._name_part(seal_segment(journal, self.suffix))
                    drop_journal(journal)
                    with self._lock:
                        self._pending -= rows
            except (GymdataError, OSError) as error:
                self.trouble = error
            except Exception as error:  # noqa: BLE001 - a thread's fault must surface in the caller's next step
                self.trouble = error
            finally:
                self._waiting.task_done()
        self._waiting.task_done()
