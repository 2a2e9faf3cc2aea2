"""``gymdata query``: read-only SQL over runs and files, and its results as files."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from gymdata.errors import UsageError, counted
from gymdata.public import path_of, wrong_argument
from gymdata.store.paths import local_output

if TYPE_CHECKING:
    import pyarrow as pa

_SUFFIXES = (".parquet", ".csv", ".jsonl")


def query(sql: str, *paths: str | Path) -> pa.Table:
    """The result of one SELECT over the files under ``paths``, as an Arrow table.

    Views: rollouts (with a column ``reward_NAME`` for each named reward), turns (with ``prompt_token_ids``), messages,
    failures, and pairs, scores, comparisons, experiences, violations, audit where there are such files.
    ``paths``: run folders, stage folders, Parquet or JSON lines files, globs. Raises UsageError for SQL that is wrong or
    does more than read, and MemoryError for what memory cannot hold.
    """
    if not isinstance(sql, str):
        raise wrong_argument(sql, "query", "one SELECT as a string, then the paths that it reads")
    if not paths:
        raise UsageError(
            "gymdata.query: got no paths, expected the files that the SELECT reads", hint="query(sql, path)"
        )
    from gymdata.commands.query.statement import run_statement

    with run_statement(sql, [str(path_of(path, "query")) for path in paths]) as reader:
        return reader.read_all()


def check_target(target: str | Path, *paths: str | Path) -> None:
    """Raises UsageError unless a result of a query over ``paths`` may be written to ``target``."""
    from gymdata.commands.query.views import find_files
    from gymdata.store.stage_output import refuse_owned

    path = local_output(target)
    if path.suffix not in _SUFFIXES:
        raise UsageError.bad_value("-o", str(target), f"a name ending in {', '.join(_SUFFIXES)}")
    sources = [s.path.resolve() for of_table in find_files(paths).by_table.values() for s in of_table]
    if path.resolve() in sources:
        raise UsageError(f"-o {path}: is one of the files that the query reads", hint="give another name")
    refuse_owned(path)


def write_result(reader: pa.RecordBatchReader, target: str | Path, *, overwrite: bool = False) -> int:
    """Write a result, for .csv and .jsonl as JSON, to a file that appears whole. Returns the number of rows.

    Raises StoreError for a file that is there and has something else, without ``overwrite``.
    """
    from gymdata.store.stage_output import single_file

    path = Path(target)
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        for field in reader.schema:
            try:
                pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])).close()
            except pa.ArrowNotImplementedError as error:
                raise UsageError(
                    f"column {field.name!r} is {field.type}, which Parquet has no form for",
                    hint=f"cast it in the SELECT: {field.name}::VARCHAR",
                ) from error
    # The same query may be run again; nothing records what any other file is.
    with single_file(path, overwrite=overwrite) as temporary:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            rows = 0
            with pq.ParquetWriter(
                temporary.absolute(), reader.schema, compression="zstd", compression_level=1
            ) as writer:
                for batch in reader:
                    writer.write_batch(batch)
                    rows += batch.num_rows
        else:
            with temporary.open("w", encoding="utf-8", newline="") as file:
                rows = write_text(reader, file, "csv" if path.suffix == ".csv" else "jsonl")
    return rows


def write_text(reader: pa.RecordBatchReader, file: TextIO | io.TextIOBase, kind: str) -> int:
    """Write rows of JSON as CSV (nested values as JSON, nulls empty) or JSON lines to a text file. Returns how many."""
    import csv

    from gymdata.store.lines import encode

    rows = 0
    if kind == "csv":
        table = csv.writer(file, lineterminator="\n")
        table.writerow(reader.schema.names)
        for row in _texts(reader):
            table.writerow([json.loads(text) if text is not None and text[0] == '"' else text for text in row])
            rows += 1
        return rows
    for values in json_rows(reader):
        file.write(encode(dict(zip(reader.schema.names, values, strict=True))).decode() + "\n")
        rows += 1
    return rows


def json_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Any, ...]]:
    """The values of rows of JSON."""
    for row in _texts(batches):
        yield tuple(None if text is None else json.loads(text) for text in row)


def _texts(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str | None, ...]]:
    for batch in batches:
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def too_wide(value: object, most: int = 60) -> str | None:
    """A shortened form of a value that would flood a table, or None when it is short."""
    text = str(value)
    if len(text) <= most:
        return None
    count = f" ({counted(len(value), 'item')})" if isinstance(value, Sequence) and not isinstance(value, str) else ""
    return text[: most - len(count) - 1] + "…" + count
