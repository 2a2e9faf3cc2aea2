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
from gymdata.store.lines import iter_lines
from gymdata.store.tables import broken_parquet, scan_source

#: Gets a field's name and its text, and returns the text that is to stand there.
Change = Callable[[str, str], str]
#: Files below a run that hold text, besides its tables.
_TEXTS = frozenset((".json", ".jsonl", ".log", ".yaml", ".yml", ".md", ".txt", ".html", ".csv"))
_BATCH_ROWS = 256


def rewritten(value: Any, change: Change, where: str = "") -> Any:
    """A JSON value with each of its texts and keys changed; JSON within a text first by its own texts, then as a whole."""
    if isinstance(value, str):
        try:
            inner = json.loads(value) if value[:1] in ("{", "[") else None
        except (ValueError, RecursionError):
            inner = None
        new_inner = rewritten(inner, change, where) if inner else inner
        return change(where, value if new_inner == inner else json.dumps(new_inner, ensure_ascii=False))
    if isinstance(value, dict):
        items: dict[Any, Any] = {}
        for key, item in value.items():
            field = f"{where}.{key}" if where else str(key)
            name = change(f"{field} (key)", str(key))
            items[name if name not in items else f"{name} {len(items)}"] = rewritten(item, change, field)
        return items
    if isinstance(value, list) and any(isinstance(item, (str, dict, list)) for item in value):
        return [rewritten(item, change, f"{where}[{n}]") for n, item in enumerate(value)]
    return value


def texts_in(value: Any) -> list[tuple[str, str]]:
    """(field, text) of each text and key that ``rewritten`` changes, in its order."""
    texts: list[tuple[str, str]] = []

    def note(where: str, text: str) -> str:
        texts.append((where, text))
        return text

    rewritten(value, note)
    return texts


def all_rows(path: str | Path) -> Iterator[tuple[Path, int, Any]]:
    """(file, row, value) of everything that a run folder, a file or a glob holds; of a text file each line is a row."""
    tables = {source.path: source for table in TABLES for source in resolve(path, table)}
    folder = Path(path)
    beside = sorted(folder.rglob("*")) if folder.is_dir() else ()
    for file in [*tables, *(f for f in beside if f.suffix in _TEXTS and f not in tables and f.is_file())]:
        yield from ((file, row, value) for row, value in enumerate(_rows(tables.get(file), file)))


def _rows(source: Source | None, file: Path) -> Iterator[Any]:
    if source is None:
        text = file.read_text(encoding="utf-8", errors="replace")
        # Indented JSON is one value.
        yield from [text.strip()] if file.suffix == ".json" else text.splitlines()
    elif source.kind == "journal":
        for batch in scan_source(source, ROLLOUTS, None, _BATCH_ROWS):
            yield from to_rows(batch)
    elif source.kind == "jsonl":
        yield from (line.decode("utf-8", "replace").strip() for _, line in iter_lines(source))
    else:
        try:
            with parquet_file(file) as opened:
                leaves = (opened.schema.column(i) for i in range(len(opened.schema)))
                texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
                for batch in opened.iter_batches(_BATCH_ROWS, columns=texts):
                    yield from batch.to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise broken_parquet(file, error) from error
