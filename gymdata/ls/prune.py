"""``gymdata prune``: which outputs below a folder no trained model was made from, and their removal.

Invariants: without ``delete`` nothing changes; everything in a trained model's lineage stays, found by path, by run ID
or by the hash of its run.json, and so does any output that contains it, and everything where a lineage is not known; only
files that a run.json names, or that only gymdata writes, are removed, and other files stay; run.json goes last, so that a
killed removal is continued by the next.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymdata.errors import DataError, GymdataError, StoreError, UsageError, counted
from gymdata.ls.run import Output, below, below_top, described, output_of, parent_path, unfinished_output
from gymdata.ls.unfinished import Unfinished
from gymdata.progress import LOG_FILES
from gymdata.public import Paths, Report, Row, path_of, paths_of
from gymdata.store import find_run_json, hash_file
from gymdata.store.journal import FAILURES
from gymdata.store.lock import LOCK, Lock, refuse_held
from gymdata.store.objects.places import is_spool, is_url
from gymdata.store.paths import JOURNAL, PART, ROLLOUTS_FOLDER, RUN_JSON, local_output, read_facts
from gymdata.store.run_json import sync_folder
from gymdata.store.stage_output import kind_of_stage

__all__ = ["PruneReport", "Pruned", "prune"]

#: Outputs that are kept for their own sake.
_ROOTS = ("train", "finetune")
_TEMPORARY = re.compile(r"\.(.+)\.tmp|(.+)\.torn")


@dataclass(frozen=True, slots=True)
class Pruned:
    """An output below the folder. ``needed_by``: the trained model (or what ``keep`` names) whose lineage has it, None
    where nothing needs it; ``bytes``: as ``gymdata ls`` has it where it stays, else of the files that would go; ``left``:
    other files in the folder; ``state``: as ``gymdata ls`` has it."""

    path: str
    kind: str
    bytes: int
    changed: str
    needed_by: str | None
    left: tuple[str, ...] = ()
    state: str = "complete"


@dataclass(frozen=True, slots=True, repr=False)
class PruneReport(Report):
    """All outputs below ``folder``, by path. ``deleted``: those that nothing needs are gone; ``lost``: parents that a needed
    output names and that are nowhere to be found."""

    folder: str
    outputs: tuple[Pruned, ...]
    deleted: bool
    lost: tuple[str, ...] = ()

    @property
    def idle(self) -> list[Pruned]:
        """The outputs that nothing needs."""
        return [output for output in self.outputs if output.needed_by is None]

    def rows(self) -> list[Row]:
        kept = [output for output in self.outputs if output.needed_by is not None]
        rows: list[Row] = [
            ("needed", _sum(kept)),
            ("deleted" if self.deleted else "not needed", _sum(self.idle)),
        ]
        if left := [file for output in self.idle for file in output.left]:
            rows.append(("not gymdata's, left", counted(len(left), "file")))
        if self.lost:
            rows.append(("parents not found", ", ".join(self.lost)))
        return rows


def prune(path: str | Path = ".", *, keep: Paths = (), delete: bool = False) -> PruneReport:
    """The outputs below the folder ``path`` that no trained model was made from; with ``delete`` they are removed.

    ``keep``: more outputs, or folders of them, here or elsewhere, that stay with all that they were made from. A
    finetuning run stays whole, and spools of object stores are left alone. Models outside ``path`` and ``keep`` are not
    seen, but what links to folders lead to is, and stays. Raises DataError when ``path`` is no folder or one below it cannot
    be read, UsageError for a spool and when there is no trained model or ``keep``, StoreError while something below is
    written or a training is not finished.
    """
    # Before anything is fetched.
    top = local_output(path if is_url(path) else path_of(path, "prune", "the path of a folder"), "prune")
    if not top.is_dir():
        raise DataError.missing_path(top, "a folder")
    if (spool := next((one for one in (top.resolve(), *top.resolve().parents) if is_spool(one)), None)) is not None:
        raise UsageError(
            f"{top}: {spool} is a spool, which may hold rows that no object store has yet",
            hint="remove it as a whole when no run on an object store is to be resumed from it",
        )
    wanted = [Path(one) for one in (paths_of(keep, "prune") if keep != () else [])]
    _refuse_open(top)
    # Once, and with an error for a folder that cannot be read: a model may be in it.
    seen = list(below(top, _unreadable))
    unfinished = [one for one in seen if isinstance(one, Unfinished)]
    found = {one: output_of(top, one) for one in seen if isinstance(one, Path)}
    needed, lost = _needed(top, found, wanted)
    if not needed:
        raise UsageError(
            f"{top}: no trained model is below it, so all of its outputs would count as not needed",
            hint="name a folder with trained models, or what is to stay with --keep",
        )
    kept = {one.run_json: _kept_by(one, found, needed, wanted) for one in unfinished}
    if (unknown := next((file for file, one in found.items() if _may_have_parents(file, one)), None)) is not None:
        why = f"not known: {below_top(top, unknown)} is damaged"
        needed = dict.fromkeys((file for file in found if found[file].state != "damaged"), why) | needed
    outputs = [_pruned(run_json, output, needed) for run_json, output in found.items()]
    outputs += [_pruned_unfinished(top, one, kept[one.run_json]) for one in unfinished]
    if delete:
        for one in unfinished:
            if kept[one.run_json] is None:
                _delete_unfinished(one)
        # Inner ones first: a folder is removed when it is empty.
        for run_json in sorted(found.keys() - needed.keys(), key=lambda file: -len(file.parts)):
            if found[run_json].state != "damaged":
                _delete(run_json)
    return PruneReport(str(top), tuple(sorted(outputs, key=lambda one: one.path)), delete, tuple(sorted(lost)))


def _unreadable(error: OSError) -> None:
    raise DataError.unreadable(Path(error.filename), str(error), "a model may be in it: make it readable") from error


def _may_have_parents(run_json: Path, output: Output) -> bool:
    """Whether the output's parents are not known; collected rollouts have none."""
    whole = run_json.name == RUN_JSON
    return output.state == "damaged" and not (whole and (run_json.parent / ROLLOUTS_FOLDER).is_dir())


