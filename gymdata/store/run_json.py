"""run.json: what was run, with which settings, from which data, and which files came out (model: ``run_model.RunJson``).

Invariants: it is replaced whole (temporary name, fsync, rename, fsync of the folder), so a reader sees the old
or the new one; every output of gymdata is described by exactly one.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, cast

import orjson
import xxhash

from gymdata.errors import DataError, StoreError, redacted_all
from gymdata.store.lock import claim, is_held, sync
from gymdata.store.paths import EXPERIMENT, RUN_JSON, TAGS, FileEntry, RunFacts, find_run_json, read_facts

_OPTIONS = (
    orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_UTC_Z | orjson.OPT_NON_STR_KEYS | orjson.OPT_SORT_KEYS
)


def write_run_json(folder: str | Path, facts: RunFacts) -> Path:
    """Write the run.json of a folder. ``facts``: as ``complete`` takes them. Returns where it was written. Raises
    StoreError.from_os."""
    return write_json(Path(folder, RUN_JSON), {key: redacted_all(value) for key, value in complete(facts).items()})


def write_json(path: Path, value: Any) -> Path:
    """Write an indented JSON file, and its folder where that is missing; returns ``path``. Raises as ``replacing``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")
    return path


def write_text(path: Path, text: str) -> None:
    """Write a file of UTF-8 text. Raises as ``replacing``."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def complete(facts: RunFacts) -> RunFacts:
    """``facts`` with every key of ``RunJson``, as JSON: what a stage does not have is empty, the version is this one, and
    the experiment and the tags are those of this process. Raises ValueError (pydantic's, a defect) for a key of another
    type."""
    from gymdata.store.run_model import completed

    tags = dict.fromkeys(tag for line in os.environ.get(TAGS, "").splitlines() if (tag := line.strip()))
    labels = {"experiment": os.environ.get(EXPERIMENT, "").strip(), "tags": list(tags)}
    return completed(plain({**facts, **{key: value for key, value in labels.items() if value}}))


def read_run_json(path: str | Path) -> RunFacts:
    """The facts that describe a path argument (run or stage folder, file, glob, or a run.json itself). Raises DataError
    when it is missing or does not parse."""
    argument = Path(path)
    run_json = argument if argument.name == RUN_JSON and argument.is_file() else find_run_json(argument)
    if run_json is None:
        if argument.is_dir():
            raise DataError.not_a_run(argument)
        raise DataError.missing_path(argument, "something that a run.json describes")
    return read_facts(run_json)


def agreed(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all run.json facts say alike, in the mappings among them too."""
    alike: dict[str, Any] = {}
    for key, value in runs[0].items() if runs else ():
        values = [run.get(key) for run in runs]
        if all(isinstance(item, Mapping) for item in values):
            alike[key] = agreed(cast("list[Mapping[str, Any]]", values))
        elif all(item == value for item in values):
            alike[key] = value
    return alike


def state_of(run_json: Path, facts: RunFacts) -> str:
    """``being written`` (by a process of this machine), ``interrupted``, ``rollouts pending`` or ``complete``."""
    folder = run_json.parent.absolute()
    return "being written" if is_held(folder) or is_held(temporary_of(folder)) else state_left(facts)


def state_left(facts: RunFacts) -> str:
    """The state of an output that is not being written: ``interrupted`` where its last writer was killed or ended with
    an error, ``rollouts pending`` where a collection ended without all that it was to sample; else ``complete``, also
    where run.json does not say."""
    last = next(iter((facts.get("attempts") or [])[-1:]), None)
    if last is not None and "ended_at" in last and (last["ended_at"] is None or last.get("outcome") != "closed"):
        return "interrupted"
    # Trainings and finetune have no attempts, or closed ones: a status.
    if facts.get("status") in ("running", "failed"):
        return "interrupted"
    operation, counts = (last or {}).get("operation"), facts.get("counts")
    gave_up = isinstance(operation, dict) and operation.get("give_up")
    return "rollouts pending" if isinstance(counts, dict) and counts.get("pending") and not gave_up else "complete"


def differences(
    was: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})
) -> list[tuple[str, object, object]]:
    """The settings that differ, by dotted key. One that ``was`` lacks had its value of ``defaults``, because it is newer
    than what was recorded; without a default a missing key counts as null."""
    before, after, unset = (flat(redacted_all(plain(side))) for side in (was, now, defaults))
    before = {key: unset.get(key) for key in after} | before
    keys = sorted(before.keys() | after.keys())
    return [(k, _named(k, before), _named(k, after)) for k in keys if before[k] != after.get(k)]


