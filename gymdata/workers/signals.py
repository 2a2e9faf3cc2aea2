"""Ctrl-C: the first starts nothing new and lets what is in flight end, the second drops it; in child processes, too.

Invariants: signals are handled in the main thread only, and as before once the work is over. A child gets each
interruption once, whether it came from the terminal or was sent to the parent alone, and the parent waits for what the
child makes of it (a checkpoint, a drained engine).
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from gymdata.progress import Progress

#: For subprocess.Popen: a process group of its own, which a Ctrl-C of the terminal does not reach.
OWN_GROUP: dict[str, Any] = {"process_group": 0}
_TAIL_BYTES = 16_384


def send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a child that was started with OWN_GROUP, and to all that it started in turn."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def signal_name(number: int) -> str:
    """SIGKILL; of a real-time signal, which has no name, its number."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return str(number)


def how_ended(code: int) -> str:
    """How a child with this exit code ended, after its name: "was ended by SIGKILL", "ended with exit code 1"."""
    return f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def last_lines(log: Path, n: int = 14) -> list[str]:
    """The last ``n`` lines of a log that are not empty."""
    if not log.is_file():
        return []
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()][-n:]


@contextmanager
def handling(number: signal.Signals, handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle a signal with ``handler`` meanwhile. Outside the main thread no signal arrives, and nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def interruptions_passed_to(process: subprocess.Popen[bytes]) -> AbstractContextManager[None]:
    """Pass every SIGINT on to a child that was started with OWN_GROUP; ours is not interrupted meanwhile."""
    return handling(signal.SIGINT, lambda *_: send(process, signal.SIGINT))


def sigterm_interrupts() -> AbstractContextManager[None]:
    """SIGTERM ends as Ctrl-C does, through every ``finally``: uvicorn raises it again once it has stopped."""
    return handling(signal.SIGTERM, signal.default_int_handler)


T = TypeVar("T")
_STARTING = "stopping: what is being started is ended"
_PLAYING = "stopping: rollouts in flight are finished and sealed (again to quit at once)"


class Stop(threading.Event):
    """Set by the first Ctrl-C. ``work``: what the second drops; until there is some, each ends what is being started."""

    work: asyncio.Future[None] | None = None

    async def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Await ``work``, to its end or until it is dropped."""
        self.work = asyncio.ensure_future(work)
        try:
            await self.work
        except asyncio.CancelledError:
            if not (self.is_set() and self.work.cancelled()):
                raise


@contextmanager
def ctrl_c(progress: Progress) -> Iterator[Stop]:
    """What SIGINT and SIGTERM set within the block. Outside the main thread signals are left alone."""
    stop, loop, starting = Stop(), asyncio.get_running_loop(), asyncio.current_task()

    def on_signal() -> None:
        is_first = not stop.is_set()
        stop.set()
        if is_first:
            progress.message(_STARTING if stop.work is None else _PLAYING)
        if stop.work is not None:
            if not is_first:
                stop.work.cancel()
        elif starting is not None:
            starting.cancel()

    is_main = threading.current_thread() is threading.main_thread()
    handled = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    for number in handled:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines together; returns their results in order. The first error cancels the others and is raised itself
    (not inside a group)."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """asyncio.run, also from inside a running loop (a notebook). Raises KeyboardInterrupt when it was cancelled."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        try:
            return asyncio.run(work)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    # Not as a context, which would wait for the work after an interruption here.
    return ThreadPoolExecutor(1, "gymdata-collect").submit(lambda: asyncio.run(work)).result()
