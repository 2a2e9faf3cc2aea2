"""Columns of an Arrow file that is mapped into memory, and dropped from it again: data larger than memory, shared by
processes.

Only the rows of a few batches stay in memory, because ``read_rows`` drops earlier pages; numbers per row are in memory.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.rollouts.ragged import Array, Ints, Ragged, list_parts, offsets_of
from gymdata.store.run_json import unnamed_file

#: Rows that are read before their pages are dropped. Reading one value maps 64 kB around it.
_ROWS = 128
#: Numbers of a whole file that are processed at once.
CHUNK = 1 << 20
#: Arrays that are smaller need no file.
_IN_MEMORY_BYTES = 1 << 25
_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_read = 0


def mapped(path: Path) -> pa.Table:
    """The rows of an Arrow stream, without reading them."""
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _maps.add(mapping)
    return pa.ipc.open_stream(pa.py_buffer(mapping)).read_all()


def scratch(n: int, dtype: str, folder: Path) -> Array:
    """``n`` zeros to write to, where many in a file of ``folder`` that goes with the array."""
    size = n * np.dtype(dtype).itemsize
    if size < _IN_MEMORY_BYTES:
        return np.zeros(n, dtype)
    with unnamed_file(folder) as file:
        file.truncate(size)
        mapping = mmap.mmap(file.fileno(), 0)
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


class Lists:
    """A column of lists of numbers: a list is read when it is looked at."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._column = column
        self.offsets = offsets_of(pc.list_value_length(column).to_numpy())

    def __len__(self) -> int:
        return len(self._column)

    @property
    def lengths(self) -> Ints:
        return np.diff(self.offsets)

    def __getitem__(self, i: int) -> Array:
        values = self._column[int(i)].values
        if pa.types.is_fixed_size_list(values.type):
            return np.asarray(values.flatten().to_numpy().reshape(len(values), -1))
        return np.asarray(values.to_numpy())

    def part(self, rows: slice) -> Ragged:
        """The lists of some rows, whose values are copied only where they are of several parts of the file."""
        lists = self._column.slice(rows.start, rows.stop - rows.start)
        if not pa.types.is_fixed_size_list(self._column.type.value_type):
            return Ragged.of(lists)
        parts = [list_parts(chunk) for chunk in lists.chunks]
        width = self._column.type.value_type.list_size
        return Ragged.joined(
            [Ragged(values.flatten().to_numpy().reshape(-1, width), offsets) for offsets, values in parts]
        )

    def take(self, rows: Array) -> Ragged:
        """The lists at ``rows`` (int array), in that order."""
        # Arrow's own would first put all record batches together.
        return Ragged.of_arrays([self[i] for i in rows], self._column.type.value_type.to_pandas_dtype())


class Texts(Sequence[str]):
    """A column of texts: a text is made when it is looked at."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: Any) -> Any:
        return self._column[index].to_pylist() if isinstance(index, slice) else self._column[int(index)].as_py()
