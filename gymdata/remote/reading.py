"""Reading from an object store: what a path argument means becomes a view, a local folder of this process alone.

run.jsons, JSON lines and other texts are fetched whole. For each Parquet object there is a reference, a small file with
its name: ``parquet_file`` reads just what is needed of it, where it is. Invariants: what a command reads is one consistent
state of the store (a run.json, and every file that it names); every request for a part of an object has its tag as a
condition.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import io
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymdata.errors import DataError, GymdataError, OutsideError, StoreError
from gymdata.remote import client
from gymdata.remote.client import Object
from gymdata.remote.places import Place, default_spool, endpoint, is_odd, is_url, mirrored, place_of, view_of

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

RUN_JSON = "run.json"
ROLLOUTS_FOLDER = "rollouts"
#: Files of gymdata's tables, and what describes them; models, checkpoints and pages are not fetched with a run.
DATA_FILE = re.compile(r"(.+\.)?run\.json|[^.].*\.(parquet|pq|journal|csv|tsv|arrow|(json|jsonl|ndjson)(\.gz|\.zst)?)")
_PARQUET = (".parquet", ".pq")
_MAGIC = b"gymdata reference to an object\n"
_LARGEST_REFERENCE = 1 << 13
#: How often a state that changed meanwhile is read again.
_LOOKS = 5
_UNSTABLE = "changes faster than it can be read"
_AT_ONCE = 8
#: Read with the footer, which every reader begins with; at least read at once; bytes of one request of several.
_END, _AHEAD, _PIECE = 256 << 10, 256 << 10, 8 << 20


def located(path: str | Path) -> Path:
    """A path argument as a local path: for a URL its place in this process's view, else the path itself. Raises UsageError
    for a URL that is not supported, DataError when nothing is there, OutsideError("object store")."""
    if not is_url(path):
        return Path(path)
    location = place_of(path)
    client.check_installed(location)
    local = location.under(top := view_of(default_spool(), os.getpid()))
    for _ in range(_LOOKS):
        objects = _objects(location)
        if not objects:
            raise DataError.missing_path(str(location))
        by_key = {
            o.key: o
            for o in objects
            if (DATA_FILE.fullmatch(o.key.rpartition("/")[2]) or o.key == location.key) and not is_odd(o.key)
        }
        for file in local.rglob("*") if local.is_dir() else ():
            below = file.relative_to(local).as_posix()
            if file.is_file() and location.below(below).key not in by_key and not file.name.startswith("."):
                file.unlink()
        bring(location, list(by_key.values()), top)
        if all(_is_complete(location, key, by_key.keys(), top) for key in by_key if key.rpartition("/")[2] == RUN_JSON):
            return local
    raise OutsideError("object store", f"{location}: {_UNSTABLE}", hint="try again", retryable=True)


def bring(location: Place, objects: Sequence[Object], top: Path) -> None:
    """Make the folder ``top`` have these objects: references to Parquet, and the others whole."""

    def fetch(expected: Object) -> None:
        refer(location.at(expected.key), expected, location.at(expected.key).under(top))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(fetch, objects))


def refer(location: Place, expected: Object, target: Path) -> None:
    """Make ``target`` the object's content, or a reference to it."""
    for _ in range(_LOOKS):
        if location.key.endswith(_PARQUET):
            fields = {"url": str(location), "size": expected.size, "tag": expected.tag}
            temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                temporary.write_bytes(_MAGIC + json.dumps(fields).encode())
                temporary.replace(target)
            except OSError as error:
                raise StoreError.from_os(target, error) from error
            return
        if client.fetch(location, expected, target):
            return
        if (current := client.head(location)) is None:
            return  # whoever needs it says so
        expected = current
    raise OutsideError("object store", f"{location}: {_UNSTABLE}", hint="try again", retryable=True)


