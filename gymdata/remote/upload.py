"""Writing to an object store: an output is written in a local staging folder, and uploaded from there.

Protocol: a file of a folder gets a name of its content on the store (``part-00000-HASH.parquet``), so nothing is ever
overwritten; then run.json, which names them, is put on condition that it is the one that this writer knows. Who loses that
has changed nothing that readers see, however late its uploads end. An output that is one file has a name of its own: its
run.json is put first, and the file on condition that it is as it was. Staged tables that were uploaded become references.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gymdata.errors import OutsideError, StoreError, UsageError, counted, option
from gymdata.remote import client
from gymdata.remote.client import TakenError
from gymdata.remote.places import SPOOL, Place, is_odd, is_url, mirrored, place_of, staging
from gymdata.remote.reading import DATA_FILE, ROLLOUTS_FOLDER, RUN_JSON, describing, refer, referred

#: The hash in the name of an object.
HASHED = re.compile(r"-[0-9a-f]{16}(?=\.[a-z.]+$)")
_AGAIN = "what was made is safe in the staging folder; the same command sends the rest"
#: Seconds between tries to send to an unreachable store.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
_LOG = logging.getLogger("gymdata")


def staged(output: str | Path, spool: Path | None = None) -> Path:
    """An output's path in the staging folder, with the run.jsons that the store has of it and around it. Raises UsageError
    for a store that is only read, OutsideError("object store")."""
    location = place_of(output) if is_url(output) else mirrored(output)
    assert location is not None
    client.check_installed(location)
    if location.scheme == "hf":
        raise UsageError(
            f"{location}: repositories on the Hub are only read",
            hint="write to a local folder, and send it with `hf upload`",
        )
    spool = staging(spool)
    for key in dict.fromkeys([location.below(RUN_JSON).key, *describing(location.key)]):
        run_json = location.at(key)
        Upload(run_json, run_json.staged(spool)).refresh()
    return location.staged(spool)


def is_open(facts: Mapping[str, Any]) -> bool:
    """Whether a run.json on a store says that a machine is writing the run, or was killed."""
    last: Mapping[str, Any] = next(iter((facts.get("attempts") or [])[-1:]), {})
    return bool(last.get("host")) and last.get("ended_at") is None


def is_of_this_machine(run_json: Place, body: bytes) -> bool:
    """Whether a run.json on the store is what this machine's staging folder sent last."""
    return body in _read(_beside(run_json.staged(), "sent"), _beside(run_json.staged(), "sending"))


def refuse_open(run_json: Path) -> None:
    """Raise StoreError when another machine writes the run of a view; other paths pass."""
    if (location := mirrored(run_json)) is not None:
        Upload(location, run_json).refuse_other_writer()


