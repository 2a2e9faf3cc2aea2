"""Opening Parquet files.

Invariants: a page is read only when its checksum agrees (pages without one, which other programs write, cannot be verified);
a file has as many rows as its footer says; what cannot be read is an error with the file.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gymdata.errors import EXIT_FAULTS, DataError

#: What pyarrow raises for a file that it cannot read.
READ_FAULTS = (pa.ArrowException, OSError, EOFError)


def parquet_file(path: str | Path, **options: Any) -> pq.ParquetFile:
    """``pyarrow.parquet.ParquetFile`` of a path. Raises ``READ_FAULTS`` for what cannot be read."""
    try:
        # pyarrow takes a relative name with a colon for a URL.
        return pq.ParquetFile(Path(path).absolute(), page_checksum_verification=True, **options)
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid(f"the name of a column is not UTF-8 ({error})") from error


@contextlib.contextmanager
def opened_parquet(path: Path, footer: pq.FileMetaData | None = None) -> Iterator[pq.ParquetFile]:
    """A Parquet file, open; ``footer``: when it was read before. Raises DataError for what of it pyarrow cannot read."""
    try:
        with parquet_file(path, metadata=footer) as file:
            # A row group's columns stay untouched here: pyarrow ends the process over some damage in what describes them.
            if footer is None and sum(group_rows(file.metadata)) != file.metadata.num_rows:
                raise damaged(path, "its row groups do not have as many rows as its footer says")
            yield file
    except READ_FAULTS as error:
        raise broken_parquet(path, error) from error


def group_rows(footer: pq.FileMetaData) -> list[int]:
    """The rows of each row group."""
    return [footer.row_group(index).num_rows for index in range(footer.num_row_groups)]


def damaged(path: Path, why: str) -> DataError:
    """Content that is not what was written. A fault of the data, not of the command."""
    hint = "bring the file back from a copy, or write it again"
    return DataError(f"{path}: is damaged: {why}", hint=hint, exit_code=EXIT_FAULTS)


def broken_parquet(path: Path, error: Exception, where: str = "") -> DataError:
    """The error of a Parquet file that pyarrow could not read. ``where``: what begins its reason."""
    if isinstance(error, MemoryError):
        # Arrow's prefix, which has no information.
        raise error
    if re.search("bad_alloc|allocat|out of memory|malloc", str(error), re.IGNORECASE):
        raise MemoryError(str(error)) from error
    if not path.exists():
        return DataError.missing_path(path)
    if path.stat().st_size == 0:
        return DataError.empty(path, "a Parquet file")
    why = (str(error).splitlines() or [type(error).__name__])[0]
    if "checksum" in why:
        return damaged(path, f"{where}the checksum of a page does not match ({why})")
    return DataError.unreadable(path, f"{where}{why}", "the file is cut off or damaged, or not Parquet: write it again")


def schema_of(path: Path) -> pa.Schema:
    """The columns of a Parquet file. Raises DataError for a file that pyarrow cannot read."""
    with opened_parquet(path) as file:
        return file.schema_arrow
