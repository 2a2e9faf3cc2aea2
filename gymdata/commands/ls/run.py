"""``gymdata ls``: every run and stage output below a folder, from its run.json and the files beside it.

Invariants: nothing is written; a file is counted once: for the nearest run.json above or beside it, or for an
unfinished output.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gymdata.commands.ls.output import Output, Unfinished, is_temporary, parent_path, row_counts, unfinished
from gymdata.commands.ls.running import cells_of, progress_of
from gymdata.commands.ls.unused import removal
from gymdata.commands.ls.unused import unused as unused_outputs
from gymdata.errors import DataError, UsageError
from gymdata.public import Report, Row, path_of
from gymdata.store.fetch import is_url, url_of
from gymdata.store.lineage import replaced_content
from gymdata.store.lock import LOCK, holder_of, is_held
from gymdata.store.paths import RUN_JSON, RunFacts, is_open, read_facts, run_jsons, segments
from gymdata.store.reading import warn
from gymdata.store.run_json import state_of

__all__ = ["LsReport", "Output", "ls"]


@dataclass(frozen=True, slots=True, repr=False)
class LsReport(Report):
    """All outputs below ``folder``, by path; with ``unused`` those that no trained model was made from. ``removal``: the
    shell command that removes these, None when there are none. ``ok``: none is damaged."""

    folder: str
    outputs: tuple[Output, ...]
    removal: str | None = None

    @property
    def ok(self) -> bool:
        return all(output.state != "damaged" for output in self.outputs)

    def rows(self) -> list[Row]:
        return [("outputs", len(self.outputs)), ("bytes", sum(output.bytes for output in self.outputs))]

    @property
    def unfinished(self) -> tuple[Output, ...]:
        """Outputs that are not being written and that the same command resumes."""
        return tuple(output for output in self.outputs if output.state in ("interrupted", "rollouts pending"))


def ls(
    path: str | Path = ".", *, unused: bool = False, experiment: str | None = None, tags: Sequence[str] = ()
) -> LsReport:
    """Every run, stage output and trained model below the folder ``path``. Nothing is removed.

    ``experiment``, ``tags``: only outputs of that experiment, and with all of these tags.

    ``unused``: only those that no trained model below ``path`` was made from. A finetuning run needs all that is in it, and
    what a link leads to is needed. Raises DataError when ``path`` is no folder, UsageError for a URL; with ``unused`` also
    for a damaged run.json and a folder that cannot be read, StoreError for what is begun and has no run.json yet.
    """

    def matching(outputs: Iterable[Output]) -> tuple[Output, ...]:
        return tuple(o for o in outputs if experiment in (None, o.experiment) and set(tags) <= set(o.tags))

    if isinstance(path, (str, Path)) and is_url(path):
        hint = "copy what is there to a local folder, with the tool of its server"
        raise UsageError(f"{url_of(path)}: is a URL, expected a local folder", hint=hint)
    top = Path(path_of(path, "ls", "the path of a folder"))
    if not top.is_dir():
        raise DataError.missing_path(top, "a folder")

    def unreadable(error: OSError) -> None:
        if unused:
            raise DataError.unreadable(error.filename, str(error), "a model may be in it: make it readable") from error
        warn(f"{error.filename}: cannot be read: {error.strerror}")

    outputs = {
        output.run_json if isinstance(output, Unfinished) else output: (
            unfinished_output(top, output) if isinstance(output, Unfinished) else output_of(top, output)
        )
        for output in below(top, unreadable)
    }
    if not unused:
        return LsReport(str(top), matching(outputs.values()))
    idle = unused_outputs(top, outputs)
    return LsReport(str(top), tuple(idle), removal(str(top), idle))


def below(top: Path, onerror: Callable[[OSError], None] | None = None) -> Iterator[Path | Unfinished]:
    """Every run.json below a folder, and every output without one yet. ``onerror`` is called for every folder that cannot
    be read."""
    for root, inside, files in os.walk(top, onerror=onerror):
        folder = Path(root)
        temporary = [folder / name for name in sorted(inside) if is_temporary(folder / name)]
        inside[:] = sorted({*inside} - {path.name for path in temporary})
        yield from (folder / name for name in files if name == RUN_JSON)
        yield from filter(None, map(unfinished, temporary))


def unfinished_output(top: Path, output: Unfinished) -> Output:
    files = [file.stat() for file in output.files]
    return Output(
        path=below_top(top, output.path),
        kind=output.stage,
        rows=None,
        bytes=sum(file.st_size for file in files),
        changed=_latest(files),
        parents=(),
        state=output.state,
    )


def _latest(files: Sequence[os.stat_result]) -> str:
    return dt.datetime.fromtimestamp(max(f.st_mtime for f in files), dt.UTC).isoformat(timespec="seconds")


def output_of(top: Path, run_json: Path) -> Output:
    path = run_json.parent
    facts: RunFacts = {}
    damaged = False
    try:
        facts = read_facts(run_json)
    except DataError:
        damaged = True
    files = [file.lstat() for file in own_files(path) if file.is_file()]
    parents = [
        parent_path(run_json, str(parent["path"])) for parent in facts.get("parents") or [] if parent.get("path")
    ]
    # A parent that was fetched is not checked.
    lost = any(not (is_url(parent) or parent.exists() or run_jsons(parent)) for parent in parents)
    state = "damaged" if damaged else state_of(run_json, facts)
    if state == "interrupted" and facts.get("stage") == "sweep" and any(map(is_held, cells_of(path))):
        state = "being written"
    host = holder_of(path / LOCK).get("host") if state == "interrupted" else None
    if host not in (None, os.uname().nodename):
        state = f"on {host}"
    if state == "complete" and not lost:
        runs = [read_facts(file) for parent in parents for file in run_jsons(parent)]
        if replaced_content(facts, {str(run.get("run_id")): run for run in runs}) is not None:
            state = "parents changed"
    # Rows of the files that run.json names, and of the segment that is still open; None where nothing has rows.
    counts = row_counts(facts)
    for segment in (source.path for source in segments(path) if is_open(source, facts)):
        with segment.open("rb") as file:
            counts.append(sum(block.count(b"\n") for block in iter(partial(file.read, 1 << 20), b"")))
    shown = Output(
        path=below_top(top, path),
        kind=str(facts.get("stage", "unknown")),
        rows=sum(counts) if counts else None,
        bytes=sum(file.st_size for file in files),
        changed=_latest(files or [run_json.lstat()]),
        parents=tuple(below_top(top, parent) for parent in parents),
        state="parents missing" if lost and state == "complete" else state,
        experiment=facts.get("experiment"),
        tags=tuple(facts.get("tags") or ()),
    )
    if shown.is_running or shown.state in ("interrupted", "rollouts pending"):
        try:
            return replace(shown, progress=progress_of(path, facts, is_running=shown.is_running))
        except DataError as error:
            warn(f"{shown.path}: {error}")
    return shown


def own_files(top: Path) -> Iterator[Path]:
    """The files of a folder, without those of other outputs in it."""
    for root, inside, files in os.walk(top):
        folder = Path(root)
        inside[:] = [n for n in inside if not (folder / n / RUN_JSON).is_file() and not is_temporary(folder / n)]
        yield from (folder / name for name in files)


def below_top(top: Path, path: Path) -> str:
    """``path`` relative to the folder that was listed, when it is below it."""
    try:
        return str(path.resolve().relative_to(top.resolve()))
    except ValueError:
        return url_of(path)
