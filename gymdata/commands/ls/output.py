"""One output as ``gymdata ls`` shows it, and outputs without a run.json yet: a command is writing them, or was killed before
they were complete."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gymdata.commands.ls.running import RunProgress
from gymdata.store.fetch import is_url
from gymdata.store.lock import LOCK, holder_of, is_held
from gymdata.store.paths import RUN_JSON, RunFacts
from gymdata.store.run_json import temporary_of

#: Rows that an import rejected, in a file beside its output.
_REJECTED = "rejected.jsonl"


@dataclass(frozen=True, slots=True)
class Output:
    """An output as its run.json describes it. ``path`` and ``parents``: below the folder that was listed, where they
    are; ``rows``: of a run that is open, with those of its journal; ``bytes``: on disk; ``changed``: ISO 8601, UTC;
    ``state``: complete, being written, on HOST (another machine holds its lock), interrupted, rollouts pending, parents
    missing, parents changed (its run was overwritten), or damaged; ``experiment``, ``tags``: as its command named them;
    ``progress``: how far a collection, recording, training, loop or sweep of this machine is that is not complete."""

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


def row_counts(facts: RunFacts) -> list[int]:
    """The row counts of the output's files, from its run.json; files without rows of the output are left out."""
    entries = facts.get("files") or []
    return [entry["rows"] for entry in entries if entry.get("rows") is not None and entry.get("path") != _REJECTED]


def parent_path(run_json: Path, path: str) -> Path:
    """The ``path`` of a parent that ``run_json`` names: where it leads to from here, or from there."""
    named = Path(path)
    return named if named.is_absolute() or is_url(path) or named.exists() else run_json.parent / named


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An unfinished output. ``run_json``: its path once complete; ``files``: all that the command has written, including
    its lock; ``stage``: the kind of output; ``state``: being written, or interrupted."""

    run_json: Path
    files: tuple[Path, ...]
    stage: str
    state: str

    @property
    def path(self) -> Path:
        return self.run_json.parent


def is_temporary(folder: Path) -> bool:
    """Whether a command makes its output in ``folder``, or was killed while it did."""
    return folder == temporary_of(_made_in(folder)) and "stage" in holder_of(folder / LOCK)


def unfinished(folder: Path) -> Unfinished | None:
    """The output that a command makes in ``folder``, or was making; None where another one has its place."""
    place = _made_in(folder)
    if place.is_file() or (place / RUN_JSON).is_file():
        return None
    files = tuple(file for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    state = "being written" if is_held(folder) else "interrupted"
    return Unfinished(place / RUN_JSON, files, str(holder_of(folder / LOCK)["stage"]), state)


def _made_in(folder: Path) -> Path:
    return folder.with_name(folder.name.removeprefix(".").removesuffix(".tmp") or "_")
