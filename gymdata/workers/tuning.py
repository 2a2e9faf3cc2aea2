"""Speed and memory of long commands: reading ahead in threads, rarer garbage collection, and releasing free memory."""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")


def in_order(jobs: Iterable[Callable[[], Sequence[T]]], workers: int, depth: int) -> Generator[T]:
    """The items of each job, in order, with up to ``depth`` + 1 jobs in progress in ``workers`` threads.

    Ends at the first job without items, so that ``jobs`` may be endless; what a job raises is raised in its place. A caller
    that stops waits for the jobs that run, and no more.
    """
    # Every command loads this module, and few come here.
    from concurrent.futures import ThreadPoolExecutor

    pending: deque[Future[Sequence[T]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for job in jobs:
                pending.append(pool.submit(job))
                if len(pending) > depth:
                    items = pending.popleft().result()
                    if not items:
                        return
                    yield from items
            while pending:
                yield from pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def ahead(items: Iterator[T], depth: int = 3) -> Generator[T]:
    """``items``, iterated in another thread, up to ``depth`` ahead."""
    return in_order(itertools.repeat(lambda: list(itertools.islice(items, 1))), 1, depth)


#: Net allocations before a collection of the youngest generation, and collections of it before one of the next.
_THRESHOLDS = (100_000, 20, 100)


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Fewer garbage collections within the block. Requests in flight and rows that are read are many short-lived
    objects without cycles: with Python's default, a collection every 700 objects, collecting spends a fifth of its time
    on them, while the engine waits, and an import a tenth."""
    before = gc.get_threshold()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
#: Whether this process is a command's own. The number of frozen objects would tell, too, but counting them takes 2 ms.
_of_one_command = False
#: Whether the command runs none of the user's code.
_all_ours = False


def keep_imports() -> None:
    """In the process of one command, what was imported so far lives until its end: it is not searched for cycles."""
    global _of_one_command
    _of_one_command = True
    gc.freeze()


@contextlib.contextmanager
def imported_for_good() -> Iterator[None]:
    """For the imports of a command that runs no code of the user's: they are kept as well, and numpy starts no threads,
    which would spin beside the command, and beside which it should not fork. No effect in a process that called no
    ``keep_imports``.
    """
    global _all_ours
    if not _of_one_command:
        yield
        return
    _all_ours = True
    before = os.environ.get(_BLAS_THREADS)
    os.environ.setdefault(_BLAS_THREADS, "1")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_BLAS_THREADS]
        gc.freeze()


def end(code: int) -> NoReturn:
    """End this process with an exit code. What ``imported_for_good`` loaded is not taken apart, object by object, which
    takes 20 ms: nothing in it waits for its end but functions of ``atexit``."""
    if _all_ours and threading.active_count() == 1:
        atexit._run_exitfuncs()
        # What cannot be written is reported by Python's own end.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    sys.exit(code)


def give_back() -> None:
    """Return memory that Arrow has freed to the system; its allocator would keep it while numpy and Polars allocate
    more. For the ends of stages; takes milliseconds."""
    if (pa := sys.modules.get("pyarrow")) is not None:
        pa.default_memory_pool().release_unused()
