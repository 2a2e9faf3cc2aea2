"""A run on an object store while it is being written: rows are journaled in the spool, sealed parts and run.json follow.

Invariants: the run.json on the store names only parts that are there, whole; it is replaced on condition that it is the
one that this writer sent last, so that a writer whose place was taken can change nothing that readers see; the object
``lock`` stays as long as the spool holds rows that the store has not. An unreachable store stops nothing before the run
is closed. What a lost machine can lose: the rows since the last part that was sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from pathlib import Path
from types import EllipsisType

from gymdata.errors import GymdataError, OutsideError, StoreError
from gymdata.store.objects import client
from gymdata.store.objects.client import TakenError
from gymdata.store.objects.fetching import RUN_JSON, bring, is_sent, known_tag, remember, stand_in, unsent
from gymdata.store.objects.places import Place, mirrored
from gymdata.store.objects.sending import holder, put_claim
from gymdata.store.paths import DERIVED, ROLLOUTS_FOLDER

LOCK = "lock"
_FAILURES = "failures.jsonl"
#: Seconds between tries to send to an unreachable store.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
#: Names of a run's own files, and of those that are made from its rollouts.
_DOOMED = re.compile(rf"({ROLLOUTS_FOLDER}|({'|'.join(DERIVED)})[^/]+)/.+|failures\.jsonl(\.torn)?")


class Replica:
    """The store's side of a run in the spool. Made by ``open``, ended by ``close``; thread-safe."""

    def __init__(self, run: Place) -> None:
        self.run = run
        self.run_json, self.lock = run.below(RUN_JSON), run.below(LOCK)
        #: The error that stopped it for good: another writer took its place.
        self.trouble: Exception | None = None
        #: The content of the object ``lock`` before this writer took it; unset where it was this writer's already.
        self._held_before: bytes | EllipsisType | None = ...
        self._doomed: list[Place] = []
        self._late: OutsideError | None = None
        self._busy = threading.Lock()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def open(cls, folder: Path, *, take_over: bool, overwrite: bool) -> Replica | None:
        """None for a run that stays on this machine. The store's state is in the spool then. Raises StoreError when another
        machine writes the run, unless its place is taken, or as ``located``; OutsideError("object store")."""
        place = mirrored(folder)
        if place is None:
            return None
        made = cls(place)
        made._claim(take_over)
        try:
            bring(place, writing=True)
        except GymdataError:
            made.give_back()
            raise
        if overwrite:
            prefix = place.below("").key
            made._doomed = [
                place.at(one.key) for one in client.listed(place) if _DOOMED.fullmatch(one.key.removeprefix(prefix))
            ]
        return made

    @staticmethod
    def check(folder: Path, *, take_over: bool) -> None:
        """Raise what ``open`` would raise, and change nothing."""
        place = mirrored(folder)
        if place is not None:
            made = Replica(place)
            held = client.read(made.lock)
            if held is not None and not take_over and not made._is_mine(held[0]):
                raise made._held(held[0])

    def give_back(self) -> None:
        """Restore the lock to what ``open`` found, for a run that is not written after all."""
        if self._held_before is ... or unsent(self.run):
            return
        with contextlib.suppress(OutsideError):
            if self._held_before is None:
                client.delete(self.lock)
            else:
                client.put(self.lock, self._held_before)
            self.lock.state.unlink(missing_ok=True)

    def start(self) -> None:
        """Send what changes from now on, in a thread of its own."""
        self._thread = threading.Thread(target=self._work, name="gymdata-send", daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """Something was sealed or written."""
        self._wake.set()

    def close(self) -> None:
        """Send the rest, and release the run. Raises OutsideError("object store"), after which the same command sends
        the rest, and StoreError when another machine took over."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        if self.trouble is not None:
            raise self.trouble
        try:
            if self._late is not None:
                raise self._late  # it was tried just now
            self.send(everything=True)
            if not unsent(self.run):
                client.delete(self.lock)
                self.lock.state.unlink(missing_ok=True)
        except OutsideError as error:
            error.hint = "all rows are safe in the spool; the same command sends what the store has not"
            raise

    def send(self, *, everything: bool = False) -> None:
        """Bring the store to the state that the run.json in the spool describes. ``everything``: also what is not the run's
        own, such as rows that an import rejected."""
        with self._busy:
            stat = self.run_json.local.stat()
            body = self.run_json.local.read_bytes()
            named = [str(entry["path"]) for entry in json.loads(body).get("files") or []]
            for path in named:
                self._send_part(self.run.below(path))
            self._send_failures()
            for file in unsent(self.run) if everything else ():
                if file.parent == self.run.local and file.name not in (RUN_JSON, _FAILURES):
                    place = self.run.below(file.name)
                    remember(place, client.put(place, place.local))
            if not is_sent(self.run_json):
                self._send_run_json(body, stat)
            for path in named:
                stand_in(self.run.below(path))
            while self._doomed:
                if not self._doomed[-1].local.exists():
                    client.delete(self._doomed[-1])
                self._doomed.pop()

    def _send_part(self, part: Place) -> None:
        if is_sent(part):
            return
        try:
            tag = client.put(part, part.local, known_tag(part))
        except TakenError:
            # A part of that name which no run.json names: of a writer that was stopped, or whose place this one took.
            self._refuse_taken()
            tag = client.put(part, part.local)
        remember(part, tag)

    def _send_failures(self) -> None:
        place = self.run.below(_FAILURES)
        if not place.local.is_file() or is_sent(place):
            return
        stat, body = place.local.stat(), place.local.read_bytes()
        # A record may be incomplete.
        if whole := body[: body.rfind(b"\n") + 1]:
            remember(place, client.put(place, whole), stat)

    def _send_run_json(self, body: bytes, stat: os.stat_result) -> None:
        before = known_tag(self.run_json)
        # Should this process be stopped before it knows the answer, the next one knows these bytes as its own.
        sending = self.run_json.state.with_suffix(".sent")
        sending.parent.mkdir(parents=True, exist_ok=True)
        sending.write_bytes(body)
        try:
            tag = client.put(self.run_json, body, before)
        except TakenError as error:
            raise self._taken() from error
        remember(self.run_json, tag, stat)

    def _refuse_taken(self) -> None:
        held = client.head(self.run_json)
        if (held.tag if held is not None else None) != known_tag(self.run_json):
            raise self._taken()

    def _taken(self) -> StoreError:
        return StoreError(
            f"{self.run}: another machine took over this run",
            hint="its rows go on there; those that this machine had not sent stay in its spool",
        )

    def _work(self) -> None:
        wait = _FIRST_WAIT_S
        while not self._stop.is_set():
            self._wake.wait()
            self._wake.clear()
            if self._stop.is_set():
                return
            try:
                self.send()
                wait = _FIRST_WAIT_S
            except OutsideError as error:
                self._late = error if self._stop.is_set() else None
                # The rows are safe here, and the store may come back; closing says so when it does not.
                self._stop.wait(wait)
                wait = min(2 * wait, _LONGEST_WAIT_S)
                self._wake.set()
            except (GymdataError, OSError, ValueError) as error:
                self.trouble = error
                return

    def _claim(self, take_over: bool) -> None:
        held = client.read(self.lock)
        if held is not None and self._is_mine(held[0]):
            return
        if held is not None and not take_over:
            raise self._held(held[0])
        put_claim(self.lock, held, self._held)
        self._held_before = None if held is None else held[0]

    def _is_mine(self, body: bytes) -> bool:
        with contextlib.suppress(OSError):
            return self.lock.state.read_bytes() == body
        return False

    def _held(self, body: bytes) -> StoreError:
        last = client.head(self.run_json)
        sent = f"; it last sent something at {last.changed}" if last is not None else ""
        return StoreError(
            f"{self.run}: another machine writes this run ({holder(body)}{sent})",
            hint="wait for it, or give another output; if that machine is gone, `collect` takes its place with --take-over, "
            "and `import` with --overwrite",
        )
