"""The calls of sessions that are open, on disk: RUN/sessions/N.journal, one session each, until its row is written.

Invariants: a call is in the journal before it is answered, so a killed recorder loses only requests in flight; a session's
journal is emptied after its row was journaled, so a session is never in both for a reader of rows; what a crash tore is put
aside and reported, and a journal that is damaged elsewhere, or is the earlier of two of one session, is N.journal.damaged; a
number of which anything was put aside is not used again. An empty journal takes the next session: to make and remove a file
for each would cost more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson
import pyarrow.compute as pc

from gymdata.commands.record.sessions import Event, Session
from gymdata.errors import DataError, StoreError
from gymdata.public import Figures
from gymdata.rollouts.messages import RolloutRow
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import scan_batches
from gymdata.store.journal import Journal, line_of, repair, scan
from gymdata.store.lines import name_non_finite
from gymdata.store.paths import SESSIONS_FOLDER
from gymdata.store.run_json import sync
from gymdata.texts import raised


class SessionLog:
    """The folder of one run. ``repairs``: what of it was damaged, in sentences."""

    def __init__(self, run: Path) -> None:
        self._folder = run / SESSIONS_FOLDER
        self._folder.mkdir(exist_ok=True)
        sync(run)
        self._journals: dict[str, Journal] = {}
        #: Empty ones, and those of sessions that an earlier process left.
        self._free, self._left = list[Journal](), dict[str, Path]()
        # What was put aside of a journal keeps its number.
        numbers = (path.name.partition(".")[0] for path in self._folder.iterdir())
        self._number = max((int(number) for number in numbers if number.isdecimal()), default=-1)
        self.repairs: list[str] = []

    def read(self) -> Iterator[Session]:
        """Every session that is there, with its calls. Of two of one key the later is resumed: the earlier had ended and was
        not emptied."""
        sessions: dict[str, Session] = {}
        for path in sorted(self._folder.glob("*.journal")):
            if not path.is_file():
                self.repairs.append(f"{path}: expected a file, the journal of a session; passed over")
                continue
            if damaged := [line.offset for line in scan(path) if line.closed and not line.body]:
                # Which session it is, or which turn another one continues, is not known any more.
                self._put_aside(path, f"damaged at byte {damaged[0]:,}")
                continue
            self.repairs += map(str, repair(path)[1])
            lines = [orjson.loads(line.body) for line in scan(path) if line.body is not None]
            if len(lines) < 2:  # no call was journaled
                path.unlink()
                continue
            try:
                session = Session(**lines[0])
                for event in lines[1:]:
                    session.add(event)
            except Exception as error:  # noqa: BLE001 - a session that cannot be read ends no other
                self._put_aside(path, f"cannot be read: {raised(error)}")
                continue
            if (other := sessions.get(session.key)) is not None:
                earlier = path if session.started_at <= other.started_at else self._left[session.key]
                self._put_aside(earlier, f"session {session.key} has another journal, which began later")
                if earlier is path:
                    continue
            self._left[session.key] = path
            sessions[session.key] = session
        yield from sessions.values()

    def _put_aside(self, path: Path, why: str) -> None:
        aside = path.with_name(f"{path.name}.damaged")
        path.rename(aside)
        self.repairs.append(f"{path.name}: {why}; not resumed, and kept as {aside}")

    def append(self, session: Session, event: Event) -> None:
        """Journal one call. Raises StoreError.from_os, and TypeError (orjson's) for a
        value that no row could hold."""
        lines = [line_of(orjson.dumps(name_non_finite(event)))]
        journal = self._journals.get(session.key)
        if journal is None:
            journal = self._journals[session.key] = self._opened(session.key)
        if not journal.size:
            # In one write with its first call: a session without a call is none.
            names = ("key", "rollout_id", "named", "started_at", "spent")
            lines.insert(0, line_of(orjson.dumps({name: getattr(session, name) for name in names})))
        journal.append(b"".join(lines))

    def _opened(self, key: str) -> Journal:
        if key in self._left:
            return Journal(self._left[key])
        if self._free:
            return self._free.pop()
        self._number += 1
        return Journal(self._folder / f"{self._number:05d}.journal")

    def sync(self) -> None:
        """Bring every journal to the disk."""
        for journal in list(self._journals.values()):
            journal.sync()

    def drop(self, session: Session) -> None:
        """The session's row is written. Raises StoreError.from_os."""
        journal, left = self._journals.pop(session.key, None), self._left.pop(session.key, None)
        if left is not None:
            # Not used again: what was put aside of it has its name.
            if journal is not None:
                journal.close(keep=False)
            try:
                left.unlink(missing_ok=True)
            except OSError as error:
                raise StoreError.from_os(left, error) from error
        elif journal is not None:
            journal.empty()
            self._free.append(journal)

    def close(self) -> None:
        for journal in self._journals.values():
            journal.close()
        for journal in self._free:
            journal.close(keep=False)
            journal.path.unlink(missing_ok=True)
        self._journals.clear()
        self._free.clear()
        with contextlib.suppress(OSError):  # not empty, or removed already
            self._folder.rmdir()


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