def _named(key: str, settings: Mapping[str, Any]) -> Any:
    """A setting; the hash of a file of user code with its name, as the sources of rewards have it."""
    spec = settings.get(key.removesuffix("file_hash") + "spec") if key.endswith("file_hash") else None
    return settings.get(key) if spec is None else f"{spec}@{settings.get(key)}"


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """``old`` with ``new`` over it; objects are merged key by key."""
    result = dict(old)
    for key, value in new.items():
        before = result.get(key)
        result[key] = merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return result


def plain(value: Any) -> Any:
    """``value`` after a round trip through JSON: tuples are lists, paths are text."""
    return orjson.loads(orjson.dumps(value, default=_as_json, option=_OPTIONS))


def hash_file(path: str | Path) -> str:
    """xxh3 (64 bits, hex) of a file's bytes."""
    digest = xxhash.xxh3_64()
    with Path(path).open("rb") as file:
        while block := file.read(1 << 18):
            digest.update(block)
    return digest.hexdigest()


def describe_file(file: Path, rows: int | None = None, *, path: str | None = None, **more: Any) -> FileEntry:
    """A written file's entry in run.json: ``path`` (its name), ``rows`` (if given), ``bytes``, ``xxh3``."""
    counted = {} if rows is None else {"rows": rows}
    return {**more, "path": path or file.name, **counted, "bytes": file.stat().st_size, "xxh3": hash_file(file)}


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write under; on leaving, its content is ``path``, on disk, whole. Removed on any error.

    Raises StoreError.from_os when the disk refuses, or there is a symbolic link under either name, and StoreError
    when another process is at it. Errors that name another file, or come from no system call, are not about it.
    """
    refuse_link(path)
    temporary = temporary_of(path)
    try:
        lock = claim(temporary)
    except TimeoutError as error:
        hint = "wait for it, stop it, or give another output folder"
        raise StoreError(f"{path}: another process is writing it", hint=hint) from error
    except OSError as error:
        raise StoreError.from_os(path, error) from error
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        named = path if error.filename is None else Path(os.fsdecode(error.filename))
        if error.errno is None or named not in (path, temporary, path.parent):
            raise
        raise StoreError.from_os(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        lock.release()


def unnamed_file(folder: Path) -> IO[bytes]:
    """A file for scratch data on the disk of ``folder`` that never has a name there: a kill leaves nothing. Where the
    system or the file system has no such files, it is in the system's temporary folder."""
    try:
        return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600), "w+b")
    except (AttributeError, OSError):
        return tempfile.TemporaryFile()


def temporary_of(path: Path) -> Path:
    """The name under which ``path`` is written until it is complete."""
    return path.with_name(f".{path.name}.tmp")


def refuse_link(path: Path) -> None:
    """Raises StoreError when ``path`` is a symbolic link, which an output would replace or follow."""
    if path.is_symlink():
        raise StoreError.from_os(path, OSError(errno.ELOOP, ""))


def flat(settings: Mapping[str, Any], separator: str = ".", prefix: str = "") -> RunFacts:
    """Nested values by path."""
    by_path: RunFacts = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            by_path |= flat(value, separator, f"{prefix}{key}{separator}")
        else:
            by_path[prefix + key] = value
    return by_path


def _as_json(value: object) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    return str(value)


def now() -> str:
    """This moment, as run.json and the state of a loop have it."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")


def moment(text: object) -> dt.datetime | None:
    """The time of such a text; None of anything else."""
    try:
        return dt.datetime.fromisoformat(str(text))
    except ValueError:
        return None
