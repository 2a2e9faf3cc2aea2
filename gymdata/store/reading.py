"""Which changed or damaged data readers accept, and what they report of it.

Invariants: a sealed file whose bytes are not those that its run.json recorded is read only where that was allowed;
what a reader had to leave out is reported, once, and never dropped in silence. The command line prints the reports and
ends with exit code 1 for damage; outside it they are Python warnings.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymdata.errors import DataError, shown
from gymdata.store.paths import PART, ROLLOUTS_FOLDER, FileEntry, RunFacts, Source, find_run_json, read_facts

if TYPE_CHECKING:
    from gymdata.rollouts.schema import Table

#: Environment variable by which child processes (trainers, the commands of a finetuning run) may read changed files.
_ALLOW_CHANGED = "GYMDATA_ALLOW_CHANGED"
#: Smaller files are hashed faster than a remembered hash is looked up.
_REMEMBERED_BYTES = 1 << 20


class DataWarning(UserWarning):
    """A reader's report outside the command line."""


@dataclass
class Reading:
    """Settings and reports of readers.

    ``allow_changed``: files that differ from their run.json are read, with a warning. ``damage``: what was left out.
    ``warnings``: other reports. ``report`` receives each line of both when it is found.
    """

    allow_changed: bool = False
    report: Callable[[str], None] = lambda line: warnings.warn(line, DataWarning, stacklevel=4)
    damage: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, lines: list[str], line: str) -> None:
        line = shown(line)
        if line in lines:
            return
        # Outside a block each reading reports again.
        if self is not _OUTSIDE:
            lines.append(line)
        self.report(line)


_OUTSIDE = Reading(allow_changed=os.environ.get(_ALLOW_CHANGED) == "1")
_current = _OUTSIDE
known_hashes: dict[Path, tuple[tuple[int, ...], str]] = {}
_described: dict[Path, tuple[tuple[int, ...], dict[Path, dict[str, Any]], dict[str, Any], bool]] = {}
_UNNAMED = "it is not among the files of this run, which has ended"
_guard = threading.Lock()


@contextlib.contextmanager
def reading(allow_changed: bool | None = None, report: Callable[[str], None] | None = None) -> Iterator[Reading]:
    """Read with other settings, in all threads of this process, until the block ends.

    ``allow_changed``: read sealed files that differ from what run.json recorded (a warning stays); None keeps the
    current setting. ``report``: receives each warning and each report of damage instead of Python's warnings.
    """
    global _current
    before = _current
    allowed = before.allow_changed if allow_changed is None else allow_changed
    _current = Reading(allowed, report or before.report)
    try:
        yield _current
    finally:
        _current = before


def current() -> Reading:
    return _current


def child_environment() -> Mapping[str, str]:
    """The environment variables for a child process to read with the same settings."""
    return {_ALLOW_CHANGED: "1" if _current.allow_changed else "0"}


def report_damage(line: str) -> None:
    """Report that rows were left out because the file is damaged."""
    _current.add(_current.damage, line)


def warn(line: str) -> None:
    """Warn about data that is used nevertheless."""
    _current.add(_current.warnings, line)


def report_lines(path: Path, lines: list[tuple[int, int | None]], of: str, why: str) -> None:
    """Report lines (1-based number, byte offset if known) of a file whose rows are left out."""
    if not lines:
        return
    places = (f"line {n:,}" + ("" if offset is None else f" at byte {offset:,}") for n, offset in lines[:8])
    shown = ", ".join(places)
    more = f" and {len(lines) - 8:,} more" if len(lines) > 8 else ""
    many = f"{len(lines):,} damaged {of}s left out" if len(lines) > 1 else f"1 damaged {of} left out"
    report_damage(f"{path}: {many} ({shown}{more}): {why}")


def check_source(source: Source, table: Table | None = None) -> str | None:
    """Raise DataError when a sealed file is not as its run.json recorded it (size, then every byte), or when run.json says
    that its table has a newer version, or does not name a part of a run that has ended. Other files pass.

    Where changed files may be read, such a file gives a warning; it is returned, too.
    """
    described = _entry_of(source.path)
    if described is None:
        return None
    run_json, entry, schemas = described
    if entry is None and not source.path.exists():
        return None  # sealed since it was found
    version = schemas.get(table.name) if table is not None else None
    if table is not None and isinstance(version, int) and version > table.version:
        raise DataError.newer_schema(source.path, table.name, version, table.version)
    try:
        why = _UNNAMED if entry is None else difference(source.path, entry)
    except FileNotFoundError:
        return None  # its reader reports it
    if why is None:
        return None
    if entry is None and not _current.allow_changed:
        raise DataError.unnamed(source.path, run_json)
    if not _current.allow_changed:
        raise DataError.changed(source.path, run_json, why)
    line = f"{source.path}: differs from what {run_json.name} recorded: {why}"
    warn(line)
    return line


def difference(path: Path, entry: FileEntry) -> str | None:
    """How a file differs from its entry in run.json: in size, else in its bytes; None when it does not."""
    size = path.stat().st_size
    if entry.get("bytes") not in (None, size):
        return f"{size:,} bytes, not {entry['bytes']:,}"
    if entry.get("xxh3") not in (None, file_hash(path)):
        return "other bytes (xxh3)"
    return None


