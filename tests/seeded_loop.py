"""An event loop that plays one schedule for each seed: time is virtual, and what could run next is drawn.

``with seeded(7) as loop: loop.play(work(loop))`` plays schedule 7. Nothing waits: where nothing is ready, time jumps to the
next timer, now and then late. Of several tasks that are ready a drawn one makes its next step; the callbacks between them (a
future that wakes who waits for it) run first and in asyncio's order, for code may rely on that. Every fourth seed runs the
tasks in asyncio's order, too, so that only what is drawn outside of the loop differs. What runs in a thread elsewhere
(``asyncio.to_thread``, an executor) runs here at a drawn time, and is answered at a later one. ``time.monotonic`` and
``time.time`` are virtual within the block.

Invariants: a seed is the same schedule each time; a schedule in which nothing can happen any more is a ``DeadlockError``
that names who waits and where; whoever leaves a task behind, or an exception that nobody looked at, has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import itertools
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
#: When virtual time begins, in seconds since 1970.
EPOCH = 1_700_000_000.0
#: How late a busy loop may be for a timer, in seconds.
LATE_S = 1.0
#: Steps after which a schedule that does not end is one that never does.
MOST_STEPS = 200_000
#: Callbacks in a row, of which some (anyio's) set themselves again until a task has made its step.
MOST_BETWEEN = 20


class DeadlockError(AssertionError):
    """Nothing is ready, no timer is set, and the work is not done."""


class KilledError(BaseException):
    """The process was killed here: nothing of it runs any more."""


class _Future(asyncio.Future):
    """Sets of futures are walked in the order in which they were made, and not by where they lie in memory."""

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.number = number

    def __hash__(self) -> int:
        return self.number


class _Task(asyncio.Task):
    def __init__(self, number: int, coroutine: Any, loop: asyncio.AbstractEventLoop, **more: Any) -> None:
        self.number = number
        super().__init__(coroutine, loop=loop, **more)

    def __hash__(self) -> int:
        return self.number


class SeededLoop(asyncio.BaseEventLoop):
    """``rng`` is for everything that a schedule draws. ``kill_at``: the step at which the process is killed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.in_order = seed % 4 == 0
        self.steps = 0
        self.kill_at: int | None = None
        #: Whether a process ended; what it had not begun is then never awaited.
        self.dropped = False
        #: Of exceptions that nobody looked at.
        self.unseen: list[str] = []
        self._now = 0.0
        self._between = 0
        self._numbers = itertools.count()
        self.set_exception_handler(lambda _, context: self.unseen.append(_in_words(context)))
        self.set_task_factory(lambda loop, coroutine, **more: _Task(next(self._numbers), coroutine, loop, **more))

    # --- what callers use -------------------------------------------------------------------------------------------

    def play(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to its end. Raises DeadlockError, KilledError, and what it raises."""
        task = self.create_task(work)
        self.run_until(task.done)
        return task.result()

    def run_until(self, reached: Callable[[], bool]) -> None:
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(self._asyncgen_firstiter_hook, self._asyncgen_finalizer_hook)
        asyncio._set_running_loop(self)
        self._thread_id = threading.get_ident()
        try:
            while not reached():
                self._run_once()
        finally:
            self._thread_id = None
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def drop(self) -> float:
        """The process ends: every task is cancelled, as by ``asyncio.run``, and runs to its end; calls elsewhere never do.
        Returns the seconds that the tasks took."""
        self.kill_at, self.dropped = None, True
        began, tasks = self._now, sorted(asyncio.all_tasks(self), key=hash)
        for task in tasks:
            task.cancel()
        if tasks:
            self.run_until(lambda: all(task.done() for task in tasks))
        self._scheduled.clear()
        return self._now - began

    def settle(self) -> None:
        """Run whatever can still run, without waiting for anybody."""
        self.kill_at = None
        self.run_until(lambda: not self._ready)

    def waiting(self) -> list[str]:
        """Who waits, and where."""
        return [_place(task) for task in sorted(asyncio.all_tasks(self), key=hash)]

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    async def pause(self, mean_s: float) -> None:
        """Something outside takes its time: none at all one time in four."""
        await asyncio.sleep(0 if self.chance(0.25) else self.rng.expovariate(1 / mean_s))

    # --- the loop ---------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(next(self._numbers), self)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """A call that waits in a queue can be cancelled; one that runs ends, whoever waits for it."""
        answer: asyncio.Future[T] = self.create_future()

        def run() -> None:
            if answer.cancelled() and self.chance(0.5):
                return
            try:
                settled: tuple[Callable[..., None], Any] = answer.set_result, func(*args)
            except Exception as error:  # noqa: BLE001 - handed to who waits
                settled = answer.set_exception, error
            self.call_later(self.rng.expovariate(1.0), tell, *settled)

        def tell(how: Callable[..., None], value: Any) -> None:
            if not answer.done():
                how(value)

        self.call_later(self.rng.expovariate(4.0), run)
        return answer

    def _write_to_self(self) -> None:
        """Nobody sleeps who would have to be woken."""

    def _run_once(self) -> None:
        self.steps += 1
        if self.steps == self.kill_at:
            raise KilledError
        if self.steps > MOST_STEPS:
            raise DeadlockError(f"no end after {MOST_STEPS:,} steps; there are {'; '.join(self.waiting())}")
        if not self._ready:
            self._jump()
        handle = self._next()
        if not handle._cancelled:
            handle._run()

    def _jump(self) -> None:
        """To the next timer, and where the loop was busy also past some more."""
        timers = self._scheduled
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
        if not timers:
            raise DeadlockError(f"nothing can happen any more; waiting: {'; '.join(self.waiting()) or 'nobody'}")
        late = self.rng.uniform(0.0, LATE_S) if self.chance(0.1) else 0.0
        self._now = max(self._now, timers[0]._when) + late
        while timers and timers[0]._when <= self._now:
            handle = heapq.heappop(timers)
            handle._scheduled = False
            self._ready.append(handle)

    def _next(self) -> asyncio.Handle:
        ready = self._ready
        if len(ready) == 1 or self.in_order:
            return ready.popleft()
        between = (k for k, h in enumerate(ready) if not isinstance(getattr(h._callback, "__self__", None), _Task))
        place = next(between, None) if self._between < MOST_BETWEEN else None
        self._between = 0 if place is None else self._between + 1
        place = int(self.rng.random() * len(ready)) if place is None else place
        chosen = ready[place]
        del ready[place]
        return chosen


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[SeededLoop]:
    """The loop of a schedule. At the end of the block no task may be left, and no exception that nobody looked at."""
    loop = SeededLoop(seed)
    clocks, hook, drawn = (time.monotonic, time.time), sys.unraisablehook, random.getstate()
    time.monotonic, time.time = loop.time, lambda: EPOCH + loop.time()
    sys.unraisablehook = lambda fault: loop.unseen.append(f"{fault.err_msg or 'in __del__'}: {fault.exc_value!r}")
    random.seed(seed)
    ok = False
    warned = warnings.catch_warnings(record=True)
    try:
        seen = warned.__enter__()
        warnings.simplefilter("always", RuntimeWarning)
        yield loop
        loop.settle()
        assert loop.waiting() == [], f"tasks are left: {'; '.join(loop.waiting())}"
        ok = True
    finally:
        if not ok:
            with contextlib.suppress(DeadlockError):
                loop.drop()
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False
        loop.close()
        gc.collect()
        warned.__exit__()
        never = [str(warning.message) for warning in seen if issubclass(warning.category, RuntimeWarning)]
        loop.unseen += [] if loop.dropped else never
        time.monotonic, time.time = clocks
        sys.unraisablehook = hook
        random.setstate(drawn)
    assert loop.unseen == [], f"nobody looked at: {'; '.join(loop.unseen)}"


def play_all(seeds: Sequence[int], play: Callable[[int], Any]) -> None:
    """Play a schedule for each seed. The first that fails is named; ``SCHEDULE=N pytest …`` plays it alone."""
    chosen = os.environ.get("SCHEDULE")
    with few_objects():
        for seed in seeds if chosen is None else [int(chosen)]:
            try:
                play(seed)
            except (Exception, KilledError) as error:
                error.add_note(f"in schedule {seed}; SCHEDULE={seed} before the same command plays it alone")
                raise
            gc.freeze()  # the first one imports what is imported late


def found(seeds: Sequence[int], play: Callable[[int], Any]) -> str:
    """What the first of these schedules to fail says; for faults that a test plants."""
    with few_objects():
        for seed in seeds:
            try:
                play(seed)
            except (Exception, KilledError) as error:  # noqa: BLE001 - a planted fault may end in any way
                return f"{type(error).__name__}: {error}"
    raise AssertionError(f"none of {len(seeds)} schedules found the fault")


@contextlib.contextmanager
def few_objects() -> Iterator[None]:
    """Within the block the collector, which looks for exceptions at the end of each schedule, passes over what was there."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _in_words(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return f"{context['message']}{f': {error!r}' if error is not None else ''}"


def _place(task: asyncio.Task[Any]) -> str:
    """``worker at loop.py:78``: the innermost line of ours that a task waits at."""
    coroutine = task.get_coro()
    name, where = getattr(coroutine, "__qualname__", repr(coroutine)), ""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is not None and "asyncio" not in Path(frame.f_code.co_filename).parts:
            where = f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return f"{name}{where}"
