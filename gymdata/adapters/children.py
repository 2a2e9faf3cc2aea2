"""Ctrl-C for commands that run their work in a child process.

What always holds: the child hears of each interruption once, whether it came from the terminal or was sent to the parent
alone, and the parent waits for what the child makes of it (a checkpoint, a drained engine).
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

#: For subprocess.Popen: a process group of its own, which a Ctrl-C of the terminal does not reach.
OWN_GROUP: dict[str, Any] = {"process_group": 0}


def send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a child that was started with OWN_GROUP, and to all that it started in turn."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


@contextmanager
def interruptions_passed_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass every SIGINT on to a child that was started with OWN_GROUP; ours is not interrupted meanwhile.

    Outside the main thread no signal arrives, and nothing is changed.
    """
    try:
        before = signal.signal(signal.SIGINT, lambda *_: send(process, signal.SIGINT))
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
