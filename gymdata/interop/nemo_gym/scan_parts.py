"""Scanning a NeMo Gym file in blocks, and in two processes where that is safe.

Invariants: the result does not depend on the number of processes; a child that fails takes the whole scan with
it, never a part of the rows; memory is a block, not the file.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gymdata.errors import DataError
from gymdata.store.paths import BOM, Source
from gymdata.tuning import rare_collections

_BLOCK = 1 << 20
#: Below this many bytes a second process costs more than it gives.
WORTH_SPLITTING = 24 << 20
#: Modules that start threads of their own: forking beside them is not safe.
_THREADED = ("pyarrow", "polars", "torch", "duckdb", "ray")


def scan_file(path: Path, compression: Any, scanner: Callable[[], Any], processes: int) -> Any:
    """The Part of all rows of ``path``. Raises DataError when the file cannot be read to its end."""
    if compression is not None:
        from gymdata.store.lines import iter_lines

        one = scanner()
        for _, line in iter_lines(Source(path, "jsonl", compression)):
            one.line(line)
        return one.finish()
    try:
        size = path.stat().st_size
        if processes > 1 and size >= WORTH_SPLITTING and may_fork():
            return _forked(path, size, scanner, processes)
        return scan_stretch(path, 0, size, scanner())
    except OSError as error:
        raise DataError.unreadable(path, str(error)) from error


def may_fork() -> bool:
    return (
        hasattr(os, "fork")
        and sys.platform == "linux"
        and threading.active_count() == 1
        and not any(name in sys.modules for name in _THREADED)
    )


def scan_stretch(path: Path, start: int, end: int, scanner: Any) -> Any:
    with rare_collections():
        for line in _lines(path, start, end):
            scanner.line(line)
    return scanner.finish()


def _lines(path: Path, start: int, end: int) -> Iterator[bytes]:
    """Non-blank lines, newline and all, that begin at ``start`` or later and before ``end``."""
    with path.open("rb", buffering=_BLOCK) as file:
        at = 0
        if start:
            # The line that `start` falls into belongs to the stretch before, unless it begins right there.
            file.seek(start - 1)
            at = start - 1 + len(file.readline())
        for line in file:
            if at >= end:
                return
            text = line.removeprefix(BOM) if at == 0 else line
            at += len(line)
            if not text.isspace():
                yield text


def _forked(path: Path, size: int, scanner: Callable[[], Any], processes: int) -> Any:
    bounds = [size * k // processes for k in range(processes + 1)]
    children = [_child(path, bounds[k], bounds[k + 1], scanner) for k in range(1, processes)]
    whole = scan_stretch(path, 0, bounds[1], scanner())
    failed = False
    for pid, pipe in children:
        with os.fdopen(pipe, "rb") as stream:
            data = stream.read()
        failed = os.waitpid(pid, 0)[1] != 0 or failed
        if not failed:
            whole.append(pickle.loads(data))
    # A child that died (out of memory, killed) says nothing about the rows: look again, alone.
    return scan_stretch(path, 0, size, scanner()) if failed else whole


def _child(path: Path, start: int, end: int, scanner: Callable[[], Any]) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    status = 1
    try:
        os.close(reader)
        with os.fdopen(writer, "wb") as stream:
            pickle.dump(scan_stretch(path, start, end, scanner()), stream, pickle.HIGHEST_PROTOCOL)
        status = 0
    finally:
        # Whatever happened, the child must not run the parent's ending.
        os._exit(status)
    raise AssertionError
