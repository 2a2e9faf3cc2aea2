"""failures.jsonl: attempts that ended without a rollout, with their kind and the turns so far.

What always holds: a failure is never a rollout and has no reward; a torn last line is cut off and kept aside.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gymdata.store.journal import Repair, put_aside
from gymdata.store.lines import decode, iter_lines
from gymdata.store.paths import Source, find_run_json

FAILURES = "failures.jsonl"


def read_failures(path: str | Path) -> list[dict[str, Any]]:
    """Every failure of the run that a path argument belongs to; empty when there were none. Broken lines are left out."""
    found = find_run_json(path)
    return read_failure_file(found.parent / FAILURES) if found else []


def read_failure_file(file: Path) -> list[dict[str, Any]]:
    """The records of one failures.jsonl."""
    if not file.exists():
        return []
    records = []
    for _, line in iter_lines(Source(file, "jsonl")):
        try:
            records.append(decode(line))
        except ValueError:
            # Torn by a crash; it was reported when the run was opened, and the attempt counts as never made.
            continue
    return records


def repair_failures(file: Path) -> list[Repair]:
    """Cut off a last line without newline, keeping it in ``FILE.torn``."""
    if not file.exists():
        return []
    with file.open("rb") as handle:
        handle.seek(max(0, file.stat().st_size - (64 << 20)))
        base = handle.tell()
        tail = handle.read()
    if not tail or tail.endswith(b"\n"):
        return []
    cut = tail.rfind(b"\n") + 1
    torn = tail[cut:]
    found = Repair(file, base + cut, len(torn), True)
    put_aside(file.with_name(file.name + ".torn"), [(found, torn)])
    os.truncate(file, base + cut)
    return [found]
