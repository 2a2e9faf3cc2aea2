"""The calls of sessions that are open, on disk: RUN/sessions/open.journal, one for all, until their rows are written.

A line is a call of a session (``key``), or that it ended. ``n`` counts a session's lines; its first one says how it began.

Invariants: a call is in the journal before it is answered, so a killed recorder loses only requests in flight; a session
leaves the journal after its row is on the disk, and who resumes it looks whether its row is there; a session of which a line
between others is damaged is not resumed, is reported, and stays in a copy of the journal.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import orjson
import pyarrow.compute as pc

from gymdata.commands.record.sessions import Event, Session
from gymdata.errors import DataError, StoreError
from gymdata.public import Figures
from gymdata.rollouts.messages import RolloutRow
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import Run, scan_batches
from gymdata.store.journal import Journal, line_of, repair, scan
from gymdata.store.lines import name_non_finite
from gymdata.store.lock import sync
from gymdata.store.paths import SESSIONS_FOLDER
from gymdata.texts import raised

#: Bytes above which the lines of sessions that have ended are taken out.
COMPACT_BYTES = 256 << 20
#: Between two times that rows are brought to the disk, so that their sessions can leave.
LEAVE_S = 1.0


class SessionLog:
    """The journal of one run. ``repairs``: what of it was damaged, in sentences."""

    def __init__(self, run: Run) -> None:
        self._run = run
        folder = run.folder / SESSIONS_FOLDER
        folder.mkdir(exist_ok=True)
        sync(run.folder)
        self._path = folder / "open.journal"
        self.repairs = [str(fault) for fault in repair(self._path)[1]]
        self._journal = Journal(self._path)
        sync(folder)
        #: The open sessions, and how many lines each has.
        self._lines: dict[str, int] = {}
        #: Sessions that have ended and are still in the journal, because their rows may not be on the disk yet.
        self._ended = set[str]()
        self._left_at = time.monotonic()
        self._compact_at = COMPACT_BYTES

    def read(self) -> list[Session]:
        """Every session that is open, with its calls."""
        sessions: dict[str, Session] = {}
        damaged: dict[str, str] = {}
        for line in scan(self._path):
            if line.body is None:
                continue
            entry = orjson.loads(line.body)
            key, number = entry.pop("key"), entry.pop("n")
            if number is None or "begin" in entry:
                # It ended, or begins another time.
                for known in (sessions, damaged, self._lines):
                    known.pop(key, None)
            if number is None or key in damaged:
                continue
            try:
                if "begin" in entry:
                    sessions[key] = Session(key, **entry.pop("begin"))
                if number != self._lines.get(key, 0):
                    raise ValueError(f"line {self._lines.get(key, 0)} of it is damaged")
                sessions[key].add(entry)
                self._lines[key] = number + 1
            except Exception as error:  # noqa: BLE001 - a session that cannot be read ends no other
                damaged[key] = raised(error)
                sessions.pop(key, None)
                self._lines.pop(key, None)
        if damaged:
            self._put_aside(damaged)
        return list(sessions.values())

    def _put_aside(self, damaged: dict[str, str]) -> None:
        """Keep a copy of the journal, and go on without these sessions."""
        names = (self._path.with_name(f"{self._path.name}.damaged-{n}") for n in range(1 << 30))
        copy = next(name for name in names if not name.exists())
        try:
            shutil.copyfile(self._path, copy)
        except OSError as error:
            raise StoreError.from_os(copy, error) from error
        sync(copy.parent)
        self.repairs += [f"session {key}: {why}; not resumed, and kept in {copy}" for key, why in damaged.items()]
        self._compact()

    def append(self, session: Session, event: Event) -> None:
        """Journal one call. Raises StoreError.from_os, and TypeError (orjson's) for a value that no row could hold."""
        if session.key in self._ended:
            self._leave()
        number = self._lines.get(session.key, 0)
        begin = {name: getattr(session, name) for name in ("rollout_id", "named", "started_at", "spent")}
        entry = {"key": session.key, "n": number, **({} if number else {"begin": begin}), **event}
        self._journal.append(line_of(orjson.dumps(name_non_finite(entry))))
        self._lines[session.key] = number + 1

    def drop(self, session: Session, *, at_once: bool = False) -> None:
        """The session has ended. It leaves the journal ``at_once``, or with others that end. Raises StoreError.from_os."""
        if self._lines.pop(session.key, None) is not None:
            self._ended.add(session.key)
            is_time = time.monotonic() - self._left_at >= LEAVE_S or self._journal.size > self._compact_at
            if at_once or is_time:
                self._leave()

    def _leave(self) -> None:
        """Bring the rows of sessions that have ended to the disk, and take these out. Raises StoreError.from_os."""
        self._run.sync()
        self._left_at = time.monotonic()
        if self._lines:
            for key in sorted(self._ended):
                self._journal.append(line_of(orjson.dumps({"key": key, "n": None})))
            if self._journal.size > self._compact_at:
                self._compact()
        else:
            self._journal.empty()
        self._ended.clear()

    def _compact(self) -> None:
        """Write the lines of open sessions anew. Raises StoreError.from_os."""
        new = self._path.with_name(f"{self._path.name}.tmp")
        try:
            with new.open("wb") as file:
                for line in scan(self._path):
                    if line.body is not None and orjson.loads(line.body)["key"] in self._lines:
                        file.write(line.raw + b"\n")
            sync(new)
            new.replace(self._path)
        except OSError as error:
            raise StoreError.from_os(new, error) from error
        sync(self._path.parent)
        self._journal.close(keep=False)
        self._journal = Journal(self._path)
        self._compact_at = max(COMPACT_BYTES, 2 * self._journal.size)

    def sync(self) -> None:
        """Bring the journal to the disk."""
        self._journal.sync()

    def close(self) -> None:
        """Take out what has ended; without an open session the journal goes. Raises StoreError.from_os."""
        if self._ended:
            self._leave()
        self._journal.close(keep=bool(self._lines))
        if not self._lines:
            self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty, or removed already
            self._path.parent.rmdir()


def facts_of(session: Session) -> Figures:
    """What GET /rollouts/KEY tells of an open session."""
    return {
        "key": session.key,
        "status": "open",
        "rollout_id": session.rollout_id,
        "turns": len(session.steps),
        "tokens_generated": session.encoder.n_generated_tokens,
        "conversations": len(session.threads),
        "in_flight": session.in_flight,
        "idle_s": 0.0 if session.in_flight else round(max(0.0, time.time() - session.last_at), 3),
        "ended_by": session.spent,
    }


def recorded(run: Path, rollout_id: str, columns: Sequence[str]) -> RolloutRow:
    """These columns of a rollout whose row is written."""
    for batch in scan_batches(run, ROLLOUTS, ("rollout_id", *columns)):
        if (row := pc.index(batch.column("rollout_id"), rollout_id).as_py()) >= 0:
            return {name: batch.column(name)[row].as_py() for name in ("rollout_id", *columns)}
    raise DataError(f"{run}: rollout {rollout_id} was written and is not there", hint="was the run folder changed?")
