"""A run folder being written: segments, run.json, resume.

Invariants: ``append`` returns when the row is a line of the open segment, part-k.jsonl; that becomes part-k.parquet and
nothing else, or stays; at every moment each row is in exactly one place that a reader looks at; a run is resumed with the
same identity or not at all. Sealing keeps one order: temporary name, fsync, rename, fsync of the folder, name in run.json,
drop the lines; a crash between any two steps leaves every row readable, sealing again gives the same file, and memory is
bounded by one row group.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from gymdata import __version__
from gymdata.errors import StoreError, UsageError, abridged
from gymdata.progress import leave_log, log_to
from gymdata.rollouts.messages import FailureRow, TableRow
from gymdata.rollouts.schema import ROLLOUTS, TABLES
from gymdata.store.columns import check_rollout
from gymdata.store.journal import (
    FAILURES,
    Journal,
    Repair,
    drop_lines,
    line_of,
    read_failure_file,
    recover,
)
from gymdata.store.lines import encode
from gymdata.store.lock import Lock, made_folder, refuse_held, sync
from gymdata.store.paths import (
    DERIVED,
    PART,
    ROLLOUTS_FOLDER,
    RUN_JSON,
    SESSIONS_FOLDER,
    FileEntry,
    Identity,
    RunFacts,
    Source,
)
from gymdata.store.run_json import describe_file, differences, merged, now, plain, read_run_json, write_run_json
from gymdata.store.stage_output import refuse_taken
from gymdata.store.tables import batches, read_table, sound_batches, write_batches

#: Lines take about four times the bytes of the Parquet file that they become, so this seals at about 256 MB.
SEGMENT_BYTES = 1 << 30
_OURS = frozenset({"run_id", "files", "attempts", "identity", "extent", "schemas"})


class Run:
    """A run folder open for writing; made by ``Run.open``, ended by ``close`` or as a context manager.

    ``run_id``: kept across resumes. ``folder``: where it is. ``resumed``: whether it was there before. ``repairs``:
    what a crash had torn, already put aside. ``rows``: that it holds, sealed or not. Rows are appended from one thread;
    sealing and syncing run in other threads.
    """

    def __init__(self, folder: Path, lock: Lock, facts: RunFacts, resumed: bool) -> None:
        self.folder = folder
        self.resumed = resumed
        self.repairs: list[Repair] = []
        self.rows = 0
        self._lock = lock
        self._facts = facts
        self._facts_lock = threading.RLock()
        self._journal: Journal | None = None
        self._failures: Journal | None = None
        self._stop = threading.Event()
        self._syncer: threading.Thread | None = None
        self._trouble: Exception | None = None
        self._closed = False
        self._away_s = 0.0
        self._away_since: float | None = None

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        identity: Identity,
        extent: Mapping[str, Any],
        operation: Mapping[str, Any],
        defaults: Mapping[str, Any] = types.MappingProxyType({}),
        facts: Mapping[str, Any] = types.MappingProxyType({}),
        run_id: str | None = None,
        overwrite: bool = False,
        format: Literal["parquet", "jsonl"] = "parquet",
        rows_per_file: int | None = None,
        fsync_interval_s: float = 1.0,
    ) -> Run:
        """Start or resume the run in ``folder``.

        ``identity`` must equal that of the run resumed, unless that has neither rows nor failures (``defaults``: of the
        settings that its run.json lacks); ``extent`` may grow; ``operation`` may differ, and is recorded for this attempt.
        ``overwrite`` starts again, removing only what gymdata wrote. Raises StoreError: locked, other_identity, a folder
        that is not a run, or ``overwrite`` of one in which something was made from its rollouts; DataError when the run was
        written by a newer gymdata.
        """
        if format not in ("parquet", "jsonl"):
            raise UsageError.unknown_choice("format", format, ("parquet", "jsonl"))
        if rows_per_file is not None and rows_per_file < 1:
            raise UsageError.bad_value("rows per file", rows_per_file, "at least 1")
        path = Path(folder)
        refuse_taken(path, str(facts.get("stage") or "collect"))
        with made_folder(path):
            lock = Lock(path)
        try:
            if overwrite:
                refuse_made_from(path)
                wipe(path)
            resumed = _checked(path, identity, defaults, run_id)
            new = {
                "run_id": run_id or secrets.token_hex(8),
                "gymdata": __version__,
                "schemas": {name: table.version for name, table in TABLES.items()},
                "created_at": now(),
                "identity": plain(identity),
                "extent": {},
                "attempts": [],
                "files": [],
            }
            run = cls(path, lock, resumed or new, resumed=resumed is not None)
            run._begin(extent, operation, facts, format, rows_per_file, fsync_interval_s)
        except BaseException:
            lock.release()
            raise
        return run

    @staticmethod
    def check(
        folder: str | Path,
        *,
        identity: Identity,
        defaults: Mapping[str, Any] = types.MappingProxyType({}),
        run_id: str | None = None,
        overwrite: bool = False,
    ) -> None:
        """Raise what ``open`` would raise, and write nothing."""
        path = Path(folder)
        refuse_taken(path, "collect")
        refuse_held(path)
        if overwrite:
            refuse_made_from(path)
        else:
            _checked(path, identity, defaults, run_id)

    @property
    def run_id(self) -> str:
        return str(self._facts["run_id"])

    def existing(self, columns: Sequence[str]) -> pa.Table:
        """``columns`` of every row that the run holds, sealed or not."""
        return read_table(self.folder, ROLLOUTS, columns)

    def append(self, row: TableRow) -> None:
        """Add one rollouts row. Arrays in turns are numpy; JSON columns are text; started_at has a zone.

        When it returns, a killed process loses nothing; a power cut may take the last ``fsync_interval_s``. Raises
        DataError for an invalid row, StoreError.from_os when the disk is full: then the row is not there and all
        before it are.
        """
        self._raise_trouble()
        check_rollout(row)
        self._append(line_of(encode(row)))

    def _append(self, line: bytes) -> None:
        journal = self._journal or self._open_journal(self._next)
        journal.append(line)
        self.rows += 1
        try:
            if self._fsync_interval_s <= 0:
                journal.sync()
            if journal.rows >= self._rows_per_file or journal.size >= SEGMENT_BYTES:
                self._roll()
        except StoreError as error:
            # The row is there: the next step raises it.
            self._trouble = error

    def sync(self) -> None:
        """Bring every row and failure that was added to the disk. Raises StoreError.from_os."""
        for journal in (self._journal, self._failures):
            if journal is not None:
                journal.sync()

    def fail(self, record: FailureRow) -> None:
        """Add one record to failures.jsonl. Raises StoreError.from_os."""
        self._raise_trouble()
        if self._failures is None:
            self._failures = Journal(self.folder / FAILURES)
            sync(self.folder)
        self._failures.append(line_of(encode(record)))

    def failures(self) -> list[FailureRow]:
        """Every record of failures.jsonl, of earlier attempts too."""
        return read_failure_file(self.folder / FAILURES)

    def note(self, **facts: Any) -> None:
        """Merge facts into run.json (counts, engine …); objects are merged key by key."""
        if ours := _OURS & facts.keys():
            raise ValueError(f"the store keeps these itself: {', '.join(sorted(ours))}")
        with self._facts_lock:
            self._facts = merged(self._facts, plain(facts))
            self._write()

    def server_away(self, seconds: float | None) -> None:
        """From now on no server can be reached, or, with the ``seconds`` that it took, one can be again. It is noted in
        run.json at once, for those who watch the run."""
        with self._facts_lock:
            outages = self._facts["attempts"][-1].setdefault("outages", [])
            if seconds is None:
                self._away_since = time.monotonic()
                outages.append({"began_at": now(), "seconds": None})
            else:
                self._away_s, self._away_since = self._away_s + seconds, None
                outages[-1]["seconds"] = round(seconds, 3)
            self._write()

    @property
    def away_s(self) -> float:
        """Seconds of this attempt in which no server could be reached."""
        return self._away_s + (0.0 if self._away_since is None else time.monotonic() - self._away_since)

    def sampled_with(self, **parameters: Any) -> None:
        """Parameters that change the distribution and were chosen while the run was written: they are part of what it is,
        as ``sampling`` of its identity."""
        with self._facts_lock:
            sampling = {**(self._facts["identity"].get("sampling") or {}), **plain(parameters)}
            if sampling != self._facts["identity"].get("sampling"):
                self._facts["identity"]["sampling"] = sampling
                self._write()

    def seal(self, *, wait: bool = True) -> None:
        """Seal the open segment, and ``wait`` until all rows are in sealed files."""
        self._roll()
        if wait:
            # Its one thread seals in order, so this is done when everything before is.
            self._sealer.submit(lambda: None).result()
        self._raise_trouble()

    def close(self, outcome: str = "closed") -> None:
        """Seal, finish run.json, release the lock. A second call does nothing. ``outcome``: what went wrong, if anything."""
        if self._closed:
            return
        try:
            self.seal()
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._end(outcome)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # After an error nothing is sealed: lines are safe, and sealing could hide what went wrong.
        if kind is None:
            self.close()
        elif not self._closed:
            # An error in the block matters more than one while leaving it.
            with contextlib.suppress(StoreError):
                self._end(f"{kind.__name__}: {error}")

    def _begin(
        self,
        extent: Mapping[str, Any],
        operation: Mapping[str, Any],
        facts: Mapping[str, Any],
        suffix: str,
        rows_per_file: int | None,
        fsync_interval_s: float,
    ) -> None:
        self._rows_per_file = rows_per_file or (1 << 62)
        self._fsync_interval_s = fsync_interval_s
        self._facts = merged(self._facts, plain(facts))
        # A smaller number samples less now, but removes nothing.
        before, covered = self._facts["extent"], plain(extent)
        grown = {k: max(before[k], n) for k, n in covered.items() if type(n) is int and type(before.get(k)) is int}
        self._facts["extent"] = {**before, **covered, **grown}
        self._facts["attempts"].append(
            {"started_at": now(), "ended_at": None, "pid": os.getpid(), "gymdata": __version__}
            | {"operation": plain(operation), "extent": plain(extent)}
        )
        self._write()
        log_to(self.folder)
        self._rollouts = self.folder / ROLLOUTS_FOLDER
        self._rollouts.mkdir(exist_ok=True)
        sync(self.folder)
        self._as_lines = suffix == "jsonl"
        self._sealer = ThreadPoolExecutor(1, "gymdata-seal")
        self._recover()
        if fsync_interval_s > 0:
            self._syncer = threading.Thread(target=self._keep_synced, name="gymdata-sync", daemon=True)
            self._syncer.start()

    def _recover(self) -> None:
        """Finish what a crash interrupted: half-sealed segments, torn lines, segments that were to be sealed."""
        state = recover(self.folder, self._facts["files"])
        self.repairs += state.repairs
        self._next = state.next_segment
        self.rows = sum(part["rows"] for part in self._facts["files"]) + sum(s.rows for s in state.segments)
        for segment in state.segments[:-1]:
            self._sealer.submit(self._seal, segment.path, segment.rows)
        for last in state.segments[-1:]:
            self._journal = Journal(last.path, last.rows)
            self._next = last.index + 1
            if last.rows >= self._rows_per_file or self._journal.size >= SEGMENT_BYTES:
                self._roll()

    def _open_journal(self, index: int) -> Journal:
        self._journal = Journal(self._rollouts / f"part-{index:05d}.jsonl")
        self._next = index + 1
        sync(self._rollouts)
        return self._journal

    def _roll(self) -> None:
        """Close the open segment and hand it to the sealer; the next row starts another."""
        journal, self._journal = self._journal, None
        if journal is None:
            return
        journal.close()
        if journal.rows:
            self._sealer.submit(self._seal, journal.path, journal.rows)
        else:
            journal.path.unlink()

    def _seal(self, segment: Path, rows: int) -> None:
        """Seal a closed segment, in the sealing thread, after those before it."""
        if self._trouble is not None:
            return
        try:
            if self._as_lines:
                self._name_part(segment, rows)
            else:
                part = segment.with_suffix(".parquet")
                # Lines that are damaged were reported when the segment was opened.
                rows_of_lines = sound_batches(batches(Source(segment, "segment"), ROLLOUTS))
                self._name_part(part, write_batches(rows_of_lines, part, ROLLOUTS, ROLLOUTS.arrow))
                drop_lines(segment)
        except Exception as error:  # noqa: BLE001 - a thread's fault must surface in the caller's next step
            self._trouble = error

    def _name_part(self, part: Path, rows: int) -> None:
        """Name a sealed file in run.json; called in the sealing thread, before the lines are dropped."""
        entry = describe_file(part, rows, path=f"{ROLLOUTS_FOLDER}/{part.name}")
        with self._facts_lock:
            parts = [f for f in self._facts["files"] if f["path"] != entry["path"]]
            self._facts["files"] = sorted([*parts, entry], key=lambda f: str(f["path"]))
            self._write()

    def _write(self) -> None:
        write_run_json(self.folder, self._facts)

    def _keep_synced(self) -> None:
        while not self._stop.wait(self._fsync_interval_s):
            for journal in (self._journal, self._failures):
                try:
                    if journal is not None:
                        journal.sync()
                except StoreError as error:
                    self._trouble = error
                    return

    def _raise_trouble(self) -> None:
        """Errors of the background threads are raised in the caller's next step."""
        if self._closed:
            raise ValueError("the run is closed")
        if self._trouble is not None:
            raise self._trouble

    def _end(self, outcome: str) -> None:
        self._closed = True
        self._stop.set()
        try:
            self._sealer.shutdown(cancel_futures=True)
            if self._syncer:
                self._syncer.join()
            for journal in (self._journal, self._failures):
                if journal is not None:
                    journal.close()
            with self._facts_lock:
                self._facts["attempts"][-1] |= {"ended_at": now(), "outcome": outcome}
                self._write()
        finally:
            leave_log(self.folder)
            self._lock.release()


