"""An output of a command that can be computed again: a folder with data files and the run.json that describes them, or one
file without a run.json. It appears whole, and the output that it replaces goes whole.

Invariants: one process writes an output; a folder that holds another kind of output is refused, also with overwrite;
nothing that is there changes before all of the new output is on disk, in the hidden folder ``.NAME.tmp``. Then the old
folder is renamed to ``.NAME.old``, the new one gets its name, what others put into the old one moves to the new one, and
the old one is removed. A process killed before that leaves the old output, one killed between the renames both: whoever
opens the output next gives the old one its name back. The command is repeated whole.
"""

from __future__ import annotations

import contextlib
import filecmp
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gymdata import __version__
from gymdata.errors import StoreError, option
from gymdata.progress import LOG_FILES, leave_log, log_to
from gymdata.settings import Config
from gymdata.store.journal import FAILURES
from gymdata.store.lock import LOCK, Lock, made_folder, refuse_held
from gymdata.store.paths import (
    DERIVED,
    PART,
    ROLLOUTS_FOLDER,
    RUN_JSON,
    SESSIONS_FOLDER,
    FileEntry,
    RunFacts,
    is_table_file,
    local_output,
    read_facts,
    refuse_unwritable,
)
from gymdata.store.run_json import (
    describe_file,
    differences,
    refuse_link,
    sync,
    temporary_of,
    write_run_json,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.rollouts.schema import Table

#: Stage → what its output is called in a refusal, and what it holds (a column of the graph of ``view``).
STAGES = {
    "collect": ("a collected run", "rollouts"),
    "record": ("a recorded run", "rollouts"),
    "import": ("an imported run", "rollouts"),
    "import-pairs": ("imported pairs", "data"),
    "pairs": ("pairs", "data"),
    "experiences": ("experiences", "data"),
    "score": ("scores", "checks"),
    "judge": ("a judge's comparisons", "checks"),
    "filter": ("filtered rollouts", "rollouts"),
    "select": ("selected rollouts", "rollouts"),
    "fix": ("repaired rollouts", "rollouts"),
    "export": ("an export", "data"),
    "audit": ("an audit", "checks"),
    "train": ("a training", "models"),
    "merged-model": ("a merged model", "models"),
    "finetune": ("a finetuning run", "models"),
    "sweep": ("a sweep", "models"),
    "serve-genrm": ("what serve-genrm keeps", "checks"),
}


def refuse_other_kind(folder: Path, stage: str) -> None:
    """Raises StoreError when ``folder`` holds the output of another stage, or would be a part of another output; UsageError
    for a place that is no local path."""
    kind = kind_held(local_output(folder))
    if kind is not None and kind != kind_of_stage(stage):
        raise StoreError.other_kind(folder, _name(kind))
    refuse_owned(folder)


def refuse_owned(part: Path) -> None:
    """Raises StoreError when ``part``, a file or a folder, is, or would be read as, a part of the output that contains
    it."""
    folder = local_output(part).absolute().parent.resolve()
    file = folder / part.name
    for rollouts in (file, folder):
        if rollouts.name == ROLLOUTS_FOLDER and (rollouts.parent / RUN_JSON).is_file():
            raise StoreError(
                f"{part}: is among the rollouts of a run, where it would count as rows",
                hint="give another output folder",
            )
    if file.name == FAILURES and (folder / ROLLOUTS_FOLDER).is_dir():
        raise StoreError(f"{part}: is where a run keeps its failed attempts", hint="give another output file")
    described = folder / RUN_JSON
    if described.is_file():
        facts = read_facts(described)
        if file.name in _named(facts):
            raise StoreError.other_kind(folder, _name(_kind_of(facts)), f" ({file.name} is part of it)")


def kind_held(folder: Path) -> str | None:
    """The kind of output that a folder holds, by its run.json, or by what else only gymdata makes; None for no output."""
    if (folder / RUN_JSON).is_file():
        return _kind_of(read_facts(folder / RUN_JSON))
    rollouts = folder / ROLLOUTS_FOLDER
    if rollouts.is_dir() and any(PART.fullmatch(p.name) for p in rollouts.iterdir()):
        return "collect"
    return "train" if (folder / "job" / "job.json").is_file() else None


def other_than_rows(folder: Path) -> str | None:
    """What a folder that can hold neither rollouts nor pairs holds; None for any other folder."""
    kind = kind_held(folder)
    has_rows = kind in STAGES and STAGES[kind][1] in ("rollouts", "data") and kind not in ("experiences", "export")
    return None if kind is None or has_rows else _name(kind)


def kind_of_stage(stage: str) -> str:
    return "train" if stage.startswith("train-") else stage


def _kind_of(facts: RunFacts) -> str:
    stage = str(facts.get("stage") or "collect")
    return "import-pairs" if stage == "import" and not facts.get("attempts") else kind_of_stage(stage)


def _name(kind: str) -> str:
    return STAGES[kind][0] if kind in STAGES else f"the output of {kind}"


def _sources(parents: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Parents by the id of their run, which a copy of it keeps, or by path."""
    return {str(parent.get("run_id") or parent.get("path")): parent for parent in parents}


def _named(facts: RunFacts) -> list[str]:
    return [str(entry["path"]) for entry in facts.get("files") or []]


@dataclass(slots=True)
class Part:
    """A file of an output that is being written, under ``path``. ``rows`` and ``more`` go into its entry in run.json;
    so does ``xxh3``, if the writer computed it, else the file is read again for it."""

    name: str
    path: Path
    rows: int | None = None
    more: dict[str, Any] = field(default_factory=dict)
    xxh3: str | None = None


class StageOutput:
    """The output at ``place``, open for writing; a context manager.

    ``stage``: the command in its run.json; ``kind``: of output, where a stage has several. ``name``: of its main file; a
    place called .parquet or .jsonl is that file alone (``is_file``), and with ``alone`` any place is. ``main``: the main
    file's path. ``kept``: the folder also holds what was paid for, so its files are replaced one by one. ``facts``: the
    existing run.json; empty without one. Opening raises StoreError for another kind of output, a folder with files that no
    run.json describes (without ``overwrite``), a symbolic link, and while another process writes here; UsageError for what
    is no local path.
    """

    def __init__(
        self,
        place: Path,
        stage: str,
        name: str = "",
        *,
        overwrite: bool = False,
        kind: str | None = None,
        alone: bool = False,
        kept: bool = False,
    ) -> None:
        self.place, self.stage, self.overwrite = local_output(place), stage, overwrite
        self.is_file = alone or (bool(name) and is_table_file(self.place))
        self.main = self.place if self.is_file else self.place / name
        self.facts: RunFacts = {}
        self._kind, self._kept = kind or stage, kept
        self._parts: dict[str, Part] = {}
        self._schemas: dict[str, int] = {}
        # User code may change the current folder.
        self._at = self.place.absolute() if self.is_file else self.place.resolve()
        self.new, self._old = temporary_of(self._at), self._at.with_name(f".{self._at.name}.old")
        self._refuse()

    def _refuse(self) -> None:
        if self.is_file:
            refuse_owned(self.place)
            refuse_link(self.place)
            return
        refuse_other_kind(self.place, self._kind)
        refuse_unwritable(self.place)
        is_mount = self._at.is_mount()
        if not self._kept and (is_mount or Path.cwd().is_relative_to(self._at)):
            is_fixed = "is a mounted disk" if is_mount else "holds the current folder"
            raise StoreError(f"{self.place}: {is_fixed}, which no output replaces", hint="give a folder in it")
        found = sorted(path.name for path in self._at.iterdir()) if self._at.is_dir() else []
        # A process that was killed while it began a kept output leaves the half of a run.json.
        ours = (LOCK, *LOG_FILES, temporary_of(Path(RUN_JSON)).name)
        foreign = [name for name in found if name not in ours]
        if foreign and RUN_JSON not in found and not self.overwrite:
            raise StoreError(
                f"{self.place}: is not empty, and no run.json says what it holds ({', '.join(foreign[:6])})",
                hint=f"give another output folder ({option('overwrite', True)} writes into this one, and keeps its files)",
            )

    def __enter__(self) -> StageOutput:
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            stack.enter_context(made_folder(self._at.parent))
            if self._kept:
                stack.enter_context(made_folder(self._at))
            for path in (self.new, self._old):
                refuse_link(path)
            try:
                self.new.mkdir(exist_ok=True)
            except OSError as error:
                raise StoreError.from_os(self.new, error) from error
            stack.callback(self._remove_new)
            self._lock = Lock(self.new)
            stack.callback(self._lock.remove)
            stack.callback(self._tidy)
            self._tidy()
            # Another process may have written here until now, or is about to remove what it replaced.
            self._refuse()
            refuse_held(self._at)
            run_json = self._at / RUN_JSON
            self.facts = read_facts(run_json) if not self.is_file and run_json.is_file() else {}
            stack.callback(leave_log, self.place)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _clear(self) -> None:
        """Remove what a killed process, or an error, left of a new output."""
        for path in self.new.iterdir() if self.new.is_dir() else ():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()

    def _tidy(self) -> None:
        self._clear()
        if self._old.exists():
            self._settle()

    def _remove_new(self) -> None:
        with contextlib.suppress(OSError):
            self.new.rmdir()

    def _settle(self) -> None:
        """Remove the output that was renamed away, or give it its name back where no new one has it."""
        if not self._at.exists():
            self._old.rename(self._at)
            return
        run_json = self._old / RUN_JSON
        named = _named(read_facts(run_json)) if run_json.is_file() else []
        ours = {RUN_JSON, LOCK, *(Path(name).parts[0] for name in named)}
        for path in self._old.iterdir():
            if path.name not in ours and not (self._at / path.name).exists():
                path.rename(self._at / path.name)
        shutil.rmtree(self._old)

    def refuse_other(
        self, key: str, now: Config | Mapping[str, Any], noun: str, parents: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Raises StoreError when ``noun`` would be replaced and was made with another ``facts[key]`` than ``now``, or
        from other runs than ``parents`` (as run.json has them)."""
        if self.overwrite or not self.facts:
            return
        recorded = self.facts.get("parents") or []
        was, present = _sources(recorded), _sources(parents)
        # Inputs without a run, like scores and models, are not compared.
        added = {name for name, parent in was.items() if not parent.get("run_id")}
        if was and present and (present.keys() - was.keys() or was.keys() - present.keys() - added):
            before, inputs = (
                ", ".join(
                    f"run {p['run_id']} ({p.get('path')})" if p.get("run_id") else str(p.get("path")) for p in side
                )
                for side in (was.values(), present.values())
            )
            raise StoreError(
                f"{self.place}: holds {noun} from {before}; this is {inputs}",
                hint=f"{option('overwrite', True)} replaces them; another output folder or file keeps both",
            )
        settings, defaults = (now.model_dump(mode="json"), now.defaults()) if isinstance(now, Config) else (now, {})
        other = differences(self.facts.get(key) or {}, settings, defaults)
        if other:
            raise StoreError.other_settings(self.place, noun, other)

    def part(self, name: str, **more: Any) -> Part:
        """A file to write, with ``more`` for its entry in run.json. A second call for a name starts that file again. Raises
        StoreError for a file of that name in the folder that its run.json does not name."""
        there, ours = self.place / name, self.is_file or self._kept or name in _named(self.facts)
        if not ours and os.path.lexists(self._at / name):
            raise StoreError(
                f"{there}: no run.json names it, so gymdata did not make it and does not replace it",
                hint="move it away, or give another output folder",
            )
        self._parts[name] = part = Part(name, self.new / name, more=more)
        try:
            part.path.write_bytes(b"")
        except OSError as error:
            raise StoreError.from_os(there, error) from error
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

    def table(self, name: str, data: pa.Table, table: Table, **more: Any) -> Part:
        """Write a whole table. Raises DataError when ``data`` is not a ``table``."""
        from gymdata.store.tables import shaped

        rows = shaped(data, table)
        return self.batches(name, rows.to_batches(), table, rows.schema, **more)

    def begin(self, facts: RunFacts) -> None:
        """Describe a ``kept`` output whose files come later, unless there is one."""
        if not self.facts:
            write_run_json(self.place, {**facts, "stage": self.stage})
        log_to(self.place)

    def finish(self, facts: RunFacts) -> None:
        """Make the parts, and a run.json with ``facts``, the output. Raises StoreError for a single file that is there and
        has other content, without ``overwrite``: nothing records what it is."""
        parts = self._parts.values()
        try:
            for part in parts:
                sync(part.path)
            if self.is_file:
                (part,) = parts
                if self._at.exists() and not self.overwrite and not filecmp.cmp(self._at, part.path, shallow=False):
                    raise StoreError.not_described(self.place)
                part.path.replace(self._at)
            else:
                files = [describe_file(part.path, part.rows, xxh3=part.xxh3, **part.more) for part in parts]
                ours = {"gymdata": __version__, "stage": self.stage, "schemas": self._schemas, "files": files}
                self._put_in_place({**facts, **ours})
            sync(self._at.parent)
        except OSError as error:
            raise StoreError.from_os(self.place, error) from error

    def _put_in_place(self, facts: RunFacts) -> None:
        if self._kept:
            for part in self._parts.values():
                part.path.replace(self._at / part.name)
            write_run_json(self._at, facts)
            return
        write_run_json(self.new, facts)
        if self._at.exists():
            self._at.rename(self._old)
        self.new.rename(self._at)
        self._lock.moved(self._at / LOCK)


def wipe(folder: Path) -> None:
    """Remove what gymdata wrote: rollouts, failures, tables derived from them, run.json. The lock stays held, and the log
    has the attempts before."""
    rollouts = folder / ROLLOUTS_FOLDER
    if not (folder / RUN_JSON).exists():
        return
    # run.json goes last: until then a crash leaves a run that can be overwritten again.
    for file in _ours(rollouts):
        file.unlink()
    for stage in derived(folder):
        # Here, too, the describing file is removed last.
        shutil.rmtree(temporary_of(stage), ignore_errors=True)
        for file in stage.iterdir():
            if file.suffix in (".parquet", ".jsonl", ".tmp") or file.name in LOG_FILES:
                file.unlink()
        (stage / RUN_JSON).unlink()
        _remove_if_empty(stage)
    for file in (folder / SESSIONS_FOLDER).glob("*.journal*"):
        file.unlink()
    _remove_if_empty(folder / SESSIONS_FOLDER)
    for name in (FAILURES, FAILURES + ".torn", RUN_JSON):
        (folder / name).unlink(missing_ok=True)
    _remove_if_empty(rollouts)
    sync(folder)


def derived(folder: Path) -> list[Path]:
    """The folders in a run that were made from its rollouts, and are removed with them."""
    stages = folder.iterdir() if folder.is_dir() else ()
    return sorted(s for s in stages if s.is_dir() and s.name.startswith(DERIVED) and (s / RUN_JSON).is_file())


def holds_nothing(folder: Path, files: Sequence[FileEntry]) -> bool:
    """Whether a run has neither rows nor failures. ``files``: what run.json names as sealed."""
    rollouts = folder / ROLLOUTS_FOLDER
    # Lines are not looked into here: bytes in them may be a row, torn or not.
    sessions = (folder / SESSIONS_FOLDER).glob("*.journal*")
    files_kept = [*_ours(rollouts), *sessions, folder / FAILURES, folder / (FAILURES + ".torn")]
    return not files and not any(file.is_file() and file.stat().st_size for file in files_kept)


def _ours(rollouts: Path) -> list[Path]:
    """The parts of a run, and what was put aside of them or left by a killed process."""
    bare = {p: p.name.removesuffix(".torn").removesuffix(".tmp").removeprefix(".") for p in rollouts.glob("*")}
    return [p for p, name in bare.items() if PART.fullmatch(name)]


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
