"""Speed and memory of long commands: reading ahead in threads, rarer garbage collection, and releasing free memory."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

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


def give_back() -> None:
    """Return memory that Arrow has freed to the system; its allocator would keep it while numpy and Polars allocate
    more. For the ends of stages; takes milliseconds."""
    if (pa := sys.modules.get("pyarrow")) is not None:
        pa.default_memory_pool().release_unused()
