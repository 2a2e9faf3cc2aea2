"""Resolves path arguments: which files hold the rows of a table, and which run.json describes them.

Invariants: a run folder, a stage folder, a file and a glob are all accepted; the order of the files is fixed; a
segment is read from its Parquet file when there is one, else from its lines, never from both. Needs no pyarrow.
"""

from __future__ import annotations

import glob as globbing
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gymdata.errors import DataError, StoreError, UsageError, option
from gymdata.store.fetch import is_copy, is_url, url_of

if TYPE_CHECKING:
    from gymdata.rollouts.schema import Table

#: A segment is a file of JSON lines in a run, each with its checksum; a pickle is a batch of another project.
Kind = Literal["parquet", "jsonl", "segment", "pickle"]
#: Of a file whose rows are lines of cells.
TextTable = Literal["csv", "tsv"]
#: The content of a run.json, and an entry of its ``files`` (``store.run_model`` has the keys).
RunFacts = dict[str, Any]
FileEntry = dict[str, Any]
#: The settings and hashes that must be equal for an output to be resumed, and what an engine, a model, a tokenizer or a
#: judge reports of itself: parts of a run.json.
Identity = Mapping[str, Any]
Facts = dict[str, Any]

#: Environment variables with the name of the experiment that outputs belong to, and their tags, one a line. A variable, so
#: that the processes of a loop or a sweep have them, too.
EXPERIMENT, TAGS = "GYMDATA_EXPERIMENT", "GYMDATA_TAGS"
RUN_JSON = "run.json"
#: What a cell of a sweep has done.
CELL = "cell.json"
ROLLOUTS_FOLDER = "rollouts"
#: Calls of sessions that are being recorded.
SESSIONS_FOLDER = "sessions"
#: Stage folders in a run whose tables are made from its rollouts and are meaningless without them.
DERIVED = ("scores-", "judge-", "audit-", "pairs-", "experiences-")
PART = re.compile(r"part-(\d{5,})\.(parquet|jsonl)")

_RESTORE = "restore it from a copy; a glob over the data files beside it reads them without it"
#: The first bytes of a UTF-8 file that some editors write.
BOM = b"\xef\xbb\xbf"
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_GZIP_MAGIC, _ZSTD_MAGIC, _PARQUET_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
#: The first bytes of a file of torch, and of pickles of the protocols 2 to 5.
_PICKLE_MAGICS = (b"PK\x03\x04", *(bytes([0x80, protocol]) for protocol in range(2, 6)))


@dataclass(frozen=True, slots=True)
class Source:
    """One file with rows, and what kind it is."""

    path: Path
    kind: Kind
    cells: TextTable | None = None


def resolve(path: str | Path, table: Table | str = ROLLOUTS_FOLDER) -> list[Source]:
    """The files that hold rows of ``table`` under a path argument, in reading order.

    ``path`` is a run folder, a stage folder inside one (``RUN/pairs-NAME``), a ``.parquet``, ``.jsonl`` (plain, ``.gz``
    or ``.zst``) file, or a glob of any of these. A run folder gives rollouts from its sealed parts and open
    segment, and any other table from every stage folder that holds it. A run without rows gives an empty list. Raises
    DataError when nothing is there, or the folder is neither a run nor inside one.
    """
    name = table if isinstance(table, str) else table.name
    argument = Path(path)
    paths = matches(path)
    if paths != [argument]:
        # Segments in their order, none from its lines and its part, and nothing that was put aside.
        chosen = {match for match in paths if not match.name.endswith((".torn", ".tmp"))}
        chosen -= {match for match in chosen if _is_segment(match) and match.with_suffix(".parquet") in chosen}

        def order(file: Path) -> tuple[Path, int, str]:
            segment = PART.fullmatch(file.name)
            return file.parent, int(segment[1]) if segment else -1, file.name

        return [source for match in sorted(chosen, key=order) for source in _resolve_one(match, name)]
    return _resolve_one(argument, name)


def matches(path: str | Path) -> list[Path]:
    """What a path argument names: itself, or what a glob matches, in order. Raises DataError for a glob without a match."""
    argument = Path(path)
    if argument.exists() or not globbing.has_magic(str(path)):
        return [argument]
    if paths := _expand(str(path)):
        return paths
    raise DataError.missing_path(path, "a glob that matches something")


def run_jsons(path: str | Path) -> list[Path]:
    """Every run.json that describes a path argument, each once: of a glob those of all that it matches."""
    return [run_json for run_json in _in_or_above(path) if run_json is not None]


def find_run_json(path: str | Path) -> Path | None:
    """The run.json that describes a path argument: in it, or above it; of a glob the one for all that it matches."""
    described = _in_or_above(path)
    return described.pop() if len(described) == 1 else None


