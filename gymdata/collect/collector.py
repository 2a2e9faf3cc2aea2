"""Tasks in, rollouts on disk: the stage, given an engine, an environment and an open run.

Invariants: a rollout is journaled the moment it is scored; whatever ends the loop, what was journaled stays; a
failure is recorded with everything that was sampled in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from gymdata.collect.episode import EpisodeConfig, NextPrompt, Rollout
from gymdata.collect.loop import play_all
from gymdata.collect.outcome import Limits
from gymdata.collect.resume import AttemptTracker
from gymdata.collect.rows import failure_record, reward_fault_record, rollout_row
from gymdata.progress import Progress
from gymdata.rewards.port import RewardPart
from gymdata.rewards.scheduler import RewardScheduler, view_of
from gymdata.rollouts.messages import Task
from gymdata.signals import Stop
from gymdata.store import Run

__all__ = ["VERDICT", "Collector", "EpisodeConfig", "Limits", "NextPrompt", "Stop"]

_SAY_EVERY_S = 0.2
#: The name of the environment's own reward among the parts.
VERDICT = "environment"


@dataclass(slots=True)
class Collector:
    """Plays what is owed and writes it down; ``done`` … ``empty`` (generations without a token) count what this call did,
    ``there`` what was there before it."""

    run: Run
    setting: EpisodeConfig
    scheduler: RewardScheduler
    ledger: AttemptTracker
    owed: int
    progress: Progress | None = None
    there: int = 0
    done: int = 0
    failed: int = 0
    reward_faults: int = 0
    tokens: int = 0
    empty: int = 0
    _scored: int = 0
    _reward_sum: float = 0.0
    _said: float = field(default_factory=time.monotonic)

    async def collect(self, tasks: Iterable[Task], *, concurrency: int, stop: Stop) -> None:
        """Play every owed rollout of ``tasks``. Raises what ``play_all`` raises; rows written so far stay."""
        self._say(force=True)
        try:
            await play_all(self.setting, self.ledger.groups(tasks), self._sink, concurrency=concurrency, stop=stop)
        finally:
            self._say(force=True)

    async def _sink(self, rollout: Rollout) -> None:
        if rollout.failure is not None:
            self._fail(rollout)
        else:
            await self._keep(rollout)
        self._say()

    def _fail(self, rollout: Rollout) -> None:
        assert rollout.failure is not None
        self.failed += 1
        attempt = self.ledger.attempts(rollout.rollout_id) + 1
        if not rollout.failure.fatal:
            attempt = self.ledger.failed(rollout.rollout_id, final=rollout.failure.final)
        self.run.fail(failure_record(rollout, attempt))
        if self.progress is not None and self.failed <= 3:
            self.progress.message(
                f"{rollout.task.task_id} rollout {rollout.index}, {rollout.failure.place}: {rollout.failure.message}"
            )

    async def _keep(self, rollout: Rollout) -> None:
        assert rollout.outcome is not None
        parts, faults = [], {}
        if self.scheduler.rewards:
            scored = await self.scheduler.score(
                view_of(
                    messages=rollout.messages,
                    produced_by=rollout.produced_by,
                    task=rollout.task.row,
                    tools=rollout.tools,
                    turns=rollout.encoder.turns,
                    status=rollout.outcome.status,
                )
            )
            parts, faults = scored.parts, scored.faults
        if rollout.verdict is not None and rollout.verdict.reward is not None:
            parts = [RewardPart(VERDICT, rollout.verdict.reward), *parts]
        row = rollout_row(rollout, parts, faults)
        self.run.append(row)
        for name, message in faults.items():
            self.run.fail(reward_fault_record(rollout, name, message))
            if self.progress is not None and self.reward_faults < 3:
                self.progress.message(f"{rollout.task.task_id} rollout {rollout.index} is not scored: {message}")
        self.reward_faults += bool(faults)
        self.done += 1
        self.tokens += row["n_generated_tokens"]
        self.empty += sum(len(turn["generation_token_ids"]) == 0 for turn in rollout.encoder.turns)
        if row["reward"] is not None:
            self._scored += 1
            self._reward_sum += row["reward"]

    def _say(self, force: bool = False) -> None:
        now = time.monotonic()
        if self.progress is None or (now - self._said < _SAY_EVERY_S and not force):
            return
        self._said = now
        counts: dict[str, float] = {
            "done": self.there + self.done,
            "fresh": self.done,
            "total": self.there + self.owed,
            "tokens": self.tokens,
        }
        if self._scored:
            counts["reward"] = self._reward_sum / self._scored
        self.progress.update(**counts, failures=self.failed)
