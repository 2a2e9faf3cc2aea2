"""The loop that plays schedules: virtual time, drawn order, and what it finds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.seeded_loop import DeadlockError, KilledError, SeededLoop, few_objects, seeded


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with few_objects():
        yield


def steps_of(seed: int) -> list[tuple[str, float]]:
    """Three tasks of three steps, and when each step was made."""
    made = []

    async def work(name: str, loop: SeededLoop) -> None:
        for step in range(3):
            await loop.pause(1.0)
            made.append((f"{name}{step}", round(await asyncio.to_thread(time.monotonic), 6)))

    async def main(loop: SeededLoop) -> None:
        await asyncio.gather(*(work(name, loop) for name in "abc"))

    with seeded(seed) as loop:
        loop.play(main(loop))
    return made


def test_a_seed_is_one_schedule() -> None:
    """The same again, and others with other seeds; in each a task's own steps are in order."""
    schedules = [steps_of(seed) for seed in range(20)]
    assert schedules == [steps_of(seed) for seed in range(20)]
    orders = {tuple(name for name, _ in schedule) for schedule in schedules}
    assert len(orders) > 15
    assert all([name for name in order if name[0] == "b"] == ["b0", "b1", "b2"] for order in orders)


def test_time_jumps_to_the_next_timer() -> None:
    """An hour takes none; both clocks agree, and are the real ones again afterwards."""
    before = time.time()

    async def main() -> list[float]:
        began = time.monotonic(), time.time()
        await asyncio.sleep(3600)
        return [time.monotonic() - began[0], time.time() - began[1]]

    with seeded(0) as loop:
        assert loop.play(main()) == pytest.approx([3600, 3600], abs=1.0)
    assert 0 <= time.time() - before < 600


def test_a_time_limit_ends_what_waits() -> None:
    async def main() -> None:
        async with asyncio.timeout(5):
            await asyncio.Event().wait()

    with seeded(1) as loop, pytest.raises(TimeoutError):
        loop.play(main())


async def forgotten() -> None:
    await asyncio.Event().wait()


def test_who_waits_for_ever_is_named() -> None:
    """With the line that it waits at."""

    async def main() -> None:
        await asyncio.gather(forgotten(), asyncio.sleep(1))

    with pytest.raises(DeadlockError, match=r"forgotten at test_seeded_loop.py:\d+"), seeded(1) as loop:
        loop.play(main())


def test_a_task_that_is_left_is_named() -> None:
    kept: list[Any] = []

    async def main() -> None:
        kept.append(asyncio.create_task(forgotten()))
        await asyncio.sleep(1)

    with pytest.raises(AssertionError, match="tasks are left: forgotten"), seeded(1) as loop:
        loop.play(main())


def test_an_exception_that_nobody_looks_at_is_named() -> None:
    async def fail() -> None:
        raise ValueError("bang")

    async def main() -> None:
        task = asyncio.create_task(fail())
        await asyncio.sleep(1)
        assert task.done()

    with pytest.raises(AssertionError, match=r"nobody looked at: .*bang"), seeded(1) as loop:
        loop.play(main())


def test_a_call_elsewhere_outlives_who_waits_for_it() -> None:
    """As a thread does, or it never began; then its answer is nobody's."""
    ran = []

    async def main() -> None:
        call = asyncio.ensure_future(asyncio.to_thread(ran.append, 1))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.sleep(100)

    for seed in range(20):
        with seeded(seed) as loop:
            loop.play(main())
    assert 0 < len(ran) < 20


def test_a_process_is_killed_between_two_steps() -> None:
    """Nothing that comes after runs; what waits is dropped."""
    done = []

    async def main() -> None:
        for step in range(100):
            await asyncio.sleep(1)
            done.append(step)

    with seeded(1) as loop:
        loop.kill_at = 41
        with pytest.raises(KilledError):
            loop.play(main())
        assert 0 < len(done) < 41
        loop.drop()
