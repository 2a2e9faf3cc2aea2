"""``--workers``: the same work on several files in processes of their own, with the results in the order of the files.

What comes out is what one process would give, warnings and errors included, in the same places; results of a few files
are in memory at a time. Workers write no files: the one process that started them does.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeVar

from gymdata.errors import GymdataError, OutsideError, UsageError, option, reported
from gymdata.store import reading
from gymdata.workers import end_after

T = TypeVar("T")
R = TypeVar("R")


def in_order(
    work: Callable[[T], Iterable[R]],
    jobs: Iterable[T],
    workers: int,
    named: Callable[[T], str],
    *,
    light: bool = False,
) -> Generator[R]:
    """The results of ``work`` of each job, in the order of ``jobs``, with up to ``workers`` processes at it.

    ``work``, jobs and results are sent by pickle. One worker, or a single job, is this process itself, where results are
    not collected. What ``work`` raises is raised in its place, and what it reports of data is reported here. ``named``:
    the name of a job, for the OutsideError when a worker was killed. ``light``: the work needs no library with threads of
    its own, so that where none is loaded workers are forked, which takes no time. A caller that stops ends the workers at
    once.
    """
    if workers < 1:
        raise UsageError.bad_value("workers", workers, "at least 1")
    source = iter(jobs)
    first = list(islice(source, 2))
    if workers == 1 or len(first) < 2:
        for job in chain(first, source):
            yield from work(job)
        return
    pending: deque[tuple[str, Future[_Answer]]] = deque()
    fork = light and sys.platform == "linux" and threading.active_count() == 1 and _THREADED.isdisjoint(sys.modules)
    pool = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("fork" if fork else "spawn"),
        _begin,
        (work, reading.current().allow_changed),
    )
    try:
        for job in chain(first, source):
            with _without_main():
                pending.append((named(job), pool.submit(_answer, job)))
            # One more than there are workers is ready to begin.
            if len(pending) > workers + 1:
                yield from _results(pending)
        while pending:
            yield from _results(pending)
    finally:
        # Not all children: another thread may have begun some. Python 3.14 has a public way.
        workers_left = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        # They hold nothing that could be lost.
        for process in workers_left:
            process.kill()
            process.join()


#: Modules that start threads of their own: forking beside them is not safe.
_THREADED = frozenset({"pyarrow", "polars", "torch", "duckdb", "ray"})


@contextmanager
def _without_main() -> Iterator[None]:
    """Processes that start now do not run the program's main file again, which need not be written for it."""
    names = vars(sys.modules["__main__"])
    before: dict[str, Any] = {name: names.pop(name) for name in ("__file__", "__spec__") if name in names}
    names["__spec__"] = None
    try:
        yield
    finally:
        names.update(before)


@dataclass(frozen=True, slots=True)
class _Answer:
    """A worker's answer for a job: its results, or a GymdataError as ``to_dict`` returns it; and what it reported, True for
    damage."""

    results: list[Any]
    error: dict[str, Any] | None
    lines: list[tuple[bool, str]]


def _results(pending: deque[tuple[str, Future[_Answer]]]) -> list[Any]:
    """The results of the first pending job."""
    try:
        answer = pending[0][1].result()
    except BrokenProcessPool as error:
        names = ", ".join(name for name, future in pending if not future.done() or future.exception() is not None)
        raise OutsideError(
            "worker",
            f"a process was killed while it worked on one of {names} (the system ends processes when memory runs out)",
            hint=f"give fewer {option('workers')}",
        ) from error
    pending.popleft()
    for damage, line in answer.lines:
        (reading.report_damage if damage else reading.warn)(line)
    if answer.error is not None:
        raise reported(answer.error)
    return answer.results


_work: Callable[[Any], Iterable[Any]]
_allow_changed = False


def _begin(work: Callable[[Any], Iterable[Any]], allow_changed: bool) -> None:
    """Prepare a worker."""
    global _work, _allow_changed
    _work, _allow_changed = work, allow_changed
    # The parent ends its workers; a signal to the whole group is meant for the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What libraries print is no data.
    os.dup2(2, 1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    end_after(parent.join)


def _answer(job: Any) -> _Answer:
    lines: list[tuple[bool, str]] = []
    with reading.reading(_allow_changed, lambda line: lines.append((line in reports.damage, line))) as reports:
        try:
            return _Answer(list(_work(job)), None, lines)
        except GymdataError as error:
            return _Answer([], error.to_dict(), lines)
