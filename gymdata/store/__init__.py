"""The durable store: the only code that writes data.

Invariants: a row that was appended and synced survives any crash; a file appears under its name whole or not at
all; a sealed file is never changed; a reader sees every sealed row and every good journal line, once.

Names are loaded when first used, so that code which only finds and reads JSON lines needs no pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gymdata.store.journal import read_failures as read_failures
    from gymdata.store.partial_reads import scan_lazy as scan_lazy
    from gymdata.store.paths import Source as Source
    from gymdata.store.paths import find_run_json as find_run_json
    from gymdata.store.paths import resolve as resolve
    from gymdata.store.run import Run as Run
    from gymdata.store.run_json import hash_file as hash_file
    from gymdata.store.run_json import read_run_json as read_run_json
    from gymdata.store.run_json import write_run_json as write_run_json
    from gymdata.store.stage_output import StageOutput as StageOutput
    from gymdata.store.tables import files_of as files_of
    from gymdata.store.tables import has_rows as has_rows
    from gymdata.store.tables import read_table as read_table
    from gymdata.store.tables import scan_batches as scan_batches

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
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOME:
        return getattr(importlib.import_module(f"gymdata.store.{_HOME[name]}"), name)
    raise AttributeError(f"module 'gymdata.store' has no attribute {name!r}")
