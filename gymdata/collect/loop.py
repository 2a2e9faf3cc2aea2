"""Bounded workers over one shared iterator of owed rollouts.

Invariants: at most ``concurrency`` rollouts exist at a time, however many are owed; a finished one goes to the
sink at once and is forgotten; after ``Stop.drain`` nothing new is started and what is in flight ends by itself; an error
that is not a rollout's own failure stops everything and is raised once the workers have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from itertools import chain

from gymdata.collect.episode import EpisodeConfig, Rollout, WorkflowRollout
from gymdata.collect.outcome import Failure
from gymdata.collect.resume import OwedGroup
from gymdata.engines.port import Generation
from gymdata.errors import OutsideError
from gymdata.signals import Stop

Sink = Callable[[Rollout], Awaitable[None]]


async def play_all(
    setting: EpisodeConfig, groups: Iterator[OwedGroup], sink: Sink, *, concurrency: int, stop: Stop
) -> None:
    """Play every owed rollout; ``sink`` gets each that ended, failed ones too.

    Raises the first error that is not one rollout's own. When the engine dies or the environment cannot be reached, every
    rollout in flight ends with a fatal failure, the sink gets them all, and then that error is raised.
    """
    work = groups if setting.sampler is not None and setting.sampler.prefers_groups else _singly(groups)
    first = next(work, None)
    if first is None:
        return
    shared = chain([first], work)
    workers = max(1, concurrency // len(first.indexes))
    died: list[Failure] = []

    async def finish(rollout: Rollout) -> None:
        if rollout.failure is not None and rollout.failure.fatal:
            died.append(rollout.failure)
            stop.drain()
        await sink(rollout)

    async def worker() -> None:
        for group in shared:
            for at in range(0, len(group.indexes), concurrency):
                if stop.draining:
                    return
                await _play_group(setting, group, group.indexes[at : at + concurrency], finish)

    await _together(worker() for _ in range(workers))
    if died:
        kind = died[0].kind
        raise OutsideError(kind, died[0].message.removeprefix(f"{kind}: "), hint=died[0].hint, fatal=True)


def _singly(groups: Iterable[OwedGroup]) -> Iterator[OwedGroup]:
    return (OwedGroup(group.task, group.group_id, (index,)) for group in groups for index in group.indexes)


async def _play_group(setting: EpisodeConfig, group: OwedGroup, indexes: tuple[int, ...], finish: Sink) -> None:
    """The members of one group. The first turn of neighbours is one request; then each goes on alone."""
    kind = Rollout if setting.workflow is None else WorkflowRollout
    rollouts = [kind(setting, group.task, index) for index in indexes]
    if len(rollouts) == 1:
        await rollouts[0].begin()
        await _go_on(rollouts[0], None, finish)
        return
    await _together(rollout.begin() for rollout in rollouts)
    await _together(_play_neighbours(run, finish) for run in _neighbours(rollouts))


async def _play_neighbours(run: list[Rollout], finish: Sink) -> None:
    firsts: list[Generation | OutsideError | None] = [None] * len(run)
    if not run[0].over:
        try:
            async with asyncio.timeout(run[0].remaining_s()) as limit:
                firsts = list(await run[0].setting.sample(run[0].request(len(run))))
        except TimeoutError:
            if not limit.expired():
                raise
            for rollout in run:
                rollout.out_of_time()
        except OutsideError as error:
            firsts = [error] * len(run)
    await _together(_go_on(rollout, first, finish) for rollout, first in zip(run, firsts, strict=True))


async def _go_on(rollout: Rollout, first: Generation | OutsideError | None, finish: Sink) -> None:
    await rollout.play(first)
    await finish(rollout)


def _neighbours(rollouts: list[Rollout]) -> list[list[Rollout]]:
    """Runs of consecutive indexes with the same prompt; those that are over already stand alone."""
    runs: list[list[Rollout]] = []
    for rollout in rollouts:
        last = runs[-1][-1] if runs else None
        joins = last is not None and not last.over and not rollout.over
        if joins and last is not None and rollout.index == last.index + 1 and rollout.prompt == last.prompt:
            runs[-1].append(rollout)
        else:
            runs.append([rollout])
    return runs


async def _together(work: Iterable[Coroutine[None, None, None]]) -> None:
    """Run coroutines together; the first error cancels the others and is raised itself (not inside a group)."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
