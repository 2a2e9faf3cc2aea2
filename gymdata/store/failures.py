"""failures.jsonl: attempts that ended without a rollout, with their kind and the turns so far.

What always holds: a failure is never a rollout and has no reward; each line carries its checksum, as a journal's does; a
torn last line is cut off and kept aside.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from gymdata.store.journal import Repair, put_aside, scan
from gymdata.store.lines import decode
from gymdata.store.paths import BOM, find_run_json
from gymdata.store.reading import report_lines

FAILURES = "failures.jsonl"
#: What ends a line that carries a checksum.
_CHECKSUM = re.compile(rb"\t[0-9a-f]{8}\Z")


def read_failures(path: str | Path) -> list[dict[str, Any]]:
    """Every failure of the run that a path argument belongs to; empty when there were none. Damaged lines are left out
    and reported."""
    found = find_run_json(path)
    return read_failure_file(found.parent / FAILURES) if found else []


def read_failure_file(file: Path) -> list[dict[str, Any]]:
    """The records of one failures.jsonl. A line has the shape of a journal's; those of earlier versions have no checksum."""
    if not file.exists():
        return []
    records: list[dict[str, Any]] = []
    damaged = []
    for number, line in enumerate(scan(file), 1):
        record = _record(line.raw if line.body is None else line.body, checked=line.body is not None)
        if record is not None:
            records.append(record)
        elif line.closed and not line.raw.isspace() and line.raw:
            damaged.append((number, line.offset))
        # A last line without newline is on its way, or was torn by a crash: opening the run cuts it off and says so.
    report_lines(file, damaged, "record", "their checksums do not match, or they are not JSON objects")
    return records


def _record(text: bytes, checked: bool) -> dict[str, Any] | None:
    """The record that a line spells; None when it spells none, or ends with a checksum that does not match."""
    if not checked and _CHECKSUM.search(text):
        return None
    try:
        value = decode(text.removeprefix(BOM))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


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
