"""Running a real ``gymdata collect`` and killing it at a chosen journal length.

``fork`` starts the same command in a process that was forked with the heavy imports done, so that twenty kills take seconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

#: How long a start, an engine and some rows may take on a busy machine, in seconds.
DEADLINE_S = 300.0


def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """``gymdata collect …`` in a session of its own, so that everything it starts can be found."""
    return subprocess.Popen(
        [sys.executable, "-m", "gymdata.cli", "collect", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def fork(arguments: Sequence[str]) -> multiprocessing.process.BaseProcess:
    """``start`` without the start-up time; output goes nowhere."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["gymdata.cli.collect", "gymdata.collect.run", "transformers.models.auto.tokenization_auto", "aiohttp"]
    )
    process = context.Process(target=_collect, args=(list(arguments),))
    process.start()
    return process


def kill_at(pid: int, run: Path, rows: int) -> None:
    """SIGKILL the process (not its children) once the run has ``rows`` rows; returns when it has ended.

    Nothing is killed when it ends by itself before.
    """
    end = time.monotonic() + DEADLINE_S
    ended = os.pidfd_open(pid)
    try:
        while rows_there(run) < rows:
            # Wakes at once when the process ends; else looks at the journal again.
            if select.select([ended], [], [], 0.002)[0]:
                return
            assert time.monotonic() < end, "the run makes no progress"
        signal.pidfd_send_signal(ended, signal.SIGKILL)
        select.select([ended], [], [], DEADLINE_S)
    finally:
        os.close(ended)


def wait_for_rows(process: subprocess.Popen[bytes], run: Path, rows: int, named: str) -> list[int]:
    """Once the run has ``rows`` rows: the processes of its session whose name contains ``named``."""
    end = time.monotonic() + DEADLINE_S
    ended = os.pidfd_open(process.pid)
    try:
        while rows_there(run) < rows:
            assert not select.select([ended], [], [], 0.002)[0], "it ended too early"
            assert time.monotonic() < end, "the run makes no progress"
    finally:
        os.close(ended)
    return [p for p in session_members(process.pid) if named in Path(f"/proc/{p}/cmdline").read_text()]


def _collect(arguments: list[str]) -> None:
    from gymdata.cli.main import main

    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.argv = ["gymdata", "collect", *arguments]
    raise SystemExit(main(["collect", *arguments]))


def rows_there(run: Path) -> int:
    """Lines of all journals plus rows of sealed parts, without opening the run."""
    import pyarrow.parquet as pq

    total, sealed = 0, set()
    for part in (run / "rollouts").glob("part-*.parquet"):
        with contextlib.suppress(OSError):
            total += pq.read_metadata(part).num_rows
            sealed.add(part.name[5:10])
    for journal in (run / "rollouts").glob("*.journal"):
        if journal.name[:5] not in sealed:
            with contextlib.suppress(FileNotFoundError):
                total += journal.read_bytes().count(b"\n")
    return total


def session_members(session: int) -> list[int]:
    """Processes of a session that are alive (zombies are not)."""
    alive = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                alive.append(int(entry.name))
    return alive