def _checked(
    folder: Path, identity: Identity, defaults: Mapping[str, Any], run_id: str | None
) -> dict[str, Any] | None:
    """The facts of the run to resume, if that is allowed; None without a run, or for one of other settings that has
    sampled nothing and may be replaced."""
    if not (folder / RUN_JSON).exists():
        return None
    facts = read_run_json(folder / RUN_JSON)
    missing = {"run_id", "identity", "extent", "attempts", "files"} - facts.keys()
    if missing:
        raise StoreError(
            f"{folder}: run.json is not that of a collected run (it lacks {', '.join(sorted(missing))})",
            hint="give another output folder",
        )
    differing = differences(facts["identity"], identity, defaults)
    if run_id is not None and run_id != facts["run_id"]:
        differing.insert(0, ("run_id", facts["run_id"], run_id))
    if differing and holds_nothing(folder, facts["files"]):
        return None
    if differing:
        raise StoreError.other_identity(folder, differing)
    return facts


def refuse_made_from(folder: Path) -> None:
    """Raises StoreError for a run whose folder holds what was made from its rollouts, and may have been paid for."""
    folders = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    if made := sorted(name for name in folders if name.lstrip(".").startswith(DERIVED)):
        raise StoreError(
            f"{folder}: holds what was made from its rollouts: {abridged(made)}",
            hint="remove or move it first, or give another output folder",
        )


