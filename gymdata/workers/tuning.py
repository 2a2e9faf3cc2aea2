"""Speed and memory of long commands: reading ahead in threads, rarer garbage collection, and releasing free memory."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import deque
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")
#: What an iterator without more items gives.
_END = object()


def ahead(items: Iterator[T], depth: int = 3) -> Generator[T]:
    """``items``, iterated in another thread, up to ``depth`` ahead.

    What iterating raises is raised in its place. A caller that stops waits for the item that is being made, and no more.
    """
    # Every command loads this module, and few come here.
    from concurrent.futures import ThreadPoolExecutor

    pending: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(1) as pool:
        try:
            while True:
                pending.append(pool.submit(next, items, _END))
                if len(pending) > depth:
                    item = pending.popleft().result()
                    if item is _END:
                        return
                    yield item
        finally:
            pool.shutdown(cancel_futures=True)


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
