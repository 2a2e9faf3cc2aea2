"""Work on many pieces in several processes, with the results in the order of the pieces.

Invariants: what comes out is what one process would give, warnings and errors included, in the same places; only a few
pieces are in progress or waiting at a time; a worker that is killed is an error that names its piece, never a piece
left out; no worker outlives the process that started it, however that ends, and none sees a Ctrl-C of the terminal.
Workers write no files: the one process that started them does.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

from gymdata.errors import GymdataError, OutsideError, UsageError, reported
from gymdata.store import reading

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

T = TypeVar("T")
R = TypeVar("R")

#: The program of a worker; its arguments are the number of its connection and the import path.
_START = "import sys; sys.path[:] = sys.argv[2:]; from gymdata.workers.processes import serve; serve()"


def in_order(work: Callable[[T], R], pieces: Iterable[T], workers: int, named: Callable[[T], str]) -> Generator[R]:
    """``work`` of each piece, in the order of ``pieces``, with up to ``workers`` processes at it.

    ``work``, the pieces and the results are sent by pickle: ``work`` is a function of a module, or an object with
    ``__call__`` that each worker gets once and keeps. One worker, or a single piece, is this process itself. What
    ``work`` raises is raised in its place, and what it reports of data is reported here. ``named``: the name of a
    piece, for the OutsideError when its worker was killed. A caller that stops ends the workers at once.
    """
    if workers < 1:
        raise UsageError.bad_value("workers", workers, "at least 1")
    source = iter(pieces)
    first = list(islice(source, 2))
    if workers == 1 or len(first) < 2:
        yield from map(work, chain(first, source))
        return
    pending: deque[Future[_Answer]] = deque()
    with ThreadPoolExecutor(workers, "gymdata-worker") as threads:
        processes = _Processes(pickle.dumps(_Terms(reading.current().allow_changed, work)))
        try:
            for piece in chain(first, source):
                pending.append(threads.submit(processes.answer, piece, named))
                # One more than there are workers is ready to begin, and one result may wait.
                if len(pending) > workers + 1:
                    yield pending.popleft().result().given()
            while pending:
                yield pending.popleft().result().given()
        finally:
            for future in pending:
                future.cancel()
            processes.end()


@dataclass(frozen=True, slots=True)
class _Terms:
    """The first message to a worker."""

    allow_changed: bool
    work: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Answer:
    """A worker's answer for a piece: its result or error, and the reports of damage and warnings."""

    result: Any
    #: A GymdataError as ``to_dict`` returns it.
    error: BaseException | dict[str, Any] | None
    lines: list[tuple[bool, str]]

    def given(self) -> Any:
        for damage, line in self.lines:
            (reading.report_damage if damage else reading.warn)(line)
        if self.error is not None:
            raise reported(self.error) if isinstance(self.error, dict) else self.error
        return self.result


class _Processes:
    """Worker processes, started as they are needed: each thread that comes takes one that is idle, or a new one."""

    def __init__(self, terms: bytes) -> None:
        self._terms = terms
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._all: list[_Process] = []
        self._guard = threading.Lock()
        self._ended = False

    def answer(self, piece: T, named: Callable[[T], str]) -> _Answer:
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = self._started()
        try:
            process.connection.send(piece)
            answer: _Answer = pickle.loads(process.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise _killed(process.popen.wait(), named(piece)) from error
        self._idle.put(process)
        return answer

    def _started(self) -> _Process:
        # With the lock, so that none is started once ``end`` has seen all of them.
        with self._guard:
            if self._ended:
                raise EOFError("the workers were ended")
            process = _Process.start()
            self._all.append(process)
        with contextlib.suppress(OSError):  # dead at once: its first piece says so
            process.connection.send_bytes(self._terms)
        return process

    def end(self) -> None:
        """End the workers at once; they hold nothing that could be lost."""
        with self._guard:
            self._ended = True
        for process in self._all:
            process.popen.kill()
        for process in self._all:
            process.popen.wait()


@dataclass(frozen=True, slots=True)
class _Process:
    popen: subprocess.Popen[bytes]
    connection: Connection

    @classmethod
    def start(cls) -> _Process:
        """A Python of its own: a fork would copy the locks of this process's threads as they are."""
        from multiprocessing.connection import Pipe

        from gymdata.signals import OWN_GROUP

        ours, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            # Output of libraries must not get into the messages.
            popen = subprocess.Popen(
                [sys.executable, "-c", _START, str(number), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(number,),
                **OWN_GROUP,
            )
        return cls(popen, ours)


def _killed(code: int, piece: str) -> OutsideError:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    why = "the system ends processes when memory runs out" if code == -signal.SIGKILL else "what it printed is above"
    return OutsideError("worker", f"the process that worked on {piece} {how} ({why})", hint="give fewer --workers")


def serve() -> None:
    """Work on pieces until there are no more: what ``_START`` runs in a process of its own."""
    from multiprocessing.connection import Connection

    # The parent ends its workers; a signal to the whole group is meant for the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    terms: _Terms | BaseException
    try:
        terms = pickle.loads(connection.recv_bytes())
        assert isinstance(terms, _Terms)
    except (EOFError, OSError):
        return
    except Exception as error:  # noqa: BLE001 - any error is the answer to the first piece
        terms = error
    for piece in _received(connection):
        answer = _answer(terms, piece)
        try:
            data = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001 - a result that cannot be sent is a defect, which the parent reports
            data = pickle.dumps(_Answer(None, RuntimeError(f"{type(error).__name__}: {error}"), answer.lines))
        with contextlib.suppress(BrokenPipeError):
            connection.send_bytes(data)


def _received(connection: Connection) -> Iterator[Any]:
    """The pieces. A thread waits for them, so that the process ends with its parent and not after its piece."""
    pieces: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                pieces.put(connection.recv_bytes())
        os._exit(1)

    threading.Thread(target=receive, daemon=True).start()
    while True:
        yield pickle.loads(pieces.get())


def _answer(terms: _Terms | BaseException, piece: Any) -> _Answer:
    lines: list[tuple[bool, str]] = []
    if not isinstance(terms, _Terms):
        return _Answer(None, terms, lines)
    with reading.reading(terms.allow_changed, lambda line: lines.append((line in found.damage, line))) as found:
        try:
            return _Answer(terms.work(piece), None, lines)
        except Exception as error:  # noqa: BLE001 - raised again where the result is wanted
            return _Answer(None, _portable(error), lines)


def _portable(error: Exception) -> Exception | dict[str, Any]:
    """``error``, or an equivalent that can be sent; a defect with its traceback."""
    if isinstance(error, GymdataError):
        return error.to_dict()
    import traceback

    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - of whatever kind, it cannot be sent
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
