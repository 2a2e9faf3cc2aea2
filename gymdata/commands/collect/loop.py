"""Tasks in, rollouts on disk, given an engine, an environment and an open run: bounded workers over pending rollouts.

Invariants: at most ``concurrency`` rollouts exist at a time, however many are pending; a finished one is journaled the
moment it is scored and is then forgotten; once ``stop`` is set nothing new is started and what is in flight ends by itself;
whatever ends the loop, what was journaled stays; a failure is recorded with everything that was sampled in it; an error that
is not a rollout's own failure stops everything and is raised once the workers have ended.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gymdata.commands.collect.episode import EpisodeConfig, Rollout
from gymdata.commands.collect.outcome import Failure
from gymdata.commands.collect.resume import AttemptTracker, OwedGroup
from gymdata.commands.collect.rows import failure_record, reward_fault_record, rollout_row
from gymdata.engines.port import Generation
from gymdata.environments.port import Verdict
from gymdata.errors import OutsideError
from gymdata.progress import Progress
from gymdata.rewards.port import RewardPart
from gymdata.rewards.scheduler import RewardScheduler, step_rewards
from gymdata.rewards.views import view_of
from gymdata.rollouts.messages import RolloutRow, Task
from gymdata.store import Run
from gymdata.workers.signals import together

Sink = Callable[[Rollout], Awaitable[None]]
#: Plays a rollout to its end, given its first generation (or its error) where that was sampled with its group.
Play = Callable[[Rollout, Generation | OutsideError | None], Coroutine[Any, Any, None]]


async def play_all(
    setting: EpisodeConfig, groups: Iterator[OwedGroup], sink: Sink, *, concurrency: int, stop: threading.Event
) -> None:
    """Play every pending rollout until ``stop`` is set; ``sink`` gets each that ended, failed ones too.

    Raises the first error that is not one rollout's own. When the engine dies or the environment cannot be reached, every
    rollout in flight ends with a fatal failure, the sink gets them all, and then that error is raised.
    """
    # vLLM refuses several generations of one greedy request.
    grouped = setting.sampler.prefers_groups and setting.temperature > 0
    if not grouped or setting.agents is not None:
        groups = (OwedGroup(group.task, group.group_id, (index,)) for group in groups for index in group.indexes)
    pieces = (
        (group, group.indexes[start : start + concurrency])
        for group in groups
        for start in range(0, len(group.indexes), concurrency)
    )
    slots, taking = asyncio.Semaphore(concurrency), asyncio.Lock()
    died: list[Failure] = []

    async def play(rollout: Rollout, first: Generation | OutsideError | None) -> None:
        await rollout.play(first)
        if rollout.failure is not None and rollout.failure.fatal:
            died.append(rollout.failure)
        await sink(rollout)

    async def worker() -> None:
        while True:
            # One at a time, or two could wait for each other's slots. A resumed group has fewer members than the next.
            async with taking:
                piece = None if stop.is_set() or died else next(pieces, None)
                if piece is None:
                    return
                group, indexes = piece
                for _ in indexes:
                    await slots.acquire()
            if not (stop.is_set() or died):
                await _play_group(setting, group, indexes, play)
            for _ in indexes:
                slots.release()

    await together(worker() for _ in range(concurrency))
    if died:
        kind = died[0].kind
        raise OutsideError(kind, died[0].message.removeprefix(f"{kind}: "), hint=died[0].hint, fatal=True)


async def _play_group(setting: EpisodeConfig, group: OwedGroup, indexes: tuple[int, ...], play: Play) -> None:
    """The members of one group. The first turn of neighbours is one request; then each continues alone."""
    make = Rollout if setting.agents is None else setting.agents.rollout
    rollouts = [make(setting, group.task, index) for index in indexes]
    if len(rollouts) == 1:
        await rollouts[0].begin()
        await play(rollouts[0], None)
        return
    await together(rollout.begin() for rollout in rollouts)
    # Consecutive indexes with the same prompt; those that have ended already are runs of their own.
    runs: list[list[Rollout]] = []
    for rollout in rollouts:
        last = runs[-1][-1] if runs else None
        joins = last is not None and not last.over and not rollout.over
        if joins and last is not None and rollout.index == last.index + 1 and rollout.prompt == last.prompt:
            runs[-1].append(rollout)
        else:
            runs.append([rollout])
    await together(_play_neighbours(run, play) for run in runs)


async def _play_neighbours(run: list[Rollout], play: Play) -> None:
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
    await together(play(rollout, first) for rollout, first in zip(run, firsts, strict=True))


_SAY_EVERY_S = 0.2
#: The name of the environment's own reward among the parts.
VERDICT = "environment"
#: The name of the sum of the turns' rewards, where a run has no other reward.
STEPS = "steps"


@dataclass(slots=True)
class Collector:
    """Plays the pending rollouts and journals them; ``done`` … ``empty`` (generations without a token) count what this call
    did: ``failed`` attempts, ``given_up`` rollouts that have no attempt left; ``n_existing`` what was there before it."""

    run: Run
    setting: EpisodeConfig
    scheduler: RewardScheduler
    ledger: AttemptTracker
    pending: int
    progress: Progress
    n_existing: int = 0
    done: int = 0
    failed: int = 0
    given_up: int = 0
    reward_faults: int = 0
    tokens: int = 0
    empty: int = 0
    _scored: int = 0
    _reward_sum: float = 0.0
    _last_reported: float = 0.0

    async def collect(self, tasks: Iterable[Task], *, concurrency: int, stop: threading.Event) -> None:
        """Play every pending rollout of ``tasks``. Raises what ``play_all`` raises; rows written so far stay."""
        self._say(force=True)
        try:
            await play_all(self.setting, self.ledger.groups(tasks), self._sink, concurrency=concurrency, stop=stop)
        finally:
            self._say(force=True)

    async def _sink(self, rollout: Rollout) -> None:
        if rollout.failure is not None:
            self._fail(rollout)
            if self.setting.agents is not None:
                await self.setting.agents.discard(rollout)
        elif self.setting.agents is not None:
            row, faults = await self.setting.agents.finish(rollout)
            self._count(rollout, row, faults)
        else:
            await self._keep(rollout)
        self._say()

    def _fail(self, rollout: Rollout) -> None:
        assert rollout.failure is not None
        if rollout.failure.fatal:
            # An outage ends all rollouts in flight and costs none of them an attempt; the loop raises its error once.
            self.run.fail(failure_record(rollout, self.ledger.attempts(rollout.rollout_id) + 1))
            return
        attempt = self.ledger.failed(rollout.rollout_id, final=rollout.failure.final)
        self.run.fail(failure_record(rollout, attempt))
        self.failed += 1
        self.given_up += attempt >= self.ledger.max_attempts
        if self.failed <= 3:
            self.progress.message(
                f"{rollout.task.task_id} rollout {rollout.index}, {rollout.failure.phase}: {rollout.failure.message}"
            )

    async def _keep(self, rollout: Rollout) -> None:
        assert rollout.outcome is not None
        parts, faults, turns = [], {}, rollout.encoder.turns
        if self.scheduler.rewards:
            scored = await self.scheduler.score(
                view_of(
                    messages=rollout.messages,
                    produced_by=rollout.produced_by,
                    task=rollout.task.row,
                    tools=rollout.tools,
                    turns=turns,
                    status=rollout.outcome.status,
                    environment=rollout.verdict.extra if rollout.verdict is not None else None,
                )
            )
            parts, faults = scored.parts, scored.faults
            if turns and not faults:
                for turn, step in zip(turns, step_rewards(parts, len(turns)), strict=True):
                    if step is not None:  # in addition to the environment's reward
                        turn["reward"] = (turn.get("reward") or 0.0) + step
        if rollout.verdict is not None and rollout.verdict.reward is not None:
            parts = [RewardPart(VERDICT, rollout.verdict.reward), *parts]
        verdict = rollout.verdict or Verdict(None)
        judged = verdict.reward is not None or bool(verdict.masked)
        if not self.scheduler.rewards and not judged and (steps := rollout.reward_of_steps) is not None:
            parts = [RewardPart(STEPS, steps)]
        row = rollout_row(rollout, parts, faults)
        self.run.append(row)
        for name, message in faults.items():
            self.run.fail(reward_fault_record(rollout, name, message))
        self._count(rollout, row, faults)

    def _count(self, rollout: Rollout, row: RolloutRow, faults: Mapping[str, str]) -> None:
        for message in faults.values() if self.reward_faults < 3 else ():
            self.progress.message(f"{rollout.task.task_id} rollout {rollout.index} is not scored: {message}")
        self.reward_faults += bool(faults)
        self.done += 1
        self.tokens += row["n_generated_tokens"]
        self.empty += sum(len(turn["generation_token_ids"]) == 0 for turn in row["turns"])
        if row["reward"] is not None:
            self._scored += 1
            self._reward_sum += row["reward"]

    def _say(self, force: bool = False) -> None:
        now = time.monotonic()
        if now - self._last_reported < _SAY_EVERY_S and not force:
            return
        self._last_reported = now
        counts: dict[str, float] = {
            "done": self.n_existing + self.done,
            "total": self.n_existing + self.pending,
            "tokens": self.tokens,
        }
        if self._scored:
            counts["reward"] = self._reward_sum / self._scored
        self.progress.update(**counts, attempts=self.failed, given_up=self.given_up)
