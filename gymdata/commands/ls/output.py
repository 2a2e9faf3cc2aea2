"""One output as ``gymdata ls`` shows it, and outputs without a run.json yet: a command is writing them, or was killed before
they were complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gymdata.commands.ls.running import RunProgress
from gymdata.store.fetch import is_url
from gymdata.store.lock import LOCK, holder_of, is_held
from gymdata.store.paths import RUN_JSON, RunFacts, new_files

#: Rows that an import rejected, in a file beside its output.
_REJECTED = "rejected.jsonl"
_LOCK_BESIDE = f".{LOCK}"


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


def described_path(run_json: Path) -> Path:
    """The folder or file that a run.json describes."""
    folder, name = run_json.parent, run_json.name
    return folder if name == RUN_JSON else folder / name.removesuffix(f".{RUN_JSON}")


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
        return described_path(self.run_json)


def unfinished_in(folder: Path, names: Iterable[str]) -> Iterator[Unfinished]:
    """The unfinished outputs whose locks are among ``names``, the files of ``folder``."""
    file_names = set(names)
    for name in sorted(file_names):
        is_folder = name == LOCK
        if not is_folder and not (name.startswith(".") and name.endswith(_LOCK_BESIDE)):
            continue
        described = RUN_JSON if is_folder else f"{name.removeprefix('.').removesuffix(_LOCK_BESIDE)}.{RUN_JSON}"
        holder = {} if described in file_names else holder_of(folder / name)
        files, stage = holder.get("files"), holder.get("stage")
        if isinstance(files, list) and isinstance(stage, str):
            named = [str(file) for file in files if Path(str(file)).name == file]
            run_json = folder / described
            paths = [new_files(run_json) / file for file in named]
            existing = tuple(f for f in [*paths, folder / name] if f.is_file() and not f.is_symlink())
            state = "being written" if is_held(folder, name) else "interrupted"
            yield Unfinished(run_json, existing, stage, state)


def is_unfinished(folder: Path) -> bool:
    """Whether the folder itself is an unfinished output."""
    if not (folder / LOCK).is_file() or (folder / RUN_JSON).is_file():
        return False
    return any(unfinished_in(folder, [LOCK]))
