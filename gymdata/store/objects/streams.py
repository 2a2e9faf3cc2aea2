"""Parquet on an object store, read in place: the spool has a stand-in, and reads of it go to the store.

Invariants: what is read is the object that the spool knows (its tag is a condition of every request), or an error; only
needed bytes are transferred, except that each object is read completely once, to be compared with what its run.json
recorded. Of objects no more than ``_MEMORY`` bytes are kept, and nothing is written.
"""

from __future__ import annotations

import functools
import io
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from gymdata.errors import OutsideError
from gymdata.store.objects import client
from gymdata.store.objects.client import Object
from gymdata.store.objects.fetching import known_hash, remember_hash, stood_for
from gymdata.store.objects.places import Place
from gymdata.workers.tuning import in_order

#: Read with the footer, which every reader begins with: a small object comes whole.
_END = 256 << 10
#: Least bytes of a request, so that small adjacent columns come with one.
_AHEAD = 256 << 10
#: Bytes of one request, and how many requests are in flight.
_PIECE, _AT_ONCE = 8 << 20, 4
#: Memory for recently read objects, and the largest object that is kept whole between its check and its readers.
_MEMORY, _LARGEST = 64 << 20, 32 << 20
_memory: OrderedDict[tuple[Place, str], tuple[int, Any]] = OrderedDict()
_guard = threading.Lock()


def parquet_file(path: str | Path, **options: Any) -> pq.ParquetFile:
    """``pyarrow.parquet.ParquetFile`` of a file, or of a stand-in's object. Raises pa.ArrowException or OSError for what
    cannot be read, and OutsideError("object store")."""
    try:
        return _opened(path, **options)
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid(f"the name of a column is not UTF-8 ({error})") from error


def _opened(path: str | Path, **options: Any) -> pq.ParquetFile:
    if (found := stood_for(path)) is None:
        try:
            # pyarrow takes a relative name with a colon for a URL.
            opened = pq.ParquetFile(Path(path).absolute(), **options)
        except (pa.ArrowException, OSError):
            if (found := stood_for(path)) is None:
                raise
        else:
            # Still a file after opening: a file may become a stand-in, but never the other way round.
            if (found := stood_for(path)) is None:
                return opened
            opened.close()
    return _Object(*found, **options)


def parquet_schema(path: str | Path) -> pa.Schema:
    """The columns of a Parquet file, or of a stand-in's object. Raises as ``parquet_file``."""
    with parquet_file(path) as file:
        return file.schema_arrow


def hash_object(place: Place, known: Object) -> str:
    """xxh3 of an object's bytes, read once as long as it stays the same."""
    if (held := known_hash(place, known.tag)) is not None:
        return held
    digest = xxhash.xxh3_64()
    start, content = _kept(place, known)
    if start == 0:
        digest.update(content)
    elif known.size <= _LARGEST:
        content = b"".join(_pieces(place, known, 0, known.size))
        digest.update(content)
        _keep(place, known, 0, content)
    else:
        for piece in _pieces(place, known, 0, known.size):
            digest.update(piece)
    remember_hash(place, known.tag, digest.hexdigest())
    return digest.hexdigest()


def _pieces(place: Place, known: Object, start: int, end: int) -> Iterator[Any]:
    """The bytes from ``start`` to ``end``, by several requests at once."""

    def piece(first: int) -> list[Any]:
        return [_range(place, known, first, min(first + _PIECE, end))]

    if end - start <= _PIECE:
        yield from piece(start)
    else:
        jobs = (functools.partial(piece, first) for first in range(start, end, _PIECE))
        yield from in_order(jobs, _AT_ONCE, _AT_ONCE)


def _range(place: Place, known: Object, start: int, end: int) -> Any:
    got = client.read_range(place, known, start, end)
    if got is None:
        raise OutsideError(
            "object store", f"{place}: was changed or removed while it was read", hint="try again", retryable=True
        )
    return got


def _kept(place: Place, known: Object) -> tuple[int, Any]:
    """(where it begins, bytes) of what is in memory of an object: its end, or all of it."""
    with _guard:
        held = _memory.get((place, known.tag))
        if held is not None:
            _memory.move_to_end((place, known.tag))
        return held or (known.size, b"")


def _keep(place: Place, known: Object, start: int, content: Any) -> None:
    with _guard:
        _memory[place, known.tag] = (start, content)
        _memory.move_to_end((place, known.tag))
        while sum(len(content) for _, content in _memory.values()) > _MEMORY:
            _memory.popitem(last=False)


class _Reader(io.RawIOBase):
    """An object as a file. What is read beyond a request's end is kept: the next columns are small, or their beginnings."""

    def __init__(self, place: Place, known: Object) -> None:
        self._place, self._known = place, known
        self._position = 0
        self._ahead: tuple[int, Any] = (0, b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._known.size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> Any:
        start, all_of_it = self._position, self._known.size
        end = all_of_it if size is None or size < 0 else min(start + size, all_of_it)
        if start >= end:
            return b""
        self._position = end
        first, content = self._holding(start, end)
        return memoryview(content)[start - first : end - first]

    def _holding(self, start: int, end: int) -> tuple[int, Any]:
        """(where it begins, bytes) of something that holds the bytes from ``start`` to ``end``."""
        place, known = self._place, self._known
        tail = max(0, known.size - _END)
        for first, content in (_kept(place, known), self._ahead):
            if first <= start and end <= first + len(content):
                return first, content
        if start >= tail:
            held = tail, _range(place, known, tail, known.size)
            _keep(place, known, *held)
            return held
        stop = min(max(end, start + _AHEAD), known.size)
        self._ahead = start, b"".join(_pieces(place, known, start, stop))
        return self._ahead


class _Object(pq.ParquetFile):  # type: ignore[misc]  # pyarrow has no types
    """An object as a ParquetFile that is read by the thread that calls: a process that ends while Arrow's own threads run
    Python code is aborted."""

    def __init__(self, place: Place, known: Object, **options: Any) -> None:
        source = pa.PythonFile(_Reader(place, known), mode="r")
        super().__init__(source, **{**options, "pre_buffer": False, "memory_map": False})

    def read(self, columns: list[str] | None = None, **options: Any) -> pa.Table:
        # Read at once, column after column would be taken from all row groups.
        groups = [self.read_row_group(i, columns, **options) for i in range(self.num_row_groups)]
        return pa.concat_tables(groups) if groups else super().read(columns, **{**options, "use_threads": False})

    def read_row_group(self, i: int, columns: list[str] | None = None, **options: Any) -> pa.Table:
        return super().read_row_group(i, columns, **{**options, "use_threads": False})

    def iter_batches(self, *arguments: Any, **options: Any) -> Iterator[pa.RecordBatch]:
        return super().iter_batches(*arguments, **{**options, "use_threads": False})  # type: ignore[no-any-return]  # no types
