"""Arrow files that are mapped into memory, and dropped from it again: data larger than memory, shared by processes.

Only the rows of a few batches stay in memory, because ``read_rows`` drops earlier pages.
"""

from __future__ import annotations

import mmap
import weakref
from pathlib import Path

import pyarrow as pa

#: Rows that are read before their pages are dropped. Reading one value maps 64 kB around it.
_ROWS = 128
_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_read = 0


def mapped(path: Path) -> pa.Table:
    """The rows of an Arrow stream, without reading them."""
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _maps.add(mapping)
    return pa.ipc.open_stream(pa.py_buffer(mapping)).read_all()


def read_rows(count: int) -> None:
    """Announce that ``count`` rows are about to be read; pages of earlier rows are dropped from time to time. Later reads
    come from the disk cache, or the disk."""
    global _read
    _read += count
    if _read >= _ROWS:
        _read = 0
        for mapping in list(_maps):
            mapping.madvise(mmap.MADV_DONTNEED)
