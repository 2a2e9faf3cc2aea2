"""The rows of task files: JSON lines, JSON arrays, CSV, TSV, Parquet, Arrow, folders of ``save_to_disk`` and hub names.

Invariants: rows stream, so a file of any length costs about one batch of memory; what a file lacks is absent from a row
(a null of a column, an empty cell); cells of CSV and TSV are text, so that "007" stays what it is; a file that ends too
early is unreadable, not shorter.
"""

from __future__ import annotations

import contextlib
import glob
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import orjson

from gymdata.errors import DataError, UsageError, abridged
from gymdata.rollouts.messages import TaskRow, drop_nulls
from gymdata.store.fetch import fetched
from gymdata.store.lines import SEPARATORS, decode, row_lines
from gymdata.store.paths import BOM, Source, refuse_pipe

HUB = "hf:"
#: The accepted inputs, for messages and ``--help``.
KINDS = ".jsonl, .json, .csv, .tsv, .parquet or .arrow (also .gz, .zst), a folder of save_to_disk, or hf:NAME[:SPLIT]"
_ROWS = 512
#: The longest row of a JSON array, in bytes.
_LONGEST = 1 << 26
_ARROW = (".arrow", ".feather", ".ipc")

#: Called with the file, the line, what was there and what was expected.
BadLine = Callable[[Path, int, str, str], None]


def task_files(path: Path | str) -> list[Path]:
    """The files that ``path`` names: one, those of a glob, a saved dataset's or a hub dataset's. Raises DataError."""
    text = str(path)
    if text.startswith(HUB) and not text.startswith(f"{HUB}/"):
        from gymdata.engines._hub import hub_files

        return hub_files(text)
    text = str(fetched(text))
    # A file of that very name wins over a pattern: "tasks[1].jsonl" is a name, too.
    is_pattern = glob.has_magic(text) and not Path(text).exists()
    paths = [Path(p) for p in sorted(glob.glob(text))] if is_pattern else [Path(text)]  # noqa: PTH207 - Path.glob takes no absolute pattern
    if not paths or not paths[0].exists():
        raise DataError.missing_path(path, f"a task file or glob: {KINDS}")
    for source in paths:
        refuse_pipe(source)
    return [file for source in paths for file in (_saved(source) if source.is_dir() else [source])]


def rows_of(file: Path, bad_line: BadLine) -> Iterator[tuple[int, TaskRow]]:
    """(line or 1-based row, row) of one file."""
    kind = Path(file.name.removesuffix(".gz").removesuffix(".zst")).suffix
    if kind in (".parquet", *_ARROW):
        yield from _table_rows(file, "Parquet" if kind == ".parquet" else "Arrow")
    elif kind in SEPARATORS:
        for number, line in row_lines(Source(file, "jsonl", "csv" if kind == ".csv" else "tsv")):
            row = orjson.loads(line)
            if isinstance(row, dict):
                yield number, row
            else:
                bad_line(file, number, short(row), "a cell for each column of the header")
    elif kind == ".json" and _is_array(file):
        yield from _array_rows(file, bad_line)
    else:
        expected = "one JSON object per line"
        for number, line in row_lines(Source(file, "jsonl")):
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                if number == 1 and kind not in ("", ".jsonl", ".json", ".ndjson"):
                    raise DataError.unreadable(
                        file,
                        f"its first line is no JSON; expected {KINDS}",
                        "give a task file; a spreadsheet, saved as .csv, is one",
                    ) from error
                fault = f"text that is not JSON ({error})"
                with contextlib.suppress(ValueError):
                    row = decode(line)  # Python's json reads it
                    fault = "a number that is not finite or too long"
                    try:
                        json.dumps(row, ensure_ascii=False).encode()
                    except UnicodeEncodeError:
                        fault = "text with a lone surrogate, which is not Unicode"
                bad_line(file, number, fault, expected)
                continue
            if isinstance(row, dict):
                yield number, row
            else:
                bad_line(file, number, short(row), expected)


def short(value: Any) -> str:
    """A value in a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _saved(folder: Path) -> list[Path]:
    """The Arrow files of a folder that ``datasets.save_to_disk`` wrote."""
    state, splits = folder / "state.json", folder / "dataset_dict.json"
    try:
        if splits.is_file():
            names = orjson.loads(splits.read_bytes())["splits"]
            if len(names) != 1:
                raise UsageError(
                    f"{folder}: holds the splits {abridged(names)}, expected one dataset",
                    hint=f"give the folder of one: {folder / names[0] if names else folder}",
                )
            return _saved(folder / names[0])
        if state.is_file():
            return [folder / part["filename"] for part in orjson.loads(state.read_bytes())["_data_files"]]
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError.unreadable(folder, f"what describes the saved dataset is not understood ({error!r})") from error
    raise UsageError(
        f"{folder}: is a folder, expected a task file or a folder of datasets.save_to_disk",
        hint=f"give a file or a glob: {folder}/*.jsonl",
    )


def _is_array(file: Path) -> bool:
    import pyarrow as pa

    try:
        with pa.input_stream(file) as stream:
            return bool(stream.read(1 << 16).removeprefix(BOM).lstrip()[:1] == b"[")
    except OSError as error:
        raise DataError.unreadable(file, str(error)) from error


def _array_rows(file: Path, bad_line: BadLine) -> Iterator[tuple[int, TaskRow]]:
    import duckdb

    query = "SELECT json FROM read_json_objects(?, format = 'array', maximum_object_size = ?)"
    with duckdb.connect(":memory:", config={"threads": 1}) as database:
        number = 0
        try:
            rows = database.execute(query, [glob.escape(str(file)), _LONGEST])
            while texts := rows.fetchmany(_ROWS):
                for (text,) in texts:
                    number += 1
                    # The texts are the file's own: values are not changed by the types of a column.
                    row = orjson.loads(text)
                    if isinstance(row, dict):
                        yield number, row
                    else:
                        bad_line(file, number, short(row), "a list of JSON objects")
        except (duckdb.Error, orjson.JSONDecodeError) as error:
            raise DataError.unreadable(
                file, f"{error} (after {number:,} rows)", "is it one whole JSON array?"
            ) from error


def _table_rows(file: Path, format: Literal["Parquet", "Arrow"]) -> Iterator[tuple[int, TaskRow]]:
    import pyarrow as pa
    from pyarrow import ipc

    from gymdata.store.parquet import parquet_file

    try:
        if format == "Parquet":
            with parquet_file(file) as opened:
                yield from enumerate(_plain(opened.iter_batches(batch_size=_ROWS)), 1)
            return
        with pa.memory_map(str(file)) as source:
            # The format with an index begins with a name; the stream, which `datasets` writes, has none.
            if source.read(6) == b"ARROW1":
                reader = ipc.open_file(source)
                batches: Iterator[Any] = (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                source.seek(0)
                batches = iter(ipc.open_stream(source))
            yield from enumerate(_plain(batches), 1)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError.unreadable(file, str(error), f"is it a whole {format} file?") from error


def _plain(batches: Iterator[Any] | Sequence[Any]) -> Iterator[TaskRow]:
    for batch in batches:
        for start in range(0, batch.num_rows, _ROWS):
            yield from map(drop_nulls, batch.slice(start, _ROWS).to_pylist())
