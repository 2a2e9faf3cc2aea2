"""Which changed or damaged data readers accept, and what they report of it.

Invariants: a sealed file of another size than its run.json recorded is read only where that was allowed, and what is built
or trained is made of files with the recorded bytes; what a reader had to leave out is reported, once, and never dropped in
silence. The command line prints the reports and ends with exit code 1 for damage; outside it they are Python warnings.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gymdata.errors import EXIT_FAULTS, DataError, option, shown
from gymdata.store.paths import PART, ROLLOUTS_FOLDER, FileEntry, RunFacts, find_run_json, read_facts, resolve

if TYPE_CHECKING:
    from gymdata.rollouts.schema import Table

#: Environment variable by which child processes (trainers, the commands of a finetuning run) may read changed files.
_ALLOW_CHANGED = "GYMDATA_ALLOW_CHANGED"


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


@contextlib.contextmanager
def reading(allow_changed: bool | None = None, report: Callable[[str], None] | None = None) -> Iterator[Reading]:
    """Read with other settings, in all threads of this process, until the block ends.

    ``allow_changed``: read sealed files that differ from what run.json recorded (a warning stays); None keeps the
    current setting. ``report``: receives each warning and each report of damage instead of Python's warnings.
    """
    global _current
    before = _current
    _current = Reading(before.allow_changed if allow_changed is None else allow_changed, report or before.report)
    try:
        yield _current
    finally:
        _current = before


def current() -> Reading:
    return _current


def child_environment() -> dict[str, str]:
    """The environment variables for a child process to read with the same settings."""
    return {_ALLOW_CHANGED: str(int(_current.allow_changed))}


def warn(line: str) -> None:
    """Warn about data that is used nevertheless."""
    _current.add(_current.warnings, line)


def report_lines(path: Path, lines: list[tuple[int, int | None]], of: str, why: str) -> None:
    """Report damaged lines (1-based number, byte offset if known) of a file, whose rows are left out."""
    if not lines:
        return
    places = (f"line {n:,}" + ("" if offset is None else f" at byte {offset:,}") for n, offset in lines[:8])
    shown = ", ".join(places)
    more = f" and {len(lines) - 8:,} more" if len(lines) > 8 else ""
    many = f"{len(lines):,} damaged {of}s left out" if len(lines) > 1 else f"1 damaged {of} left out"
    _current.add(_current.damage, f"{path}: {many} ({shown}{more}): {why}")


def check_source(path: Path) -> None:
    """Raise DataError for a sealed file of another size than its run.json recorded, and for a part that the run.json of a
    run that has ended does not name. Other files pass. Where changed files may be read it is a warning."""
    _accept(fault_of(path))


def check_content(sources: Iterable[str | Path], table: Table) -> list[str]:
    """``check_source``, and every byte compared, for each file of ``table`` under path arguments. Returns the warnings.

    For what is built or trained: a change of one reward is in no page that a reader takes for damaged.
    """
    files = (file.path for source in sources for file in resolve(source, table))
    return [line for file in files if (line := _accept(fault_of(file, whole=True))) is not None]


def _accept(fault: DataError | None) -> str | None:
    if fault is None:
        return None
    if not _current.allow_changed:
        raise fault
    warn(fault.message)
    return fault.message


def fault_of(path: Path, *, whole: bool = False) -> DataError | None:
    """The error of a file that is not as its run.json says: in its size, or ``whole`` in any byte."""
    if (recorded := _recorded(path)) is None:
        return None
    run_json, entry, ended = recorded
    if entry is None:
        # A segment is not there any more when it was sealed since it was found.
        if not (ended and _is_part(path) and path.exists()):
            return None
        hint = f"move it out; if it is meant to be there, {option('allow_changed', True)} reads it"
        return DataError(f"{path}: is not among the files of {run_json}", hint=hint, exit_code=EXIT_FAULTS)
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None  # its reader reports it
    if entry.get("bytes") not in (None, stat.st_size):
        why = f"{stat.st_size:,} bytes, not {entry['bytes']:,}"
    elif whole and entry.get("xxh3") not in (None, _hash_of(path, stat.st_mtime_ns, stat.st_size, stat.st_ino)):
        why = "other bytes (xxh3)"
    else:
        return None
    allowed = option("allow_changed", True)
    hint = f"bring the file back from a copy; if the change was meant, commands that only read it take {allowed}"
    return DataError(f"{path}: differs from what {run_json} recorded: {why}", hint=hint, exit_code=EXIT_FAULTS)


def rows_recorded(path: Path) -> int | None:
    """The number of rows in a file that its run.json says; None where it does not."""
    recorded = _recorded(path)
    return None if recorded is None or recorded[1] is None else recorded[1].get("rows")


def _recorded(path: Path) -> tuple[Path, FileEntry | None, bool] | None:
    """The run.json of a file, its entry for it, and whether its run has ended; None without one that can be read."""
    if (run_json := find_run_json(path)) is None:
        return None
    stat = run_json.stat()
    try:
        files, ended = _entries(run_json, stat.st_mtime_ns, stat.st_size, stat.st_ino)
    except DataError as error:
        if error.code == "S104":
            raise  # a newer version's rows may mean something else
        # Files beside a damaged run.json may be read by their names; nothing then records what they must be.
        warn(f"{path}: is read without the check against run.json ({error.message})")
        return None
    # By its name: a part may be a symbolic link to another disk.
    return run_json, files.get(path.relative_to(run_json.parent)), ended


@functools.lru_cache(maxsize=16)
def _entries(run_json: Path, *_state: int) -> tuple[dict[Path, FileEntry], bool]:
    facts = read_facts(run_json)
    return {Path(str(f["path"])): f for f in facts.get("files") or []}, _has_ended(facts)


@functools.lru_cache(maxsize=1024)
def _hash_of(path: Path, *_state: int) -> str:
    from gymdata.store.run_json import hash_file

    return hash_file(path)


def _is_part(file: Path) -> bool:
    return file.parent.name == ROLLOUTS_FOLDER and PART.fullmatch(file.name) is not None


def _has_ended(facts: RunFacts) -> bool:
    """Whether the last writer of a run closed it: a part is renamed before run.json names it, and then it does. An import
    is there as a whole or not at all."""
    last: RunFacts = next(iter((facts.get("attempts") or [])[-1:]), {})
    closed = last.get("outcome") == "closed" and last.get("ended_at") is not None
    return closed or facts.get("stage") == "import"


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
