"""An output of a command: data files and the run.json that describes them, which appear together or not at all.

Invariants: one process writes an output; a folder or file that holds another kind of output is refused, also with
overwrite; nothing that is there changes before all of the new output is on disk, in a hidden folder beside it. Then the
new run.json replaces the old one, with the key ``replacing``: from then on the new output counts, and readers refuse it
until its files are renamed and that key is gone. A process killed before that leaves the old output; after one killed
later, the next process that opens the output completes it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gymdata import __version__
from gymdata.errors import DataError, StoreError, option
from gymdata.progress import LOG_FILES, leave_log, log_to
from gymdata.settings import Config
from gymdata.store.journal import FAILURES
from gymdata.store.lock import LOCK, Lock, made_folder
from gymdata.store.paths import (
    DERIVED,
    PART,
    ROLLOUTS_FOLDER,
    RUN_JSON,
    SESSIONS_FOLDER,
    FileEntry,
    RunFacts,
    being_replaced,
    beside,
    local_output,
    new_files,
    read_facts,
)
from gymdata.store.run_json import (
    complete,
    describe_file,
    differences,
    refuse_link,
    sync,
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


def described_by(target: Path, *names: str) -> Path:
    """The run.json of an output whose first file is ``target``: that of its folder when it is called one of ``names``,
    which are what the command itself calls it, else the one beside the file."""
    return target.parent / RUN_JSON if target.name in names else beside(target)


def refuse_other_kind(run_json: Path, stage: str, files: Iterable[str] = ()) -> None:
    """Raises StoreError when what ``run_json`` describes, or the folder that it would describe, holds the output of another
    stage, or one of ``files`` beside it belongs to another output; UsageError for a place that is no local path."""
    folder = local_output(run_json).parent
    of_folder = run_json.name == RUN_JSON
    kind = kind_held(folder) if of_folder else _kind_of(read_facts(run_json)) if run_json.is_file() else None
    if kind is not None and kind != kind_of_stage(stage):
        raise StoreError.other_kind(folder if of_folder else run_json.with_suffix("").with_suffix(""), _name(kind))
    for part in [folder] if of_folder else [folder / name for name in files]:
        refuse_owned(part)


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
    """The output that ``run_json`` describes, open for writing; a context manager.

    ``stage``: the command in its run.json; ``kind``: of output, where a stage has several. ``names``: of the files,
    each of which must be missing or of this output; the first is the main one. ``facts``: the existing run.json, after
    a killed process's work was completed; empty without one. Opening raises StoreError for another kind of output, a
    file of that name that no run.json describes (without ``overwrite``), a symbolic link, and while another process
    writes here; UsageError for what is no local path.
    """

    def __init__(
        self, run_json: Path, stage: str, names: Sequence[str], *, overwrite: bool = False, kind: str | None = None
    ) -> None:
        self.run_json, self.stage, self.names, self.overwrite = run_json, stage, names, overwrite
        self.folder = run_json.parent
        self.facts: RunFacts = {}
        self._parts: dict[str, Part] = {}
        self._schemas: dict[str, int] = {}
        self._kind, self._new = kind or stage, new_files(run_json)
        refuse_other_kind(run_json, self._kind, names)

    def __enter__(self) -> StageOutput:
        of_folder = self.run_json.name == RUN_JSON
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            stack.enter_context(made_folder(self.folder))
            about = {"stage": self.stage, "files": list(self.names)}
            stack.callback(Lock(self.folder, LOCK if of_folder else f".{self.names[0]}.lock", about=about).remove)
            refuse_link(self._new)
            stack.callback(self._drop_new)
            if being_replaced(self.run_json) is not None:
                self._put_in_place()
            self._drop_new()
            # Another process may have written here until now.
            refuse_other_kind(self.run_json, self._kind, self.names)
            self.facts = read_facts(self.run_json) if self.run_json.is_file() else {}
            self._refuse_unknown(self.names)
            stack.callback(leave_log, self.folder)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def refuse_other(
        self,
        key: str,
        now: Config | Mapping[str, Any],
        noun: str,
        keep: Iterable[Path] = (),
        parents: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Raises StoreError when ``noun`` would be replaced and was made with another ``facts[key]`` than ``now``, or
        from other runs than ``parents`` (as run.json has them). ``keep``: files that would stay (see ``finish``)."""
        if self.overwrite or not self.facts or (self.facts.get("files") and not self._replaced(keep)):
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

    @property
    def place(self) -> Path:
        """The folder, or the main file where the output is not a folder's."""
        return self.folder if self.run_json.name == RUN_JSON else self.folder / self.names[0]

    def part(self, name: str, **more: Any) -> Part:
        """A file to write, with ``more`` for its entry in run.json. It gets its name in ``finish``. A second call for a name
        starts that file again. Raises StoreError as opening does."""
        self._refuse_unknown([name])
        self._parts[name] = part = Part(name, self._new / name, more=more)
        try:
            self._new.mkdir(exist_ok=True)
            part.path.write_bytes(b"")
        except OSError as error:
            raise StoreError.from_os(self.folder / name, error) from error
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
            raise StoreError.from_os(self.folder / name, error) from error
        return part

    def table(self, name: str, data: pa.Table, table: Table, **more: Any) -> Part:
        """Write a whole table. Raises DataError when ``data`` is not a ``table``."""
        from gymdata.store.tables import shaped

        rows = shaped(data, table)
        return self.batches(name, rows.to_batches(), table, rows.schema, **more)

    def begin(self, facts: RunFacts) -> None:
        """Describe an output whose files come later, unless there is one: for stages that must not lose paid
        results."""
        if not self.facts:
            write_run_json(self.run_json, {**facts, "stage": self.stage})
        log_to(self.folder)

    def finish(self, facts: RunFacts, *, keep: Iterable[Path] = (), copies: Sequence[str] = ()) -> RunFacts:
        """Make the parts and run.json the output; returns its content (``facts`` as ``run_json.complete`` has them).

        Files that only the earlier run.json names are removed, except ``keep``. ``copies``: names of files that get a
        run.json of their own.
        """
        files = []
        try:
            for part in self._parts.values():
                sync(part.path)
                files.append(describe_file(part.path, part.rows, path=part.name, xxh3=part.xxh3, **part.more))
            if files:
                sync(self._new)
        except OSError as error:
            raise StoreError.from_os(self.place, error) from error
        ours = {"gymdata": __version__, "stage": self.stage, "schemas": self._schemas, "files": files}
        description = complete({**facts, **ours})
        spared = {path.resolve() for path in keep}
        gone = [name for name in self._stale(self._parts) if (self.folder / name).resolve() not in spared]
        write_run_json(self.run_json, {**description, "replacing": {"gone": gone, "copies": list(copies)}})
        self._put_in_place()
        self.facts = description
        return description

    def _replaced(self, keep: Iterable[Path]) -> bool:
        """Whether a file that is there would be written or removed."""
        spared = {path.resolve() for path in keep}
        touched = (self.folder / name for name in [*self.names, *self._stale(self.names)])
        return any(path.exists() and path.resolve() not in spared for path in touched)

    def _stale(self, new: Iterable[str]) -> list[str]:
        """Names that only the earlier run.json has. Beside a file only those called after it: its other sides."""
        stem, new = Path(self.names[0]).stem, set(new)
        of_folder = self.run_json.name == RUN_JSON
        names = [n for n in dict.fromkeys(_named(self.facts)) if n not in new and Path(n).name == n]
        return [n for n in names if of_folder or (n.startswith(f"{stem}.") and n != self.names[0])]

    def _put_in_place(self) -> None:
        """Rename the new files, and finish run.json. Every step may have been done before, by a killed process."""
        facts = read_facts(self.run_json)
        steps, names = facts.pop("replacing"), _named(facts)
        if any(Path(name).name != name for name in [*names, *steps["gone"], *steps["copies"]]):
            raise DataError.unreadable(
                self.run_json, "it names files elsewhere", "remove it, and run the command again"
            )
        try:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    (self._new / name).replace(self.folder / name)
            for name in steps["gone"]:
                (self.folder / name).unlink(missing_ok=True)
                beside(self.folder / name).unlink(missing_ok=True)
            sync(self.folder)
            for name in steps["copies"]:
                write_run_json(beside(self.folder / name), facts)
            write_run_json(self.run_json, facts)
        except OSError as error:
            raise StoreError.from_os(self.place, error) from error

    def _drop_new(self) -> None:
        # Once run.json names them they are the output, whatever stopped this process: the next to open it needs them.
        if being_replaced(self.run_json) is None:
            shutil.rmtree(self._new, ignore_errors=True)

    def _refuse_unknown(self, names: Sequence[str]) -> None:
        ours = set(_named(self.facts)) or (set(self.names) if self.facts else set())
        for name in names:
            file = self.folder / name
            refuse_link(file)
            if beside(file).is_file() and self.run_json != beside(file):
                refuse_other_kind(beside(file), self._kind)
            elif file.exists() and name not in ours and not self.overwrite:
                raise StoreError.not_described(file)


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
        shutil.rmtree(new_files(stage / RUN_JSON), ignore_errors=True)
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
