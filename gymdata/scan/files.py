"""Every text of a run: the rows of its tables, run.json, logs and other files beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from gymdata.remote.reading import parquet_file
from gymdata.rollouts.schema import ROLLOUTS, TABLES
from gymdata.store import Source, resolve
from gymdata.store.columns import to_rows
from gymdata.store.lines import decode, iter_lines
from gymdata.store.tables import broken_parquet, scan_source

#: Gets a field's name and its text, and returns the text that is to stand there.
Change = Callable[[str, str], str]
#: Files below a run that hold text, besides its tables.
_TEXTS = frozenset((".json", ".jsonl", ".log", ".yaml", ".yml", ".md", ".txt", ".html", ".csv"))
_BATCH_ROWS = 256


def rewritten(value: Any, change: Change, where: str = "") -> Any:
    """A JSON value with each of its texts, and of its keys, changed; JSON within a text is changed by its own texts. What
    has no text to change is the same object."""
    if isinstance(value, str):
        inner = _json_in(value)
        if inner is None:
            return change(where, value)
        made = rewritten(inner, change, where)
        return value if made is inner else json.dumps(made, ensure_ascii=False)
    if isinstance(value, dict):
        items: dict[Any, Any] = {}
        for key, item in value.items():
            place = f"{where}.{key}" if where else str(key)
            name = change(f"{place} (key)", key) if isinstance(key, str) else key
            items[name if name not in items else f"{name} {len(items)}"] = rewritten(item, change, place)
        same = all(a is b for a, b in zip(items.values(), value.values(), strict=True)) and items.keys() == value.keys()
        return value if same else items
    if isinstance(value, list) and any(isinstance(item, (str, dict, list)) for item in value):
        made = [rewritten(item, change, f"{where}[{n}]") for n, item in enumerate(value)]
        return value if all(a is b for a, b in zip(made, value, strict=True)) else made
    return value


def _json_in(text: str) -> Any:
    """The object or list that a text is; None for any other text."""
    if text[:1] not in ("{", "[") or text[-1:] not in ("}", "]"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, (dict, list)) and value else None


def all_rows(path: str | Path) -> Iterator[tuple[Path, int, Any]]:
    """(file, row, value) of everything that a run folder, a file or a glob holds; of a text file each line is a row."""
    tables: dict[Path, Source] = {}
    for table in TABLES:
        tables |= {source.path: source for source in resolve(path, table)}
    for source in tables.values():
        for row, value in enumerate(_rows(source)):
            yield source.path, row, value
    folder = Path(path)
    for file in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if file.suffix in _TEXTS and file not in tables and file.is_file():
            lines = file.read_text(encoding="utf-8", errors="replace")
            # Indented JSON is one value.
            values = [lines] if file.suffix == ".json" else lines.splitlines()
            yield from ((file, row, value) for row, value in enumerate(values))


def _rows(source: Source) -> Iterator[Any]:
    if source.kind == "journal":
        for batch in scan_source(source, ROLLOUTS, None, _BATCH_ROWS):
            yield from to_rows(batch)
    elif source.kind != "parquet":
        for _, line in iter_lines(source):
            try:
                yield decode(line)
            except ValueError:
                yield line.decode("utf-8", "replace")
    else:
        try:
            with parquet_file(source.path) as file:
                leaves = [file.schema.column(i) for i in range(len(file.schema))]
                texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
                for batch in file.iter_batches(_BATCH_ROWS, columns=texts):
                    yield from batch.to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise broken_parquet(source.path, error) from error


def rollout_id_of(value: Any) -> str | None:
    """The rollout that a row is of, or belongs to."""
    named = value.get("rollout_id") or value.get("pair_id") if isinstance(value, dict) else None
    return str(named) if named is not None else None
