"""Arrays in files that are mapped into memory, and dropped from it again: data larger than memory, shared by processes.

Only the rows of a few batches stay in memory, because ``read_rows`` drops earlier pages.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from gymdata.rollouts.ragged import Array, Ints, Ragged
from gymdata.store.run_json import unnamed_file

#: Rows that are read before their pages are dropped. Reading one value maps 64 kB around it.
_ROWS = 128
#: Numbers of a whole file that are processed at once.
CHUNK = 1 << 20
#: Arrays that are smaller need no file.
_IN_MEMORY_BYTES = 1 << 25
_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_read = 0


def mapped(path: Path, dtype: str, shape: tuple[int, ...] = ()) -> Array:
    """The numbers of a file, (n, *shape), read-only."""
    if not path.stat().st_size:
        return np.empty((0, *shape), dtype)
    with path.open("rb") as file:
        return _mapped(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype).reshape(-1, *shape)


def scratch(n: int, dtype: str, folder: Path) -> Array:
    """``n`` zeros to write to, where many in a file of ``folder`` that goes with the array."""
    size = n * np.dtype(dtype).itemsize
    if size < _IN_MEMORY_BYTES:
        return np.zeros(n, dtype)
    with unnamed_file(folder) as file:
        file.truncate(size)
        return _mapped(mmap.mmap(file.fileno(), 0), dtype)


def _mapped(mapping: mmap.mmap, dtype: str) -> Array:
    _maps.add(mapping)
    return np.frombuffer(mapping, dtype)


def read_rows(count: int) -> None:
    """Announce that ``count`` rows are about to be read; pages of earlier rows are dropped from time to time."""
    global _read
    _read += count
    if _read >= _ROWS:
        release()


def release() -> None:
    """Drop all pages of mapped files that were read; later reads come from the disk cache, or the disk."""
    global _read
    _read = 0
    for mapping in list(_maps):
        mapping.madvise(mmap.MADV_DONTNEED)


def chunks(offsets: Ints, size: int = CHUNK) -> Iterator[slice]:
    """Lists ``a`` to ``b`` as slices, about ``size`` numbers at a time and at least one list; pages are dropped after
    each."""
    first, n = 0, len(offsets) - 1
    while first < n:
        last = max(first + 1, int(np.searchsorted(offsets, offsets[first] + size, side="right")) - 1)
        yield slice(first, last)
        release()
        first = last


def part_of(lists: Ragged, rows: slice) -> Ragged:
    """The lists of some rows side by side, without copying their values."""
    offsets = lists.offsets[rows.start : rows.stop + 1]
    return Ragged(lists.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])


class Texts(Sequence[str]):
    """Texts as lists of UTF-8 bytes: a text is made when it is looked at."""

    def __init__(self, lists: Ragged) -> None:
        self.lists = lists

    def __len__(self) -> int:
        return len(self.lists)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self.lists[range(len(self))[index]].tobytes().decode("utf-8", "surrogatepass")