def _sum(outputs: Iterable[Pruned]) -> str:
    some = list(outputs)
    return f"{counted(len(some), 'output')}, {sum(one.bytes for one in some) / 1e6:,.1f} MB"


def _refuse_open(top: Path) -> None:
    """Raises StoreError for what is being written below ``top``, and for a training whose inputs are not recorded yet."""
    for lock in sorted(top.rglob(LOCK)):
        refuse_held(lock.parent)
    for one in below(top):
        if isinstance(one, Unfinished):
            refuse_held(one.lock.parent, one.lock.name)
    for job in sorted(top.rglob("job/job.json")):
        if not (job.parents[1] / RUN_JSON).is_file():
            raise StoreError(
                f"{job.parents[1]}: a training that is not finished: what it needs is not recorded yet",
                hint="finish it (the same command resumes), or remove its folder",
            )


def _needed(top: Path, found: Mapping[Path, Output], wanted: Iterable[Path]) -> tuple[dict[Path, str], set[str]]:
    """The run.json files of what stays, each with what needs it, and parents that are nowhere to be found."""
    lookup = _Lookup(found)
    roots = {file: below_top(top, _place(file)) for file, one in found.items() if kind_of_stage(one.kind) in _ROOTS}
    for link in _links(top):
        roots |= {one: f"{link}, a link" for one in below(link, _unreadable) if isinstance(one, Path)}
    for place in wanted:
        if not place.exists():
            raise DataError.missing_path(place, "an output, or a folder of outputs")
        inside = list(described(place)) if place.is_dir() else []
        roots |= dict.fromkeys([*inside, *filter(None, [find_run_json(place)])], f"--keep {place}")
    needed: dict[Path, str] = {}
    lost: set[str] = set()
    for root, name in roots.items():
        waiting = [root]
        while waiting:
            file = lookup.same(waiting.pop())
            if file in needed:
                continue
            needed[file] = name
            if found.get(file) is not None and found[file].kind == "finetune":
                waiting += [inner for inner in found if file.parent in inner.parents]
            for parent in _facts(file).get("parents") or []:
                there = lookup.parent(file, parent)
                waiting += there
                if not there and find_run_json(parent_path(file, str(parent.get("path", "")))) is None:
                    lost.add(str(parent.get("path")))
    # An output that contains a kept one is kept: a run whose pairs were trained on, also when both were moved.
    for file in [one for one in found if one.name == RUN_JSON and one not in needed]:
        inner = next((one for one in needed if file.parent in one.parents and one in found), None)
        if inner is not None:
            needed[file] = needed[inner]
    return {file: name for file, name in needed.items() if file in found}, lost