def wipe(folder: Path) -> None:
    """Remove what gymdata wrote: rollouts, failures, run.json. The lock stays held, and the log has the attempts before."""
    if not (folder / RUN_JSON).exists():
        return
    # run.json goes last: until then a crash leaves a run that can be overwritten again.
    for file in _contents(folder):
        file.unlink()
    for inside in filter(Path.is_dir, (folder / ROLLOUTS_FOLDER, folder / SESSIONS_FOLDER)):
        sync(inside)
        with contextlib.suppress(OSError):  # it holds what others put there
            inside.rmdir()
    sync(folder)
    (folder / RUN_JSON).unlink()
    sync(folder)


def holds_nothing(folder: Path, files: Sequence[FileEntry]) -> bool:
    """Whether a run has neither rows nor failures. ``files``: what run.json names as sealed."""
    # Lines are not looked into here: bytes in them may be a row, torn or not.
    return not files and not any(file.stat().st_size for file in _contents(folder))


def _contents(folder: Path) -> list[Path]:
    """The files of a run with rows or failures, and what was put aside of them or left by a killed process."""
    parts = (folder / ROLLOUTS_FOLDER).glob("*")
    ours = [p for p in parts if PART.fullmatch(p.name.removesuffix(".torn").removesuffix(".tmp").removeprefix("."))]
    failures = [folder / FAILURES, folder / (FAILURES + ".torn")]
    return [*ours, *(folder / SESSIONS_FOLDER).glob("*.journal*"), *filter(Path.exists, failures)]
