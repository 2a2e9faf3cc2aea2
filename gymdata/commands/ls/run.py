"""``gymdata ls``: every run, stage output and trained model below a folder, from its run.json.

Invariants: nothing is written; a file is counted once, for the nearest run.json above it. Folders with a hidden name are not
looked into: an output is made in one.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gymdata.commands.ls.running import RunProgress, progress_of
from gymdata.errors import DataError, UsageError
from gymdata.public import Report, Row, path_of
from gymdata.store.fetch import is_url, url_of
from gymdata.store.lineage import replaced_content
from gymdata.store.lock import LOCK, holder_of, is_held
from gymdata.store.paths import RUN_JSON, RunFacts, is_open, read_facts, run_jsons, segments
from gymdata.store.reading import fault_of, warn
from gymdata.store.run_json import state_of

__all__ = ["LsReport", "Output", "ls"]


@dataclass(frozen=True, slots=True)
class Output:
    """An output as its run.json describes it. ``path`` and ``parents``: below the folder that was listed, where they
    are; ``rows``: of a run that is open, with those of its journal; ``bytes``: on disk; ``changed``: ISO 8601, UTC;
    ``state``: complete, being written, on HOST (another machine holds its lock), interrupted, rollouts pending, parents
    missing, parents changed (its run was overwritten), or damaged (its run.json, or files are not those that it names, by
    their sizes); ``experiment``, ``tags``: as its command named them;
    ``progress``: how far a collection, recording or training of this machine is that is not complete."""

    path: str
    kind: str
    rows: int | None
    bytes: int
    changed: str
    parents: tuple[str, ...]
    state: str
    experiment: str | None = None
    tags: tuple[str, ...] = ()
    progress: RunProgress | None = None

    @property
    def is_running(self) -> bool:
        return self.state == "being written" or self.state.startswith("on ")


@dataclass(frozen=True, slots=True, repr=False)
class LsReport(Report):
    """All outputs below ``folder``, by path. ``ok``: none is damaged."""

    folder: str
    outputs: tuple[Output, ...]

    @property
    def ok(self) -> bool:
        return all(output.state != "damaged" for output in self.outputs)

    def rows(self) -> list[Row]:
        return [("outputs", len(self.outputs)), ("bytes", sum(output.bytes for output in self.outputs))]

    @property
    def unfinished(self) -> tuple[Output, ...]:
        """Outputs that are not being written and that the same command resumes."""
        return tuple(output for output in self.outputs if output.state in ("interrupted", "rollouts pending"))


def ls(path: str | Path = ".", *, experiment: str | None = None, tags: Sequence[str] = ()) -> LsReport:
    """Every run, stage output and trained model below the folder ``path``.

    ``experiment``, ``tags``: only outputs of that experiment, and with all of these tags. Raises DataError when ``path`` is
    no folder, UsageError for a URL.
    """
    if isinstance(path, (str, Path)) and is_url(path):
        hint = "copy what is there to a local folder, with the tool of its server"
        raise UsageError(f"{url_of(path)}: is a URL, expected a local folder", hint=hint)
    top = Path(path_of(path, "ls", "the path of a folder"))
    if not top.is_dir():
        raise DataError.missing_path(top, "a folder")

    def unreadable(error: OSError) -> None:
        warn(f"{error.filename}: cannot be read: {error.strerror}")

    outputs = []
    for root, inside, files in os.walk(top, onerror=unreadable):
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        outputs += [_output(top, Path(root, RUN_JSON))] if RUN_JSON in files else []
    chosen = (one for one in outputs if experiment in (None, one.experiment) and set(tags) <= set(one.tags))
    return LsReport(str(top), tuple(chosen))


def _output(top: Path, run_json: Path) -> Output:
    folder = run_json.parent
    facts: RunFacts = {}
    damaged = False
    try:
        facts = read_facts(run_json)
    except DataError:
        damaged = True
    files = [file.lstat() for file in _own_files(folder) if file.is_file()] or [run_json.lstat()]
    parents = [_parent(folder, str(parent["path"])) for parent in facts.get("parents") or [] if parent.get("path")]
    shown = Output(
        path=_below_top(top, folder),
        kind=str(facts.get("stage", "unknown")),
        rows=_rows(folder, facts),
        bytes=sum(file.st_size for file in files),
        changed=dt.datetime.fromtimestamp(max(f.st_mtime for f in files), dt.UTC).isoformat(timespec="seconds"),
        parents=tuple(_below_top(top, parent) for parent in parents),
        state="damaged" if damaged else _state(run_json, facts, parents),
        experiment=facts.get("experiment"),
        tags=tuple(facts.get("tags") or ()),
    )
    if not shown.is_running and _lacks_files(folder, facts):
        return replace(shown, state="damaged")
    if shown.is_running or shown.state in ("interrupted", "rollouts pending"):
        try:
            return replace(shown, progress=progress_of(folder, facts, is_running=shown.is_running))
        except DataError as error:
            warn(f"{shown.path}: {error}")
    return shown


def _state(run_json: Path, facts: RunFacts, parents: Sequence[Path]) -> str:
    folder, state = run_json.parent, state_of(run_json, facts)
    if state == "interrupted":
        # The processes of a sweep hold the locks of its cells.
        if any(is_held(lock.parent) for lock in folder.glob(f"*/{LOCK}") if facts.get("stage") == "sweep"):
            return "being written"
        host = holder_of(folder / LOCK).get("host")
        return state if host in (None, os.uname().nodename) else f"on {host}"
    if state != "complete":
        return state
    # A parent that was fetched is not checked.
    if any(not (is_url(parent) or parent.exists() or run_jsons(parent)) for parent in parents):
        return "parents missing"
    runs = [read_facts(file) for parent in parents for file in run_jsons(parent)]
    changed = replaced_content(facts, {str(run.get("run_id")): run for run in runs}) is not None
    return "parents changed" if changed else state


def _lacks_files(folder: Path, facts: RunFacts) -> bool:
    """Whether a file that run.json names is not there, or has another size, or a part is there that it does not name."""
    named = [folder / str(entry["path"]) for entry in facts.get("files") or []]
    files = dict.fromkeys([*named, *(source.path for source in segments(folder))])
    return any(not file.is_file() or fault_of(file) is not None for file in files)


def _rows(folder: Path, facts: RunFacts) -> int | None:
    """Rows of the files that run.json names, and of the segment that is still open; None where nothing has rows."""
    counts = [entry.get("rows") for entry in facts.get("files") or []]
    for segment in (source.path for source in segments(folder) if is_open(source, facts)):
        with segment.open("rb") as file:
            counts.append(sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b"")))
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _own_files(top: Path) -> Iterator[Path]:
    """The files of a folder, without those of other outputs in it."""
    for root, inside, files in os.walk(top):
        inside[:] = [name for name in inside if not Path(root, name, RUN_JSON).is_file()]
        yield from (Path(root, name) for name in files)


def _parent(folder: Path, path: str) -> Path:
    """The ``path`` of a parent that the run.json in ``folder`` names: where it leads to from here, or from there."""
    named = Path(path)
    return named if named.is_absolute() or is_url(path) or named.exists() else folder / named


def _below_top(top: Path, path: Path) -> str:
    """``path`` relative to the folder that was listed, when it is below it."""
    try:
        return str(path.resolve().relative_to(top.resolve()))
    except ValueError:
        return url_of(path)
