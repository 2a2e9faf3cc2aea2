"""Opening Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def parquet_file(path: str | Path, **options: Any) -> pq.ParquetFile:
    """``pyarrow.parquet.ParquetFile`` of a path. Raises pa.ArrowException or OSError for what cannot be read."""
    try:
        # pyarrow takes a relative name with a colon for a URL.
        return pq.ParquetFile(Path(path).absolute(), **options)
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid(f"the name of a column is not UTF-8 ({error})") from error


def parquet_schema(path: str | Path) -> pa.Schema:
    """The columns of a Parquet file. Raises as ``parquet_file``."""
    with parquet_file(path) as file:
        return file.schema_arrow