def _links(top: Path) -> Iterator[Path]:
    """Links below ``top`` to folders that are not below it, and links in those: what they lead to is seen, and stays."""
    waiting, seen = [top], {top.resolve(), *top.resolve().parents}
    within = {top.resolve()}
    while waiting:
        for folder, inside, _ in os.walk(waiting.pop()):
            for place in (Path(folder, name) for name in sorted(inside)):
                if place.is_symlink() and (real := place.resolve()) not in seen and within.isdisjoint(real.parents):
                    seen.add(real)
                    within.add(real)
                    waiting.append(place)
                    yield place


class _Lookup:
    """Finds the outputs that an entry of ``parents`` means."""

    def __init__(self, found: Iterable[Path]) -> None:
        self._by_place = {file.resolve(): file for file in found}
        self._by_run: dict[str, list[Path]] = {}
        self._by_hash: dict[str, list[Path]] = {}
        for file in self._by_place.values():
            self._by_hash.setdefault(hash_file(file), []).append(file)
            if run_id := _facts(file).get("run_id"):
                self._by_run.setdefault(str(run_id), []).append(file)

    def same(self, file: Path) -> Path:
        """``file`` under the path that it was found by."""
        return self._by_place.get(file.resolve(), file)

    def parent(self, child: Path, entry: Mapping[str, Any]) -> list[Path]:
        path = entry.get("path")
        there = find_run_json(parent_path(child, str(path))) if path else None
        at_path = [there] if there is not None else []
        recorded, run_id = str(entry.get("run_json_xxh3")), str(entry.get("run_id"))
        if there is not None and hash_file(there) == recorded:
            return at_path
        moved = self._by_hash.get(recorded, [])
        if there is not None and not moved and str(_facts(there).get("run_id")) == run_id != "None":
            # The output has grown since.
            return at_path
        # Another output may be at that path now.
        return [*at_path, *moved, *self._by_run.get(run_id, [])]


def _facts(file: Path) -> Mapping[str, Any]:
    try:
        return read_facts(file)
    except DataError:
        return {}


def _pruned(run_json: Path, output: Output, needed: Mapping[Path, str]) -> Pruned:
    by = needed.get(run_json)
    if by is None and output.state == "damaged":
        by = "not known: its run.json is damaged"
    ours = list(_ours(run_json))
    left = _others(run_json, ours) if by is None else ()
    # What stays is as large as `gymdata ls` lists it; of the rest, what would be removed counts.
    size = output.bytes if by is not None else sum(file.stat().st_size for file in ours)
    return Pruned(output.path, output.kind, size, output.changed, by, tuple(left), output.state)


def _kept_by(
    one: Unfinished, found: Mapping[Path, Output], needed: Mapping[Path, str], wanted: Iterable[Path]
) -> str | None:
    """The reason to keep an unfinished output: --keep, or the finetuning run that it is a part of; None without one."""
    place = one.place.resolve()
    for keep in wanted:
        if keep.resolve() in (place, *place.parents):
            return f"--keep {keep}"
    around = (
        file for file, output in found.items() if output.kind == "finetune" and file.parent in one.run_json.parents
    )
    return next((needed[file] for file in around if file in needed), None)