def _in_or_above(path: str | Path) -> list[Path | None]:
    """The run.json files of a path argument, each once, with None where something has none."""
    source = Path(path)
    if not source.exists() and globbing.has_magic(str(path)):
        return list(dict.fromkeys(run_json for match in _expand(str(path)) for run_json in _in_or_above(match)))
    if source.is_dir():
        candidates = [source / RUN_JSON, *([source.parent / RUN_JSON] if source.name == ROLLOUTS_FOLDER else [])]
    else:
        candidates = [source.parent / RUN_JSON]
        if source.parent.name == ROLLOUTS_FOLDER:
            candidates.append(source.parent.parent / RUN_JSON)
    return [next((c for c in candidates if c.is_file()), None)]


def read_facts(file: Path) -> RunFacts:
    """The content of a run.json. Raises DataError when it is damaged: not JSON, not an object, empty, or with another value
    than ``run_model.RunJson`` has."""
    refuse_pipe(file)
    import orjson
    from pydantic import ValidationError

    from gymdata.rollouts.schema import refuse_newer  # Late: it loads pyarrow.
    from gymdata.store.run_model import completed

    try:
        facts = orjson.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError.unreadable(file, f"not JSON ({error})", _RESTORE) from error
    if not isinstance(facts, dict) or not facts:
        raise DataError.unreadable(file, f"{json.dumps(facts)[:40]} describes no run", _RESTORE)
    try:
        completed(facts)
    except ValidationError as error:
        fault = error.errors()[0]
        where, got = ".".join(map(str, fault["loc"])), json.dumps(fault["input"], default=str)[:40]
        raise DataError.unreadable(file, f"{where}: got {got}: {fault['msg']}", _RESTORE) from error
    for name, version in facts.get("schemas", {}).items():
        refuse_newer(str(file), name, version)
    return facts


def local_output(output: str | Path) -> Path:
    """An output as a path. Raises UsageError for a URL, for a place beside what was fetched, and for ``-``, which elsewhere
    means standard output: what is written here are files and folders."""
    if str(output) == "-":
        raise UsageError(
            "-o -: writing to standard output is not supported",
            hint="give a file or folder; `gymdata query` without -o prints to standard output",
        ).at("-o", "-", "a file or folder")
    if is_url(output):
        raise UsageError(
            f"{url_of(output)}: outputs are written to local paths",
            hint="write to a local folder, then copy it with the store's own tool (`gymdata docs scale`)",
        )
    if is_copy(output):
        raise UsageError(
            f"{output}: nothing is written beside what was fetched",
            hint=f"give a local path with {option('output')}, or a local copy of the input",
        )
    return Path(output)


def refuse_inputs(place: Path, sources: Iterable[str | Path], table: Table, done: str) -> None:
    """Raises UsageError for an output that is one of the files of ``sources``, or a folder that holds one: they are
    ``done``, such as "merged"."""
    at = place.resolve()
    if any(at in (path, *path.parents) for path in (f.path.resolve() for s in sources for f in resolve(s, table))):
        holds = "holds" if place.is_dir() else "is"
        raise UsageError(f"-o {place}: {holds} one of the files that are {done}", hint="give another name")


def segments(folder: Path) -> list[Source]:
    """The rollout files of a run, by segment: its Parquet file before its lines, never both."""
    rollouts = folder / ROLLOUTS_FOLDER
    if not rollouts.is_dir():
        return []
    chosen: dict[int, Source] = {}
    for file in sorted(file for file in rollouts.iterdir() if file.is_file()):
        if match := PART.fullmatch(file.name):
            chosen[int(match[1])] = _classify(file)  # .parquet comes after .jsonl
    return [chosen[k] for k in sorted(chosen)]


def _sealed_by_run_json(folder: Path) -> list[Source]:
    """``segments``, after making sure that every sealed part which run.json names is there.

    A part may be there before run.json names it, but never the other way round: reading on would lose rows in silence.
    What is inside is for validate to judge.
    """
    for entry in read_facts(folder / RUN_JSON).get("files") or []:
        part = folder / str(entry["path"])
        # Other files, such as an import's rejected.jsonl, hold no rollouts.
        if part.parent.name == ROLLOUTS_FOLDER and not part.is_file():
            raise DataError(
                f"{part}: is not there, but run.json names it with {entry.get('rows', 'some')} rows",
                hint="bring it back from a copy; a glob over rollouts/ reads what is left",
            )
    return segments(folder)