def altered(run_json: Path, files: Sequence[Path]) -> list[tuple[Path, str]]:
    """The ``files`` that differ from what ``run_json`` recorded (size, then every byte), each with the difference, and the
    parts of a run that it should name; other files that it does not name are skipped."""
    facts = read_facts(run_json)
    recorded = {(run_json.parent / str(f["path"])).resolve(): f for f in facts.get("files") or []}
    differing = [(file, difference(file, recorded[file.resolve()])) for file in files if file.resolve() in recorded]
    described = [
        (file, f"not the file that {run_json.name} describes: {why}") for file, why in differing if why is not None
    ]
    unnamed = (file for file in files if file.resolve() not in recorded and _has_ended(facts) and _is_part(file))
    return described + [(file, f"{run_json.name} does not name it: {_UNNAMED}") for file in unnamed]


def same_content(files: Iterable[Path]) -> Iterator[tuple[Path, Path]]:
    """Pairs of files that hold the same bytes, the first of them and a copy. Files that are not there pass."""
    by_size: dict[int, list[Path]] = {}
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            by_size.setdefault(file.stat().st_size, []).append(file)
    for size, alike in by_size.items():
        first: dict[str, Path] = {}
        for file in alike if size and len(alike) > 1 else ():
            first_file = first.setdefault(file_hash(file), file)
            if first_file is not file:
                yield first_file, file


def file_hash(path: Path, settled_ns: int = 2_000_000_000) -> str:
    """xxh3 of a file's bytes, computed once as long as its size, times and inode stay the same.

    That of a large file is remembered across processes, in the user's cache folder where one can be written. A file that
    changed less than ``settled_ns`` before is hashed again: it could have changed within the resolution of its times.
    """
    import orjson
    import xxhash

    file = path.resolve()
    state = _state(file)
    with _guard:
        cached = known_hashes.get(file)
    if cached is not None and cached[0] == state:
        return cached[1]
    value = memo = None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path raises without a home
    # "~" may be there that could not be expanded.
    if state[0] >= _REMEMBERED_BYTES and os.path.isabs(home):  # noqa: PTH117 - as above
        memo = Path(home, "gymdata", "hashes", xxhash.xxh3_128_hexdigest(os.fsencode(file)) + ".json")
    if memo is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            memory = orjson.loads(memo.read_bytes())
            if memory["path"] == str(file) and tuple(memory["state"]) == state:
                value = str(memory["xxh3"])
    if value is None:
        from gymdata.store.run_json import hash_file

        value = hash_file(file)
        if _state(file) != state or time.time_ns() - max(state[1], state[2]) < settled_ns:
            return value
        if memo is not None:
            temporary = memo.with_name(f".{memo.name}.{os.getpid()}.{threading.get_ident()}")
            # Without a cache folder the file is hashed again the next time.
            with contextlib.suppress(OSError, TypeError):
                memo.parent.mkdir(parents=True, exist_ok=True)
                temporary.write_bytes(orjson.dumps({"path": str(file), "state": state, "xxh3": value}))
                temporary.replace(memo)
    with _guard:
        known_hashes[file] = (state, value)
    return value


def _state(file: Path) -> tuple[int, ...]:
    """Values that change when a file does. The change time is the kernel's: copying times onto a file updates it."""
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev


def _is_part(file: Path) -> bool:
    return file.parent.name == ROLLOUTS_FOLDER and PART.fullmatch(file.name) is not None


def _has_ended(facts: RunFacts) -> bool:
    """Whether the last writer of a run closed it: a part is renamed before run.json names it, and then it does."""
    last: RunFacts = next(iter((facts.get("attempts") or [])[-1:]), {})
    return last.get("outcome") == "closed" and last.get("ended_at") is not None


def _entry_of(path: Path) -> tuple[Path, dict[str, Any] | None, dict[str, Any]] | None:
    """(run.json, the file's entry, the versions of its tables), when a run.json names the file, or should do so."""
    run_json = find_run_json(path)
    if run_json is None:
        return None
    state = _state(run_json)
    with _guard:
        cached = _described.get(run_json)
    if cached is None or cached[0] != state:
        try:
            facts = read_facts(run_json)
        except DataError as error:
            if error.code == "S104":
                raise  # a newer version's rows may mean something else
            # Files beside a damaged run.json may be read by their names; nothing then records what they must be.
            warn(f"{path}: is read without the check against run.json ({error.message})")
            return None
        entries = {(run_json.parent / str(f["path"])).resolve(): f for f in facts.get("files") or []}
        cached = (state, entries, facts.get("schemas") or {}, _has_ended(facts))
        with _guard:
            _described[run_json] = cached
    entry = cached[1].get(path.resolve())
    return None if entry is None and not (cached[3] and _is_part(path)) else (run_json, entry, cached[2])


#: Stages whose output is scores of rollouts, which a later call of the same command replaces.
SCORED = ("score", "judge")


def content_of(facts: RunFacts) -> dict[str, str]:
    """The hash of each file that run.json names."""
    return {str(entry["path"]): str(entry["xxh3"]) for entry in facts.get("files") or [] if entry.get("xxh3")}


def warn_of_changed_scores(path: str | Path) -> None:
    """Warn of each table of scores that ``path`` was made from and that has other content by now."""
    run_json = find_run_json(path)
    facts = {} if run_json is None else read_facts(run_json)
    for parent in facts.get("parents") or []:
        named = Path(str(parent.get("path")))
        # A run that was moved whole still has its scores inside.
        paths = [named, *([run_json.parent.parent / named.name] if run_json is not None else [])]
        now = next((read_facts(file) for file in map(find_run_json, paths) if file is not None), {})
        if parent.get("files") and now.get("stage") in SCORED and content_of(now) != parent["files"]:
            stage = str(facts.get("stage"))
            command = {"experiences": "experience"}.get(stage, stage)
            text = f"{named.name} changed after {path} was made from it"
            warn(f"{text} → rerun `gymdata {command}` to use the present scores")