def _pruned_unfinished(top: Path, one: Unfinished, by: str | None) -> Pruned:
    output, folder = unfinished_output(top, one), one.run_json.parent
    others = [f for f in sorted(folder.iterdir()) if f.is_file() and f not in one.files] if one.is_folder else []
    left = tuple(str(file) for file in others if file.name not in LOG_FILES)
    return Pruned(output.path, output.kind, output.bytes, output.changed, by, left if by is None else (), output.state)


def _place(run_json: Path) -> Path:
    return (
        run_json.parent if run_json.name == RUN_JSON else run_json.with_name(run_json.name.removesuffix(f".{RUN_JSON}"))
    )


def _ours(run_json: Path) -> Iterator[Path]:
    """The files of an output that only gymdata can have written, its run.json last."""
    place, folder = _place(run_json), run_json.parent
    if run_json.name == RUN_JSON:
        named = {str(entry["path"]) for entry in _facts(run_json).get("files") or []}
        rollouts = folder / ROLLOUTS_FOLDER
        inside = sorted(rollouts.iterdir()) if rollouts.is_dir() and not (rollouts / RUN_JSON).is_file() else []
        files = [folder / name for name in sorted(named) if not _leads_out(folder, name)]
        files += [file for file in inside if _is_segment(file.name) and file not in files]
        files += [folder / name for name in (FAILURES, f"{FAILURES}.torn", LOCK, *LOG_FILES) if name not in named]
    else:
        files = [place]
    yield from (file for file in files if file.is_file() and not file.is_symlink())
    yield run_json


def _leads_out(folder: Path, name: str) -> bool:
    """Whether a recorded name leads to a file elsewhere, or to one that another run.json describes."""
    file = folder / name
    return folder.resolve() not in file.resolve().parents or file.with_name(f"{file.name}.{RUN_JSON}").is_file()


def _is_segment(name: str) -> bool:
    match = _TEMPORARY.fullmatch(name)
    bare = (match[1] or match[2]) if match else name
    return bool(PART.fullmatch(bare) or JOURNAL.fullmatch(bare))


def _others(run_json: Path, ours: Iterable[Path]) -> Iterator[str]:
    if run_json.name != RUN_JSON:
        return
    known = set(ours)
    for folder in (run_json.parent, run_json.parent / ROLLOUTS_FOLDER):
        if folder.is_dir():
            described_here = {_place(file) for file in folder.glob(f"*.{RUN_JSON}")} | set(folder.glob(f"*.{RUN_JSON}"))
            yield from (str(f) for f in sorted(folder.iterdir()) if f.is_file() and f not in known | described_here)


def _unlink(folder: Path, files: Iterable[Path], lock: Lock) -> None:
    """Remove files, and the lock last."""
    try:
        for file in files:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError.from_os(folder, error) from error
    finally:
        lock.remove()


def _delete_unfinished(one: Unfinished) -> None:
    """As ``_delete``."""
    folder = one.run_json.parent
    files = [*one.files, *((folder / name for name in LOG_FILES) if one.is_folder else ())]
    _unlink(folder, (file for file in files if file != one.lock), Lock(folder, one.lock.name))
    if one.is_folder:
        with contextlib.suppress(OSError):  # it has other files
            folder.rmdir()


def _delete(run_json: Path) -> None:
    """Raises StoreError while another process writes there, and when the disk refuses."""
    folder = run_json.parent
    lock = Lock(folder) if run_json.name == RUN_JSON else Lock(folder, f".{_place(run_json).name}.lock")
    _unlink(folder, (file for file in _ours(run_json) if file.name != LOCK), lock)
    if run_json.name == RUN_JSON:
        for place in (folder / ROLLOUTS_FOLDER, folder):
            with contextlib.suppress(OSError):  # it has other files
                place.rmdir()
    with contextlib.suppress(OSError, GymdataError):
        sync_folder(folder if folder.is_dir() else folder.parent)
