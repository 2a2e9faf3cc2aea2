"""A real command that is killed when it has come so far, and a disk that is full."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def full_disk(at: int = 0) -> Iterator[None]:
    """No file of this process grows beyond ``at`` bytes: the system refuses it as a full disk does (EFBIG)."""
    limits, writes_bytecode = resource.getrlimit(resource.RLIMIT_FSIZE), not sys.dont_write_bytecode
    # Python would leave half the bytecode of a module that is imported now, which no later process could load.
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (at, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = not writes_bytecode


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


def fork(arguments: Sequence[str], command: str = "collect") -> multiprocessing.process.BaseProcess:
    """``start`` without the start-up time; output goes nowhere."""
    context = multiprocessing.get_context("forkserver")
    commands = ("collect", "record")
    modules = [*(f"gymdata.cli.{name}" for name in commands), *(f"gymdata.commands.{name}.run" for name in commands)]
    context.set_forkserver_preload([*modules, "transformers.models.auto.tokenization_auto", "aiohttp"])
    process = context.Process(target=_command, args=([command, *arguments],))
    process.start()
    return process


def kill_when(pid: int, reached: Callable[[], bool]) -> bool:
    """SIGKILL the process (not its children) once it has ``reached`` something; returns when it has ended, and whether it
    was killed: not when it ends by itself before."""
    end = time.monotonic() + DEADLINE_S
    ended = os.pidfd_open(pid)
    try:
        while not reached():
            # Wakes at once when the process ends; else looks again.
            if select.select([ended], [], [], 0.002)[0]:
                return False
            assert time.monotonic() < end, "it makes no progress"
        signal.pidfd_send_signal(ended, signal.SIGKILL)
        return bool(select.select([ended], [], [], DEADLINE_S)[0])
    finally:
        os.close(ended)


def kill_at(pid: int, run: Path, rows: int) -> bool:
    """``kill_when`` the run has ``rows`` rows."""
    return kill_when(pid, lambda: rows_there(run) >= rows)


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
    found = []
    for member in session_members(process.pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            if named in Path(f"/proc/{member}/cmdline").read_text():
                found.append(member)
    return found


def _command(words: list[str]) -> None:
    from gymdata.cli.main import main

    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.argv = ["gymdata", *words]
    raise SystemExit(main(words))


def rows_there(run: Path) -> int:
    """Lines of open segments plus rows of sealed parts, without opening the run."""
    import pyarrow.parquet as pq

    total, sealed = 0, set()
    for part in (run / "rollouts").glob("part-*.parquet"):
        with contextlib.suppress(OSError):
            total += pq.read_metadata(part).num_rows
            sealed.add(part.stem)
    for lines in (run / "rollouts").glob("part-*.jsonl"):
        if lines.stem not in sealed:
            with contextlib.suppress(FileNotFoundError):
                total += lines.read_bytes().count(b"\n")
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
