"""``check --reward``: a reward tried on saved rollouts, before it decides what is trained. Nothing is written.

Invariants: every rollout is scored by itself, so that its time is its own; a reward that fails on a rollout is shown with
file and line, and never as a value; a reward server that was never reached ends the check.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gymdata.errors import DataError, UsageError
from gymdata.progress import NullProgress, Progress
from gymdata.public import Report, Row, path_of
from gymdata.rewards import Rewards, given_rewards, load_rewards
from gymdata.rewards.scheduler import (
    PartTally,
    RewardScheduler,
    Scored,
    Weighted,
    saved_view,
    tallies,
    total,
    unreadable,
)
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import files_of, scan_batches
from gymdata.user_code import in_thread

#: Rollouts that are tried unless a limit is given.
TRIED = 20
_COLUMNS = ["rollout_id", "task_id", "rollout_index", "status", "messages", "tools", "task", "extra", "turns"]


@dataclass(frozen=True, slots=True)
class TriedRollout:
    """What the rewards gave one rollout. ``reward``: the weighted sum; None where a function failed or none applies.

    ``parts``: value by name; ``turns``: one number per turn by name, for functions that score turns; ``faults``: why
    a function failed, by name, with file and line.
    """

    rollout_id: str
    task_id: str
    rollout_index: int
    reward: float | None
    parts: dict[str, float | None]
    turns: dict[str, list[float | None]]
    faults: dict[str, str]
    seconds: float


@dataclass(frozen=True, slots=True, repr=False)
class RewardCheck(Report):
    """A reward on saved rollouts. ``mean``, ``lowest``, ``highest``: of the rollouts with a reward. Times are seconds per
    rollout."""

    path: str
    tried: int
    scored: int
    failed: int
    mean: float | None
    lowest: float | None
    highest: float | None
    seconds_mean: float
    seconds_max: float
    parts: dict[str, PartTally]
    rollouts: list[TriedRollout]

    @property
    def ok(self) -> bool:
        return not self.failed and self.scored > 0

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}

    def rows(self) -> list[Row]:
        values = "–" if self.mean is None else f"{self.mean:.4g}, from {self.lowest:.4g} to {self.highest:.4g}"
        flat = self.scored > 1 and self.lowest == self.highest
        return [
            ("rollouts", self.tried),
            ("scored", self.scored if self.scored or self.failed else "0: the reward applies to none of them"),
            ("failed", self.failed),
            *(line for part in self.parts.values() for line in part.lines()),
            ("reward, mean", values + (": all are equal, nothing to learn from" if flat else "")),
            ("time per rollout", f"{seconds(self.seconds_mean)}, at most {seconds(self.seconds_max)}"),
        ]


def check_reward(
    data: str | Path, reward: Rewards, *, limit: int = TRIED, timeout: float = 300.0, progress: Progress | None = None
) -> RewardCheck:
    """Score the first ``limit`` rollouts of ``data`` (run folder, file or glob) with ``reward``; nothing is written.

    ``reward``: as ``gymdata.score`` takes it. ``timeout``: seconds per rollout. Raises UsageError for an unknown reward,
    DataError for a path that is not there or has no rollouts, OutsideError for a reward server that was never reached.
    """
    path = str(path_of(data, "check_reward"))
    specs, functions = given_rewards(reward)
    if not specs:
        raise UsageError("no reward given", hint="gymdata check --reward SPEC --data RUN")
    if limit < 1:
        raise UsageError.bad_value("limit", limit, "1 or more")
    files_of(path)  # a missing path is reported at once
    rewards = [Weighted(function, weight) for function, weight in load_rewards(specs, None, functions)]
    parts = tallies(rewards)
    tried = asyncio.run(_try_all(path, rewards, parts, limit, timeout, progress or NullProgress()))
    if not tried:
        raise DataError.empty(path, "rollouts to score")
    values = [one.reward for one in tried if one.reward is not None]
    times = [one.seconds for one in tried]
    return RewardCheck(
        path=path,
        tried=len(tried),
        scored=len(values),
        failed=sum(bool(one.faults) for one in tried),
        mean=float(np.mean(values)) if values else None,
        lowest=min(values, default=None),
        highest=max(values, default=None),
        seconds_mean=float(np.mean(times)),
        seconds_max=max(times),
        parts=parts,
        rollouts=tried,
    )


async def _try_all(
    path: str,
    rewards: list[Weighted],
    parts: dict[str, PartTally],
    limit: int,
    timeout: float,
    progress: Progress,
) -> list[TriedRollout]:
    queue, tried = RewardScheduler(rewards, in_thread, timeout), list[TriedRollout]()
    batches = scan_batches(path, ROLLOUTS, _COLUMNS, batch_size=min(limit, 64))
    for row in islice((row for batch in batches for row in batch.to_pylist()), limit):
        began = time.perf_counter()
        try:
            scored = await queue.score(saved_view(row))
        except DataError as error:
            scored = unreadable(rewards, error)
        for reward in rewards:
            if (fault := reward.function.useless) is not None and reward.function.source.startswith("url:"):
                raise fault
        tried.append(_tried(row, scored, time.perf_counter() - began))
        for part in scored.parts:
            parts[part.name].add(part.value, scored.faults.get(part.name))
        progress.update(done=len(tried), total=limit)
    return tried


def _tried(row: Mapping[str, Any], scored: Scored, took: float) -> TriedRollout:
    return TriedRollout(
        rollout_id=row["rollout_id"],
        task_id=row["task_id"],
        rollout_index=row["rollout_index"],
        reward=None if scored.faults else total(scored.parts),
        parts={part.name: part.value for part in scored.parts},
        turns={part.name: list(part.steps) for part in scored.parts if part.steps is not None},
        faults={name: fault.removeprefix("reward: ") for name, fault in scored.faults.items()},
        seconds=took,
    )


def seconds(value: float) -> str:
    """A time for people: 340 µs, 12 ms, 2.1 s."""
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.1f} s"
