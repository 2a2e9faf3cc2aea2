"""Rows that come in one order and are needed in another: in memory while they are few, else in an unnamed temporary
file.

Invariants: besides the bucket that is read, at most about ``HELD_BYTES`` of rows are in memory, however many there are;
the rows of a bucket are those that were added to it, in that order; a killed process leaves no file behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import StoreError
from gymdata.rollouts.ragged import Ints

#: Rows are written once they take more than this.
HELD_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows that were added together; ``order``: by bucket, ``buckets``: of the rows in that order."""

    rows: pa.Table
    order: Ints
    buckets: Ints

    def of(self, bucket: int) -> pa.Table:
        begin, end = np.searchsorted(self.buckets, (bucket, bucket + 1))
        return self.rows.take(pa.array(self.order[begin:end]))


class Spill:
    """Rows of ``schema`` by the number of a bucket; to be closed.

    ``folder``: on whose disk the file is made, where one is needed; None: where the system has its temporary files.
    """

    def __init__(self, schema: pa.Schema, folder: Path | None, held_bytes: int | None = None) -> None:
        self.schema, self.folder = schema, folder
        self.held_bytes = HELD_BYTES if held_bytes is None else held_bytes
        self._held: list[_Part] = []
        self._held_size = 0
        self._file: IO[bytes] | None = None
        #: Offset and length of each bucket's pieces in the file.
        self._pieces: dict[int, list[tuple[int, int]]] = defaultdict(list)
        #: Bytes in the file.
        self.written = 0

    def close(self) -> None:
        """Release memory and file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # the same disk error would be raised again
                self._file.close()
        self._file, self._held = None, []

    def add(self, rows: pa.Table, bucket: Ints) -> None:
        """Put row i into ``bucket[i]``. Raises StoreError when the disk refuses."""
        order = np.argsort(bucket, kind="stable")
        self._held.append(_Part(rows, order, bucket[order]))
        self._held_size += rows.nbytes
        if self._held_size > self.held_bytes:
            with self._on_disk():
                self._write()

    def bucket(self, number: int) -> pa.Table:
        """All rows of a bucket. Raises StoreError when the disk refuses."""
        with self._on_disk():
            parts = [self._read(at, size) for at, size in self._pieces.get(number, ())]
        parts += [part.of(number) for part in self._held]
        whole = pa.concat_tables(parts) if parts else self.schema.empty_table()
        return whole.unify_dictionaries().combine_chunks()

    @contextlib.contextmanager
    def _on_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError.from_os(self.folder or Path(tempfile.gettempdir()), error) from error

    def _write(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 - open until this is closed
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        for number in np.unique(np.concatenate([part.buckets for part in self._held])).tolist():
            begin = self.written
            with pa.ipc.new_stream(pa.PythonFile(self._file, "w"), self.schema, options=options) as writer:
                for part in self._held:
                    if len(rows := part.of(number)):
                        writer.write_table(_own_dictionaries(rows))
            self._file.flush()
            self.written = self._file.tell()
            self._pieces[number].append((begin, self.written - begin))
        self._held, self._held_size = [], 0

    def _read(self, at: int, size: int) -> pa.Table:
        assert self._file is not None
        parts, left = [], size
        while left:
            part = os.pread(self._file.fileno(), left, at + size - left)
            if not part:
                raise OSError(errno.EIO, "a temporary file is shorter than what was written to it")
            parts.append(part)
            left -= len(part)
        return pa.ipc.open_stream(pa.py_buffer(b"".join(parts))).read_all()


def _own_dictionaries(rows: pa.Table) -> pa.Table:
    """``rows`` whose dictionaries hold no more than they use: a slice has those of the whole."""
    for at, field in enumerate(rows.schema):
        if pa.types.is_dictionary(field.type):
            used = pc.dictionary_encode(rows.column(at).cast(field.type.value_type))
            rows = rows.set_column(at, field, used.cast(field.type))
    return rows
