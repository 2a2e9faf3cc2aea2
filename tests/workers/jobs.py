"""What workers do in tests: functions that a process can import without a test's libraries."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from threading import Event
from typing import NoReturn

from gymdata.errors import RefusedError
from gymdata.store import reading


def negative(piece: int) -> Iterator[int]:
    yield -piece


def refuses_three(piece: int) -> Iterator[int]:
    """Reports each piece, and cannot do the third."""
    reading.warn(f"piece {piece} is odd")
    if piece == 3:
        reading.report_damage("piece 3 is damaged")
        raise RefusedError("nothing", code="T205", hint="another").at("here", 3, "a turn")
    yield piece


def dies_at_three(piece: int) -> Iterator[int]:
    if piece == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    yield piece


def divides(piece: int) -> Iterator[float]:
    yield 1 / piece


def waits_for_ever(piece: int) -> list[NoReturn]:
    """Says who it is, in the file that standard error is, and does not end."""
    os.write(2, f"worker {os.getpid()}\n".encode())
    while True:
        Event().wait()
