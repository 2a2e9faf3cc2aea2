"""Writing to an object store: a complete output in the spool is sent to the store by one writer, as a whole or not at
all.

Protocol: a marker object is made on condition that there is none; the output's run.json must still be the one that this
writer knows; data files are sent; run.json is sent on condition that it is that one; the marker is removed. While the
marker is there readers refuse the output; a writer that was stopped leaves it, and the same command sends the rest. What was
decided to be sent is on disk before anything is sent.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gymdata.errors import OutsideError, StoreError, UsageError
from gymdata.store.objects import client
from gymdata.store.objects.client import TakenError
from gymdata.store.objects.fetching import (
    MARKER,
    RUN_JSON,
    bring,
    forget,
    is_sent,
    known_tag,
    marker_of,
    remember,
    stand_in,
    unsent,
)
from gymdata.store.objects.places import Place, mirrored, place_of

_AGAIN = "what was made is kept in the spool; the same command sends the rest"


def brought(url: str | Path, spool: Path | None = None) -> Path:
    """An output's place in the spool, with what the store has there. Raises as ``located``, and UsageError for a store that
    is only read."""
    place = place_of(url, spool)
    if place.scheme == "hf":
        raise UsageError(
            f"{place}: repositories on the Hub are only read",
            hint="write to a local folder, and send it with `hf upload`",
        )
    bring(place, writing=True)
    return place.local


class Outgoing:
    """An output that is being sent. ``take``: from a writer that was stopped."""

    def __init__(self, run_json: Place, take: bool) -> None:
        self.run_json, self.take = run_json, take
        folder, _, name = run_json.key.rpartition("/")
        whole = name == RUN_JSON
        self.folder = run_json.at(folder)
        file = run_json.key.removesuffix(f".{RUN_JSON}")
        self.marker = self.folder.below(MARKER) if whole else run_json.at(marker_of(file))
        self.shown = str(self.folder if whole else run_json.at(file))
        self._whole = whole
        self._record = run_json.state.with_suffix(".sending")

    @classmethod
    def of(cls, run_json: Path, take: bool) -> Outgoing | None:
        """None for an output that stays on this machine. Raises StoreError when another writer is at it."""
        place = mirrored(run_json)
        if place is None:
            return None
        made = cls(place, take)
        holder = client.read(made.marker)
        if holder is not None and not take and _token(holder[0]) != made.token():
            raise made._held(holder[0])
        return made

    def decide(self, description: Mapping[str, Any], gone: Iterable[str], copies: Iterable[str]) -> None:
        """Keep what will be sent, before it gets its names in the spool."""
        kept = {"files": description.get("files") or [], "gone": list(gone), "copies": list(copies)}
        self._record.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._record.with_suffix(".tmp")
        temporary.write_text(json.dumps(kept))
        temporary.replace(self._record)

    def send(self) -> None:
        """Send the decided files, if the spool still holds them. Raises StoreError when another writer was first,
        OutsideError("object store") when the store is unreachable: the next call sends the rest."""
        try:
            decided = json.loads(self._record.read_bytes())
            there = json.loads(self.run_json.local.read_bytes()).get("files") or []
        except FileNotFoundError:
            return
        # A writer that was stopped before the output got its names has sent nothing, and has nothing to send.
        if there == decided["files"]:
            try:
                self._send([str(entry["path"]) for entry in there], decided["gone"], decided["copies"])
            except OutsideError as error:
                error.hint = f"{error.hint}; {_AGAIN}" if error.final else _AGAIN
                raise
        self._record.unlink(missing_ok=True)

    def _send(self, names: Sequence[str], gone: Sequence[str], copies: Sequence[str]) -> None:
        self._mark()
        base = known_tag(self.run_json)
        held = client.head(self.run_json)
        if is_sent(self.run_json) and held is not None and held.tag == base:
            self._unmark()
            return
        if (held.tag if held is not None else None) != base and not self._is_ours():
            self._unmark()
            self._record.unlink(missing_ok=True)
            raise StoreError(
                f"{self.shown}: another command has written here meanwhile",
                hint="nothing of this one was sent; look at what is there, then give another output or --overwrite",
            )
        base = known_tag(self.run_json)
        more = [file.name for file in unsent(self.folder) if file.parent == self.folder.local] if self._whole else []
        described = [f"{name}.{RUN_JSON}" for name in copies]
        for name in dict.fromkeys([*names, *(one for one in more if one != RUN_JSON), *described]):
            self._put(self.folder.below(name))
        for name in gone:
            for one in (name, f"{name}.{RUN_JSON}"):
                place = self.folder.below(one)
                client.delete(place)
                forget(place)
        if not is_sent(self.run_json):
            try:
                remember(self.run_json, client.put(self.run_json, self.run_json.local, base))
            except TakenError as error:
                raise StoreError(f"{self.shown}: another writer took over", hint="give another output") from error
        for name in names:
            stand_in(self.folder.below(name))
        self._unmark()

    def _put(self, place: Place) -> None:
        if not is_sent(place):
            remember(place, client.put(place, place.local))

    def _is_ours(self) -> bool:
        """Whether the store's run.json is the one in the spool: it was sent, and this process was stopped just then."""
        found = client.read(self.run_json)
        if found is None or found[0] != self.run_json.local.read_bytes():
            return False
        remember(self.run_json, found[1])
        return True

    def token(self) -> str | None:
        """The content of this spool's markers."""
        try:
            return _token(self.marker.state.read_bytes())
        except OSError:
            return None

    def _mark(self) -> None:
        held = client.read(self.marker)
        if held is not None and _token(held[0]) == self.token():
            return
        if held is not None and not self.take:
            raise self._held(held[0])
        put_claim(self.marker, held, self._held)

    def _unmark(self) -> None:
        client.delete(self.marker)
        self.marker.state.unlink(missing_ok=True)

    def _held(self, body: bytes) -> StoreError:
        return StoreError(
            f"{self.shown}: another process writes here ({holder(body)})",
            hint="wait for it or give another output; if it was stopped for good, --overwrite takes its place",
        )


def put_claim(place: Place, held: tuple[bytes, str] | None, taken: Callable[[bytes], StoreError]) -> None:
    """Make this process the holder of a lock object, in the place of ``held`` (its content and tag) if that is still there;
    else raise ``taken`` of what is."""
    since = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    claim = {"writer": secrets.token_hex(8), "pid": os.getpid(), "host": os.uname().nodename, "since": since}
    body = json.dumps(claim).encode()
    place.state.parent.mkdir(parents=True, exist_ok=True)
    place.state.write_bytes(body)
    try:
        client.put(place, body, None if held is None else held[1])
    except TakenError as error:
        found = client.read(place)
        raise taken(found[0] if found is not None else b"{}") from error


def holder(body: bytes) -> str:
    """The holder, for people."""
    try:
        held = json.loads(body)
        return f"pid {held['pid']} on {held['host']}, since {held['since']}"
    except (ValueError, KeyError, TypeError):
        return "holder not known"


def _token(body: bytes) -> str | None:
    try:
        return str(json.loads(body)["writer"])
    except (ValueError, KeyError, TypeError):
        return None
