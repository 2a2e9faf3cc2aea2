"""``--isolate``: an agent in a network namespace from which only the recorder can be reached.

Invariants: the agent's own network is loopback alone; a connection to the recorder's port in it is passed on byte by byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gymdata.errors import UsageError

_LAUNCHER = Path(__file__).with_name("launcher.py")
_CHUNK = 1 << 16


def why_not() -> str | None:
    """Why this machine gives no network namespace; None where it does."""
    parent_end, child_end = socket.socketpair()
    with parent_end, child_end:
        words = launched(["true"], child_end.fileno(), 0)
        try:
            done = subprocess.run(words, pass_fds=[child_end.fileno()], capture_output=True, text=True, check=False)
        except OSError as error:
            return str(error.strerror)
    return None if done.returncode == 0 else (done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}")


def refuse_impossible() -> None:
    """Raises UsageError where agents cannot be isolated."""
    if (why := why_not()) is not None:
        raise UsageError(
            f"--isolate: {why}",
            hint="it takes Linux with user namespaces (in a container: allowed by its security profile); or leave it out",
        )


async def pass_on(channel: socket.socket, port: int) -> asyncio.Server | None:
    """Serve the namespace whose launcher sends its listening socket over ``channel``: connections to it go to our own
    127.0.0.1:``port``. None where the launcher ended without one."""
    _, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, channel, 1, 1)
    if not descriptors:
        return None

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            upstream = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_copied(reader, upstream[1]), _copied(upstream[0], writer))

    return await asyncio.start_server(connected, sock=socket.socket(fileno=descriptors[0]))


def launched(words: Sequence[str], descriptor: int, port: int) -> list[str]:
    """The command line that runs ``words`` in a namespace; ``descriptor``: of the channel to ``pass_on``."""
    return [sys.executable, "-I", "-S", str(_LAUNCHER), str(descriptor), str(port), *words]


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(_CHUNK):
            writer.write(chunk)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