class Upload:
    """An output in the staging folder (``local``: its run.json there) and on the store. Of a run, files are sent in a thread
    between ``start`` and ``close``. ``trouble``: what stopped that for good."""

    def __init__(self, run_json: Place, local: Path) -> None:
        self.run_json, self.local = run_json, local
        folder, _, name = run_json.key.rpartition("/")
        self.folder, self.is_folder = run_json.at(folder), name == RUN_JSON
        self.shown = str(self.folder if self.is_folder else run_json.at(run_json.key.removesuffix(f".{RUN_JSON}")))
        self.trouble: Exception | None = None
        #: Folders of what was made from the rollouts of a run that is overwritten.
        self.derived: list[str] = []
        #: The run.json that is on the store, when this machine wrote it, may have written it, or only read it.
        self._sent, self._sending, self._seen = (_beside(local, suffix) for suffix in ("sent", "sending", "seen"))
        self._record = _beside(local, "others")
        self._store: tuple[bytes, str] | None = None  # run.json there, and its tag
        self._tags: dict[str, str] = {}
        self._doomed: list[Place] = []
        self._is_run = False
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def open(
        cls, run_json: Path, *, take_over: bool = True, overwrite: bool = False, derived: str | None = None
    ) -> Upload | None:
        """None for an output that stays on this machine. Afterwards the staging folder has the store's state, or what this
        machine made of it. ``derived``: a pattern of objects in a run that are removed when it is overwritten. Raises
        StoreError when another machine writes the run, unless its place is taken, or has written what this one has not
        seen while something here was never sent; OutsideError("object store")."""
        if (location := mirrored(run_json)) is None:
            return None
        upload = cls(location, run_json)
        is_current = upload.refresh(discard=overwrite)
        upload.refuse_other_writer(take_over=take_over)
        if not is_current:
            unsent = upload.unsent()
            raise StoreError(
                f"{upload.shown}: another machine has written here, and "
                f"{counted(len(unsent), 'file of this one was', 'files of this one were')} never sent "
                f"(first: {unsent[0].name})",
                hint=f"they stay in the staging folder, {run_json.parent}; set {SPOOL} or {option('spool')} to another "
                f"folder to continue from what was sent, or give {option('overwrite', True)}",
            )
        upload._is_run = derived is not None
        upload._stage_files(overwrite, derived)
        return upload

    def refuse_other_writer(self, *, take_over: bool = False) -> None:
        """Raise StoreError when another machine writes the run."""
        self._store = self._store or client.read(self.run_json)
        facts = _facts(self._store[0] if self._store is not None else b"")
        if take_over or not is_open(facts) or (self._store and self._store[0] in _read(self._sent, self._sending)):
            return
        writer, last = facts["attempts"][-1], client.head(self.run_json)
        sent = f"; it last sent something at {last.changed}" if last is not None else ""
        raise StoreError(
            f"{self.shown}: another machine writes this run (pid {writer.get('pid')} on {writer['host']}, since "
            f"{writer.get('started_at')}{sent})",
            hint="wait for it, or give another output; if that machine is gone, `collect` takes its place with "
            f"{option('take_over', True)}, and `import` with {option('overwrite', True)}",
        )

    def refresh(self, *, discard: bool = False) -> bool:
        """Make the staged run.json that of the store, unless it was made from that. False, and nothing changed, when the
        store has another one and something here was never sent, unless that is to be discarded."""
        self._store = client.read(self.run_json)
        bodies = _read(self._sent, self._sending, self._seen)
        if self._store[0] in bodies if self._store is not None else not _read(self._sent, self._seen):
            return True
        if self.unsent() and not discard:
            return False
        for file in self._staged_files():
            file.unlink(missing_ok=True)
        if self._store is not None:
            body = self._store[0]
            facts = _facts(body)
            entries = [{**entry, "path": HASHED.sub("", str(entry["path"]))} for entry in _entries(facts)]
            self.local.parent.mkdir(parents=True, exist_ok=True)
            self.local.write_bytes(_dumped({**facts, "files": entries}) if facts else body)
            self._seen.write_bytes(body)
        return True

    def unsent(self) -> list[Path]:
        """Staged files that the store was never sent."""
        body = b"".join(_read(self._sent, self._seen)[:1])
        names = {HASHED.sub("", str(entry["path"])) for entry in _entries(_facts(body))}
        record = self._others()
        return [
            file
            for file in self._staged_files()
            if DATA_FILE.fullmatch(file.name)
            and not file.name.endswith(RUN_JSON)
            and referred(file) is None
            and file.relative_to(self.local.parent).as_posix() not in names
            and (state := _state(file))[0]
            and record.get(file.name, {}).get("state") != state
        ]

    def _staged_files(self) -> list[Path]:
        """The files of the output here, without those that hold a lock or a log."""
        folder = self.local.parent
        if not self.is_folder:
            names = [str(entry["path"]) for entry in _entries(_facts(b"".join(_read(self.local))))]
            main = self.local.name.removesuffix(f".{RUN_JSON}")
            files = [folder / name for name in {main, *names} if not is_odd(name)]
            notes = (self.local, self._sent, self._sending, self._seen, self._record)
            return [file for file in (*files, *notes) if file.is_file()]
        files = [*folder.glob("*"), *(folder / ROLLOUTS_FOLDER).glob("*")]
        suffixes = ("lock", ".lock", ".log", ".tmp")
        beside = {f.name.removesuffix(f".{RUN_JSON}") for f in files if f.name.endswith(f".{RUN_JSON}")} - {""}
        other_outputs = {name for stem in beside if stem for name in (stem, f"{stem}.{RUN_JSON}")}
        return [f for f in files if f.is_file() and not f.name.endswith(suffixes) and f.name not in other_outputs]

    def _stage_files(self, overwrite: bool, derived: str | None) -> None:
        """References to what run.json names, and the other small files, where they are missing here."""
        named = {
            self.folder.below(str(entry["path"])).key: str(entry["path"]) for entry in _entries(self._facts_there())
        }
        if not self.is_folder:
            main = self.shown.rpartition("/")[2]
            for name in {main, *named.values()}:
                stored = client.head(self.folder.below(name))
                if stored is not None and not (self.local.parent / name).exists():
                    refer(self.folder.below(name), stored, self.local.parent / name)
            return
        top, names = self.folder.below("").key, list[str]()
        for stored in client.listed(self.folder):
            names.append(name := stored.key.removeprefix(top))
            local = self.local.parent / HASHED.sub("", name)
            other = "/" not in name and not HASHED.search(name) and DATA_FILE.fullmatch(name) and name != RUN_JSON
            if (stored.key in named or other) and not is_odd(name) and not local.exists():
                refer(self.folder.at(stored.key), stored, local)
                if stored.key not in named:
                    self._note(local, stored.tag)
            if overwrite and derived is not None and re.fullmatch(derived, name):
                self._doomed.append(self.folder.at(stored.key))
                if name.endswith(f"/{RUN_JSON}"):
                    self.derived.append(name.partition("/")[0])
        is_new = derived is not None and self._store is None and not overwrite and not self.local.exists()
        foreign = sorted({name.partition("/")[0] for name in names if not HASHED.search(name)})
        if is_new and foreign:
            raise StoreError(
                f"{self.shown}: is not empty and not a run: it has no run.json (it holds {', '.join(foreign[:6])})",
                hint="give another output folder",
            )

    def send(self) -> None:
        """Bring the store to the state that the staged run.json describes. Raises StoreError when another writer was first,
        OutsideError("object store") when the store is unreachable: the next call sends the rest."""
        try:
            self._send()
        except TakenError as error:
            event = "machine took over this run" if self._is_run else "command has written here meanwhile"
            raise StoreError(
                f"{self.shown}: another {event}",
                hint="its rows are there; what this one had not sent stays in the staging folder. Give another output, or "
                f"{option('overwrite', True)}",
            ) from error

    def _send(self) -> None:
        facts = _facts(self.local.read_bytes())
        before = {
            (HASHED.sub("", str(e["path"])), e.get("xxh3")): str(e["path"]) for e in _entries(self._facts_there())
        }
        names = []
        for entry in (entries := _entries(facts)):
            path, xxh3 = str(entry["path"]), entry.get("xxh3")
            name = before.get((path, xxh3)) if self.is_folder else path
            if name is None:
                name = re.sub(r"(?<=[^/.])(?=\.[^/]*$)", f"-{xxh3}", path, count=1)
                self._tags[path] = client.put(self.folder.below(name), self.local.parent / path, by_content=True)
            names.append(name)
        if any(file.suffix == ".journal" for file in self.unsent() if file.parent.name == ROLLOUTS_FOLDER):
            # Not for another machine, without --take-over, as long as it lacks rows.
            facts["attempts"] = [*facts["attempts"][:-1], {**facts["attempts"][-1], "ended_at": None}]
        files = [{**entry, "path": name} for entry, name in zip(entries, names, strict=True)]
        self._put_run_json(_dumped({**facts, "files": files}))
        for name in [] if self.is_folder else names:
            self._put_other(name, self.local.parent / name)
        for file in self._others_here(names):
            self._put_other(file.name, file)
        for path, name in zip([str(entry["path"]) for entry in entries], names, strict=True):
            self._refer(path, name)
        for location in [*self._doomed, *map(self.folder.below, set(before.values()) - set(names))]:
            if location.key not in {self.folder.below(name).key for name in names}:
                client.delete(location)
                if not self.is_folder:
                    client.delete(location.at(f"{location.key}.{RUN_JSON}"))
        self._doomed.clear()

    def _put_run_json(self, body: bytes) -> None:
        if self._store is not None and body == self._store[0]:
            return
        # Should this process be stopped before it knows the answer, the next one knows these bytes as its own.
        self._sending.write_bytes(body)
        tag = client.put(self.run_json, body, self._store[1] if self._store is not None else None)
        self._sending.replace(self._sent)
        self._seen.unlink(missing_ok=True)
        self._store = body, tag

    def _others_here(self, names: Iterable[str]) -> Iterator[Path]:
        """Files that run.json does not name: failures, kept verdicts, and the run.jsons of an output's other files."""
        if not self.is_folder:
            beside = (self.local.parent / f"{name}.{RUN_JSON}" for name in names)
            yield from (run_json for run_json in beside if run_json.is_file() and run_json != self.local)
            return
        named = {HASHED.sub("", name) for name in names}
        for file in self._staged_files():
            is_other = file.name != RUN_JSON and file.name not in named and not file.name.startswith(".")
            if is_other and file.parent == self.local.parent and DATA_FILE.fullmatch(file.name):
                yield file

    def _put_other(self, name: str, file: Path) -> None:
        """Replace an object that has a name of its own, on condition that it is as it was, as long as run.json is ours."""
        record, state, location = self._others().get(name, {}), _state(file), self.folder.below(name)
        if record.get("state") == state or referred(file) is not None:
            return
        body: bytes | Path = file
        if self.is_folder and name.endswith((".jsonl", ".journal")):
            # Still being written: a line may be incomplete.
            lines = file.read_bytes()
            body = lines[: lines.rfind(b"\n") + 1]
        try:
            tag = client.put(location, body, record.get("tag"))
        except TakenError:
            current = client.read(self.run_json)
            if current is None or self._store is None or current[1] != self._store[1]:
                raise
            stored = client.head(location)
            tag = client.put(location, body, stored.tag if stored is not None else None)
        self._tags[name] = tag
        self._note(file, tag, state)

    def _refer(self, path: str, name: str) -> None:
        """Remove the content of a staged table that the store has."""
        local, location = self.local.parent / path, self.folder.below(name)
        if path.endswith(".parquet") and local.is_file() and referred(local) is None:
            size, tag = local.stat().st_size, self._tags.get(path)
            stored = client.Object(location.key, size, tag, "") if tag is not None else client.head(location)
            if stored is not None and stored.size == size:
                refer(location, stored, local)

    def _facts_there(self) -> dict[str, Any]:
        return _facts(self._store[0]) if self._store is not None else {}

    def _others(self) -> dict[str, Any]:
        return _facts(b"".join(_read(self._record)))

    def _note(self, file: Path, tag: str, state: list[int] | None = None) -> None:
        self._record.write_text(json.dumps(self._others() | {file.name: {"tag": tag, "state": state or _state(file)}}))

    # The thread of a run.

    def start(self) -> None:
        """Send what changes from now on, in a thread of its own."""
        self._thread = threading.Thread(target=self._work, name="gymdata-send", daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """Something was sealed or written."""
        self._wake.set()

    def close(self) -> None:
        """Send the rest. Raises as ``send``: after an OutsideError the same command sends it."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        if self.trouble is not None:
            raise self.trouble
        self.send_all()

    def send_all(self) -> None:
        """``send``, with a hint about what the store has not."""
        try:
            self.send()
        except OutsideError as error:
            error.hint = f"{error.hint}; {_AGAIN}" if error.final else _AGAIN
            raise

    def _work(self) -> None:
        wait = _FIRST_WAIT_S
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._stop.is_set():
                return
            try:
                self.send()
                wait = _FIRST_WAIT_S
            except OutsideError:
                # The rows are safe here, and the store may come back; closing says so when it does not.
                self._stop.wait(wait)
                wait = min(2 * wait, _LONGEST_WAIT_S)
                self._wake.set()
            except Exception as error:  # noqa: BLE001 - a thread's fault must surface in the caller's next step
                self.trouble = error
                return


def _beside(run_json: Path, suffix: str) -> Path:
    return run_json.with_name(f".{run_json.name}.{suffix}")


def _read(*files: Path) -> list[bytes]:
    return [file.read_bytes() for file in files if file.is_file()]


def _facts(body: bytes) -> dict[str, Any]:
    """The content of a run.json; empty for none, and for one that its readers will refuse."""
    try:
        facts = json.loads(body)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _entries(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    entries = facts.get("files")
    usable = [e for e in entries if isinstance(e, dict) and "path" in e] if isinstance(entries, list) else []
    return [entry for entry in usable if not is_odd(str(entry["path"]))]


def _dumped(facts: Mapping[str, Any]) -> bytes:
    return json.dumps(facts, indent=2, ensure_ascii=False).encode() + b"\n"


def _state(file: Path) -> list[int]:
    try:
        status = file.stat()
    except FileNotFoundError:
        return [0, 0]  # a journal that was sealed meanwhile: its part is sent next
    return [status.st_size, status.st_mtime_ns]