def sealed(source: Source) -> Source:
    """The part that replaced a segment while a reader was on its way to it, else ``source`` itself."""
    part = source.path.with_suffix(".parquet")
    was_sealed = source.kind == "segment" and not source.path.exists() and part.is_file()
    return Source(part, "parquet") if was_sealed else source


def is_open(source: Source, facts: RunFacts) -> bool:
    """Whether rows may still be added to a file: a segment that the run.json with these ``facts`` does not name."""
    named = (Path(str(entry["path"])).name for entry in facts.get("files") or [])
    return source.kind == "segment" and source.path.name not in named


def refuse_pipe(path: Path) -> None:
    """Raises DataError when ``path`` is a pipe or a device, for what is read from one cannot be read again; and for what Git
    left there in place of a file."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise DataError.unreadable(path, "is no regular file, and files are read more than once")
    if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(b"version https://git-lfs."):
        raise DataError.unreadable(path, "is a pointer of Git LFS, not the file", "`git lfs pull` fetches it")


def _is_segment(file: Path) -> bool:
    in_run = file.suffix == ".jsonl" and file.absolute().parent.name == ROLLOUTS_FOLDER
    return in_run and PART.fullmatch(file.name) is not None


def _expand(pattern: str) -> list[Path]:
    # Path.glob cannot take an absolute pattern.
    return sorted(Path(m) for m in globbing.glob(pattern, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern


def _resolve_one(path: Path, table: str) -> list[Source]:
    if path.is_dir():
        if path.name == ROLLOUTS_FOLDER and table == ROLLOUTS_FOLDER and (path.parent / RUN_JSON).is_file():
            return _sealed_by_run_json(path.parent)
        if not (path / RUN_JSON).is_file():
            raise DataError.not_a_run(path)
        if table == ROLLOUTS_FOLDER:
            files = [] if (path / ROLLOUTS_FOLDER).is_dir() else _tables_in(path, table)
            return files or _sealed_by_run_json(path)
        if sources := _tables_in(path, table):
            return sources
        # One that is being made, or was renamed away, has a hidden name.
        inside = [p for p in sorted(path.iterdir()) if p.name[0] != "." and (p / RUN_JSON).is_file()]
        return [source for folder in inside for source in _tables_in(folder, table)]
    if not path.exists():
        raise DataError.missing_path(path)
    refuse_pipe(path)
    return [_classify(path)]


def _tables_in(folder: Path, table: str) -> list[Source]:
    """Files named after the table: ``pairs.parquet``, ``pairs-00000.jsonl.gz``."""
    named = re.compile(re.escape(table) + r"(-[\w.]+?)?\.(parquet|(jsonl|ndjson)(\.gz|\.zst)?)")
    return [_classify(p) for p in sorted(folder.iterdir()) if named.fullmatch(p.name) and p.is_file()]


def _classify(path: Path) -> Source:
    """By suffix, and by the first bytes when the suffix is unknown."""
    name = path.name.lower()
    if name.endswith((".parquet", ".pq")):
        return Source(path, "parquet")
    if _is_segment(path):
        return Source(path, "segment")
    unpacked = re.sub(r"\.(gz|zstd?)$", "", name)
    if unpacked.endswith((".csv", ".tsv")):
        return Source(path, "jsonl", "csv" if unpacked.endswith(".csv") else "tsv")
    if unpacked == name and not name.endswith(_JSON_SUFFIXES):
        with path.open("rb") as file:
            head = file.read(256).removeprefix(BOM)
        if head.startswith(_PARQUET_MAGIC):
            return Source(path, "parquet")
        if head.startswith(_PICKLE_MAGICS):
            return Source(path, "pickle")
        if packed_as(head) is None and head.lstrip()[:1] not in (b"", b"{"):
            raise DataError.unreadable(path, "neither Parquet nor JSON lines", "give a .parquet or .jsonl file")
    return Source(path, "jsonl")


def packed_as(head: bytes) -> Literal["gzip", "zstd"] | None:
    """How a file with these first bytes is compressed."""
    return "gzip" if head.startswith(_GZIP_MAGIC) else "zstd" if head.startswith(_ZSTD_MAGIC) else None


def refuse_unwritable(folder: Path) -> None:
    """Raise StoreError when ``folder`` is a file, or cannot be made or written to; UsageError as ``local_output``. Makes
    nothing."""
    existing = local_output(folder)
    while not existing.exists() and not existing.is_symlink() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        what = "a symbolic link to a place that is not there" if existing.is_symlink() else "a file"
        fault = f"is {what}, expected a folder" if existing == folder else f"cannot be made: {existing} is {what}"
        raise StoreError(f"{folder}: {fault}", hint="give another output folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise StoreError(
            f"{folder}: cannot be written: no permission to write in {existing}", hint="give another output folder"
        )