def _objects(location: Place) -> list[Object]:
    """The objects that a path argument means, with the run.jsons that describe them."""
    words = location.key.split("/")
    magic = next((n for n, word in enumerate(words) if glob.has_magic(word)), None)
    literal = location.key if magic is None else "/".join(words[:magic])
    listed = {o.key: o for o in client.listed(location.at(literal))}
    chosen = dict(listed) if magic is None else {k: o for k, o in listed.items() if _matches(k.split("/"), words)}
    if not chosen and magic is None and location.key and (single := client.head(location)) is not None:
        chosen = {single.key: single}
    described = {name for key in [location.key, *chosen] for name in describing(key)} if chosen else set()
    for key in sorted(described - chosen.keys()):
        inside = not literal or key.startswith(f"{literal}/")
        if (run_json := listed.get(key) if inside else client.head(location.at(key))) is not None:
            chosen[key] = run_json
    return list(chosen.values())


def describing(key: str) -> Iterator[str]:
    """Keys of the run.jsons that may describe a file, or a folder, of this key from outside it."""
    folder = key.rpartition("/")[0]
    yield from (f"{key}.{RUN_JSON}", f"{folder}/{RUN_JSON}".lstrip("/"))
    if folder.rpartition("/")[2] == ROLLOUTS_FOLDER:
        yield f"{folder.rpartition('/')[0]}/{RUN_JSON}".lstrip("/")


