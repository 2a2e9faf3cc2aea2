"""The durable store: the only code that writes data.

Invariants: a row that was appended and synced survives any crash; a file appears under its name whole or not at
all; a sealed file is never changed; a reader sees every sealed row and every good journal line, once.

Names are loaded when first used, so that code which only finds and reads JSON lines needs no pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gymdata.store.journal import read_failures
    from gymdata.store.partial_reads import scan_lazy
    from gymdata.store.paths import Source, find_run_json, resolve
    from gymdata.store.run import Run
    from gymdata.store.run_json import hash_file, read_run_json, write_run_json
    from gymdata.store.stage_output import StageOutput
    from gymdata.store.tables import files_of, has_rows, read_table, scan_batches, write_table

_HOME = {
    "Run": "run",
    "Source": "paths",
    "StageOutput": "stage_output",
    "files_of": "tables",
    "find_run_json": "paths",
    "has_rows": "tables",
    "hash_file": "run_json",
    "read_failures": "journal",
    "read_run_json": "run_json",
    "read_table": "tables",
    "resolve": "paths",
    "scan_batches": "tables",
    "scan_lazy": "partial_reads",
    "write_run_json": "run_json",
    "write_table": "tables",
}
__all__ = [
    "Run",
    "Source",
    "StageOutput",
    "files_of",
    "find_run_json",
    "has_rows",
    "hash_file",
    "read_failures",
    "read_run_json",
    "read_table",
    "resolve",
    "scan_batches",
    "scan_lazy",
    "write_run_json",
    "write_table",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOME:
        return getattr(importlib.import_module(f"gymdata.store.{_HOME[name]}"), name)
    raise AttributeError(f"module 'gymdata.store' has no attribute {name!r}")
