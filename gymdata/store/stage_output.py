"""An output of a command that can be computed again: a folder with data files and the run.json that describes them. It
appears whole, and the output that it replaces goes whole. ``single_file``: of the commands whose output is one file.

Invariants: one process writes an output; a folder that holds another kind of output is refused, also with overwrite;
nothing that is there changes before all of the new output is on disk. The new output is made in the hidden folder
``.NAME.tmp``, as ``new``; the old one is renamed to ``old`` in there, the new one gets its name, and what others put into
the old one moves to it. A process that is killed leaves the old output or the new one, and between the two renames the old
one in the hidden folder, which gets its name back when the place is used next (``settle``).
"""

from __future__ import annotations

import contextlib
import filecmp
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gymdata import __version__
from gymdata.errors import StoreError, UsageError, changes, option
from gymdata.progress import LOG_FILES, leave_log, log_to
from gymdata.settings import Config
from gymdata.store.journal import FAILURES
from gymdata.store.lock import LOCK, Lock, made_folder, refuse_held, sync
from gymdata.store.paths import (
    ROLLOUTS_FOLDER,
    RUN_JSON,
    RunFacts,
    local_output,
    read_facts,
    refuse_unwritable,
)
from gymdata.store.run_json import (
    describe_file,
    differences,
    refuse_link,
    replacing,
    temporary_of,
    write_run_json,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.rollouts.schema import Table

#: Stages whose output holds rollouts or pairs.
_WITH_ROWS = ("collect", "record", "import", "pairs", "filter", "select")

#: Suffixes of files that people name where a folder is expected.
_FILES = (".parquet", ".pq", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".xlsx", ".arrow", ".gz", ".zst")


def _kind_of(facts: RunFacts) -> str:
    """The kind of output that a run.json describes: its stage; all trainings are one kind."""
    stage = str(facts.get("stage") or "collect")
    return "training" if stage.startswith("train-") else stage


def _described(folder: Path) -> RunFacts:
    """The run.json in a folder; empty without one."""
    return read_facts(folder / RUN_JSON) if (folder / RUN_JSON).is_file() else {}


def _names_in(facts: RunFacts) -> set[str]:
    """What a run.json names in its folder."""
    return {Path(str(entry["path"])).parts[0] for entry in facts.get("files") or []}


def _sources(parents: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The name of each parent, by the ID of its run, which a copy of it keeps, or by its path."""
    sources = dict[str, str]()
    for parent in parents:
        run_id, path = parent.get("run_id"), str(parent.get("path"))
        sources[str(run_id or path)] = f"run {run_id} ({path})" if run_id else path
    return sources


def refuse_other_kind(folder: Path, stage: str) -> None:
    """Raises StoreError when ``folder`` holds the output of another stage, or would be a part of another output; UsageError
    for a place that is no local path, or has the name of a file."""
    if local_output(folder).suffix.lower() in _FILES and not folder.is_dir():
        hint = "`gymdata query` and `gymdata export` write the rows of an output to a file"
        raise UsageError.bad_value("-o", str(folder), "the name of a folder", hint)
    facts = _described(folder)
    if facts and _kind_of(facts) != _kind_of({"stage": stage}):
        hint = f"give another output folder ({option('overwrite', True)} replaces only the same kind of output)"
        text = f"{folder}: holds the output of {_kind_of(facts)}, which this command does not replace"
        raise StoreError(text, hint=hint)
    refuse_owned(folder)


def refuse_taken(folder: Path, stage: str, *, overwrite: bool = False) -> None:
    """Raises as ``refuse_other_kind``, and StoreError for a folder that cannot be written, or has files that no run.json
    describes (without ``overwrite``). Makes nothing."""
    refuse_other_kind(folder, stage)
    refuse_unwritable(folder)
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    # A process that was killed while it began an output leaves the half of a run.json.
    foreign = [name for name in names if name not in (LOCK, *LOG_FILES, temporary_of(Path(RUN_JSON)).name)]
    if foreign and RUN_JSON not in names and not overwrite:
        raise StoreError(
            f"{folder}: is not empty, and no run.json says what it holds ({', '.join(foreign[:6])})",
            hint="give another output folder",
        )


def refuse_owned(place: Path) -> None:
    """Raises StoreError when ``place``, a file or a folder, is a part of another output, or would be read as one."""
    path = local_output(place).absolute()
    folder = path.parent.resolve()
    for owner, name in ((folder, path.name), (folder.parent, folder.name)):
        facts = _described(owner)
        if facts and name in {ROLLOUTS_FOLDER, FAILURES, *_names_in(facts)}:
            text = f"{place}: is part of the output of {_kind_of(facts)}, {owner}"
            raise StoreError(text, hint="give another output folder or file")


def other_than_rows(folder: Path) -> str | None:
    """What a folder that can hold neither rollouts nor pairs holds; None for any other folder."""
    facts = _described(folder)
    return None if not facts or _kind_of(facts) in _WITH_ROWS else f"the output of {_kind_of(facts)}"


def settle(place: Path) -> None:
    """Finish what a process that was killed while it replaced the output at ``place`` had begun: where no new one has its
    name, the old one gets it back; else what others put into the old one moves to the new one, and the old one goes."""
    old = temporary_of(place) / "old"
    if not old.exists():
        return
    if not place.exists():
        old.rename(place)
        return
    ours = {RUN_JSON, *_names_in(_described(old))}
    for path in old.iterdir():
        if path.name not in ours and not (place / path.name).exists():
            path.rename(place / path.name)
    sync(place)
    shutil.rmtree(old)


@contextlib.contextmanager
def single_file(place: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary name to write under; on leaving, its content is the file ``place``. Raises StoreError for a part of an
    output, a symbolic link, a file that is there and has other content (without ``overwrite``), because nothing records
    what it is, and while another process writes it."""
    refuse_owned(place)
    # User code may change the current folder.
    path = place.absolute()
    with made_folder(path.parent), replacing(path) as temporary:
        yield temporary
        if path.exists() and not overwrite and not filecmp.cmp(path, temporary, shallow=False):
            hint = f"{option('overwrite', True)} replaces it; another output file keeps both"
            raise StoreError(f"{place}: exists, and no run.json says what it is", hint=hint)


@dataclass(slots=True)
class Part:
    """A file of an output that is being written, under ``path``. ``rows`` and ``more`` go into its entry in run.json."""

    name: str
    path: Path
    rows: int | None = None
    more: dict[str, Any] = field(default_factory=dict)


class StageOutput:
    """The output at ``place``, open for writing; a context manager.

    ``stage``: the command in its run.json. ``new``: the folder that becomes the output. ``facts``: the existing run.json;
    empty without one. Opening raises StoreError for another kind of output, a folder with files that no run.json describes
    (without ``overwrite``), a symbolic link, and while another process writes here; UsageError for what is no local path of
    a folder.
    """

    def __init__(self, place: Path, stage: str, *, overwrite: bool = False) -> None:
        self.place, self.stage, self.overwrite = local_output(place), stage, overwrite
        self.facts: RunFacts = {}
        self._parts: dict[str, Part] = {}
        self._schemas: dict[str, int] = {}
        # User code may change the current folder.
        self._at = self.place.resolve()
        self._hidden = temporary_of(self._at)
        self.new = self._hidden / "new"
        self._stack = contextlib.ExitStack()
        self._refuse()

    def _refuse(self) -> None:
        refuse_taken(self.place, self.stage, overwrite=self.overwrite)
        is_mount = self._at.is_mount()
        if is_mount or Path.cwd().is_relative_to(self._at):
            is_fixed = "is a mounted disk" if is_mount else "holds the current folder"
            raise StoreError(f"{self.place}: {is_fixed}, which no output replaces", hint="give a folder in it")

    def __enter__(self) -> StageOutput:
        with contextlib.ExitStack() as stack:
            stack.enter_context(made_folder(self._at.parent))
            refuse_link(self._hidden)
            try:
                self._hidden.mkdir(exist_ok=True)
                sync(self._at.parent)  # the old output will be in there for a moment
                stack.callback(self._remove_hidden)
                stack.callback(Lock(self._hidden).remove)
                stack.callback(self._tidy)
                self._tidy()
                self.new.mkdir()
            except OSError as error:
                raise StoreError.from_os(self._hidden, error) from error
            # Another process may have written here until now.
            self._refuse()
            refuse_held(self._at)
            self.facts = _described(self._at)
            stack.callback(leave_log, self.place)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _tidy(self) -> None:
        """Remove what is left of a new output, and of the one that it replaced."""
        if self.new.exists():
            shutil.rmtree(self.new)
        settle(self._at)

    def _remove_hidden(self) -> None:
        with contextlib.suppress(OSError):  # another process makes its output in there
            self._hidden.rmdir()

    def refuse_other(
        self, key: str, now: Config | Mapping[str, Any], noun: str, parents: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Raises StoreError when ``noun`` would be replaced and was made with another ``facts[key]`` than ``now``, or
        from other runs than ``parents`` (as run.json has them)."""
        if self.overwrite or not self.facts:
            return
        recorded = self.facts.get("parents") or []
        # Inputs that were added and are no rollouts, like scores and models, have no run.
        runs = {parent["run_id"] for parent in recorded if parent.get("run_id")}
        if recorded and parents and not runs <= _sources(parents).keys() <= _sources(recorded).keys():
            was, inputs = (", ".join(_sources(side).values()) for side in (recorded, parents))
            raise StoreError(
                f"{self.place}: holds {noun} from {was}; this is {inputs}",
                hint=f"{option('overwrite', True)} replaces them; another output folder keeps both",
            )
        settings, defaults = (now.model_dump(mode="json"), now.defaults()) if isinstance(now, Config) else (now, {})
        if other := differences(self.facts.get(key) or {}, settings, defaults):
            words = (now for _, _, now in other if isinstance(now, str) and now.replace("-", "").isalnum())
            beside = self.place.with_name(f"{self.place.name}-{next(words, 'other')}")
            hint = f"{option('overwrite', True)} replaces them; another output folder keeps both: "
            raise StoreError(
                f"{self.place}: holds {noun} with other settings ({changes(other)})",
                hint=hint + option("output", str(beside)),
            )

    def part(self, name: str, **more: Any) -> Part:
        """A file to write, with ``more`` for its entry in run.json. A second call for a name starts that file again. Raises
        StoreError for a file of that name in the folder that its run.json does not name."""
        if Path(name).parts[0] not in _names_in(self.facts) and os.path.lexists(self._at / name):
            raise StoreError(
                f"{self.place / name}: no run.json names it, so gymdata did not make it and does not replace it",
                hint="move it away, or give another output folder",
            )
        self._parts[name] = part = Part(name, self.new / name, more=more)
        try:
            part.path.parent.mkdir(exist_ok=True)
            part.path.write_bytes(b"")
        except OSError as error:
            raise StoreError.from_os(self.place / name, error) from error
        return part

    def batches(
        self, name: str, batches: Iterable[pa.RecordBatch], table: Table, schema: pa.Schema, **more: Any
    ) -> Part:
        """Stream batches of one schema to a .parquet or .jsonl file."""
        from gymdata.store.tables import stream_batches

        part = self.part(name, **more)
        self._schemas[table.name] = table.version
        try:
            part.rows = stream_batches(batches, part.path, Path(name).suffix, table, schema)
        except OSError as error:
            raise StoreError.from_os(self.place / name, error) from error
        return part

    def lines(self, name: str, lines: Iterable[bytes], table: Table | None = None) -> Part:
        """Stream lines to a file; ``table``: the one whose rows they are."""
        part, n = self.part(name), 0
        try:
            with part.path.open("wb") as file:
                for line in lines:
                    file.write(line)
                    n += 1
        except OSError as error:
            raise StoreError.from_os(self.place / name, error) from error
        if table is not None:
            part.rows = n
            self._schemas[table.name] = table.version
        return part

    def table(self, name: str, data: pa.Table, table: Table, **more: Any) -> Part:
        """Write a whole table."""
        from gymdata.store.tables import shaped

        rows = shaped(data, table)
        return self.batches(name, rows.to_batches(), table, rows.schema, **more)

    def begin(self, facts: RunFacts) -> None:
        """Describe an output whose files come later, unless there is one: it may hold what its command adds to meanwhile."""
        if not self.facts:
            write_run_json(self.place, {**facts, "stage": self.stage})
        log_to(self.place)

    def finish(self, facts: RunFacts) -> None:
        """Make the parts, and a run.json with ``facts``, the output."""
        parts = self._parts.values()
        try:
            for part in parts:
                sync(part.path)
                sync(part.path.parent)
            files = [describe_file(part.path, part.rows, path=part.name, **part.more) for part in parts]
            ours = {"gymdata": __version__, "stage": self.stage, "schemas": self._schemas, "files": files}
            write_run_json(self.new, {**facts, **ours})
            if self._at.exists():
                self._at.rename(self._hidden / "old")
            self.new.rename(self._at)
            sync(self._at.parent)
        except OSError as error:
            raise StoreError.from_os(self.place, error) from error