def _matches(words: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a key, or a folder of it, matches the pattern."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_matches(words[n:], pattern[1:]) for n in range(len(words) + 1))
    hidden = words and words[0].startswith(".") and not pattern[0].startswith(".")
    return bool(words) and not hidden and fnmatch.fnmatchcase(words[0], pattern[0]) and _matches(words[1:], pattern[1:])


def _is_complete(location: Place, run_json: str, keys: Sequence[str] | Any, top: Path) -> bool:
    """Whether every file that a fetched run.json names was listed: a run.json that is newer than the list names more."""
    folder = run_json.rpartition("/")[0]
    if not f"{folder}/".startswith(f"{location.key}/"):
        return True
    try:
        entries = json.loads(location.at(run_json).under(top).read_bytes()).get("files") or []
        named = [f"{folder}/{entry['path']}".lstrip("/") for entry in entries]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return True  # the reader reports it
    late = [k for k in named if k not in keys and DATA_FILE.fullmatch(k.rpartition("/")[2]) and not is_odd(k)]
    return not any(client.head(location.at(key)) is not None for key in late)


def described(url: str) -> Path | None:
    """The local path of a URL's run.json, as readers of run.jsons take it; None when it is gone, or the store cannot be
    reached: lineage ends there."""
    try:
        location, top = place_of(url), view_of(default_spool(), os.getpid())
        for key in dict.fromkeys([location.below(RUN_JSON).key, *describing(location.key)]):
            if (run_json := client.head(location.at(key))) is not None:
                bring(location, [run_json], top)
                return location.under(top)
    except GymdataError:
        pass
    return None


def referred(path: str | Path) -> tuple[Place, Object] | None:
    """The object that a reference names; None for any other file."""
    try:
        status = os.stat(path)  # noqa: PTH116 - for every file that is opened
        if not stat.S_ISREG(status.st_mode) or not len(_MAGIC) < status.st_size < _LARGEST_REFERENCE:
            return None
        with open(path, "rb") as file:  # noqa: PTH123 - as above
            if file.read(len(_MAGIC)) != _MAGIC:
                return None
            fields = json.loads(file.read())
    except OSError:
        return None
    mirrored(path)  # so that messages show the URL
    location = place_of(fields["url"])
    return location, Object(location.key, int(fields["size"]), str(fields["tag"]), "")


def size_of(path: Path) -> int:
    """The bytes of a file, or of the object that it refers to."""
    reference = referred(path)
    return path.stat().st_size if reference is None else reference[1].size


def content_key(path: Path) -> str | None:
    """What names the content of a reference's object, in any process; None for any other file."""
    if (reference := referred(path)) is None:
        return None
    location, expected = reference
    return f"{endpoint(location.scheme) or ''} {location} {expected.tag}"


def blocks(path: str | Path) -> Iterator[Any]:
    """The bytes of a file, or of the object that it refers to, in order."""
    if (reference := referred(path)) is not None:
        location, expected = reference
        step, size = _AT_ONCE * _PIECE, expected.size
        yield from (_span(location, expected, start, min(start + step, size)) for start in range(0, size, step))
        return
    with Path(path).open("rb") as file:
        while block := file.read(1 << 18):
            yield block


def _span(location: Place, expected: Object, start: int, end: int) -> Any:
    """The bytes from ``start`` to ``end``, by several requests at once."""

    def piece(first: int) -> Any:
        body = client.read_range(location, expected, first, min(first + _PIECE, end))
        if body is None:
            why = f"{location}: was changed or removed while it was read"
            raise OutsideError("object store", why, hint="try again", retryable=True)
        return body

    starts = range(start, end, _PIECE)
    if len(starts) == 1:
        return piece(start)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return b"".join(pool.map(piece, starts))


@functools.lru_cache(maxsize=64)
def _tail(_server: str | None, location: Place, expected: Object, start: int) -> Any:
    return _span(location, expected, start, expected.size)


class _Reader(io.RawIOBase):
    """An object as a file. What is read beyond a request's end is kept: the next columns are small, or their beginnings."""

    def __init__(self, location: Place, expected: Object) -> None:
        self._location, self._object = location, expected
        self._position = 0
        #: What was read last, and where it begins.
        self._last: tuple[int, Any] = (0, b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._object.size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> Any:
        start, length = self._position, self._object.size
        end = length if size is None or size < 0 else min(start + size, length)
        if start >= end:
            return b""
        self._position = end
        first, content = self._containing(start, end)
        return memoryview(content)[start - first : end - first]

    def _containing(self, start: int, end: int) -> tuple[int, Any]:
        if start >= (tail := max(0, self._object.size - _END)):
            return tail, _tail(endpoint(self._location.scheme), self._location, self._object, tail)
        first, content = self._last
        if first <= start and end <= first + len(content):
            return self._last
        stop = min(max(end, start + _AHEAD), self._object.size)
        self._last = start, _span(self._location, self._object, start, stop)
        return self._last


def parquet_file(path: str | Path, **options: Any) -> pq.ParquetFile:
    """``pyarrow.parquet.ParquetFile`` of a file, or of the object that it refers to. Raises pa.ArrowException or OSError for
    what cannot be read, and OutsideError("object store")."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if (reference := referred(path)) is None:
            try:
                # pyarrow takes a relative name with a colon for a URL.
                return pq.ParquetFile(Path(path).absolute(), **options)
            except (pa.ArrowException, OSError):
                # A part may have been uploaded, and become a reference, just now.
                if (reference := referred(path)) is None:
                    raise
        source = pa.PythonFile(_Reader(*reference), mode="r")
        return _one_threaded()(source, **{**options, "pre_buffer": False, "memory_map": False})
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid(f"the name of a column is not UTF-8 ({error})") from error


def parquet_schema(path: str | Path) -> pa.Schema:
    """The columns of a Parquet file, or of the object that it refers to. Raises as ``parquet_file``."""
    with parquet_file(path) as file:
        return file.schema_arrow


@functools.cache
def _one_threaded() -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    class OneThreaded(pq.ParquetFile):  # type: ignore[misc]  # pyarrow has no types
        """Read by the thread that calls: a process that ends while Arrow's own threads run Python code is aborted."""

        def read(self, columns: list[str] | None = None, **options: Any) -> pa.Table:
            # Read at once, column after column would be taken from all row groups.
            groups = [self.read_row_group(i, columns, **options) for i in range(self.num_row_groups)]
            return pa.concat_tables(groups) if groups else super().read(columns, **{**options, "use_threads": False})

        def read_row_group(self, i: int, columns: list[str] | None = None, **options: Any) -> pa.Table:
            return super().read_row_group(i, columns, **{**options, "use_threads": False})

        def iter_batches(self, *arguments: Any, **options: Any) -> Iterator[pa.RecordBatch]:
            return super().iter_batches(*arguments, **{**options, "use_threads": False})  # type: ignore[no-any-return]  # no types

    return OneThreaded
