"""``check --reward``: a reward tried on saved rollouts, or on tasks before the first collect. Nothing is written.

Of a task the reference answer is scored, which must score above an empty answer and above another task's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from gymdata.collect.task_files import rows_of, task_files
from gymdata.collect.task_shapes import TaskShape, checked
from gymdata.collect.tasks import TaskFile
from gymdata.errors import DataError, UsageError
from gymdata.progress import NullProgress, Progress
from gymdata.public import Figures, Report, Row, path_of
from gymdata.rewards import Rewards, given_rewards, load_rewards
from gymdata.rewards.port import View
from gymdata.rewards.scheduler import VIEWED, PartTally, RewardScheduler, Weighted, saved_view, tallies, total, view_of
from gymdata.rollouts.messages import RolloutRow, Task
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import files_of, find_run_json, scan_batches
from gymdata.user_code import in_thread

#: Rollouts that are tried unless a limit is given.
TRIED = 20
#: The answers of a task that are tried.
ANSWERS = ("reference", "empty", "wrong")
_COLUMNS = ["rollout_id", "task_id", "rollout_index", "turns", *VIEWED]


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
    #: Of tasks: the mean reward of each of ``ANSWERS``, the reference first; None where nothing was scored.
    answers: dict[str, float | None] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.failed and self.scored > 0 and self.tells_right is not False

    @property
    def tells_right(self) -> bool | None:
        """Whether the reference answers score above all others; None where there are none, or nothing was scored."""
        reference, *others = (self.answers.get(answer) for answer in ANSWERS)
        compared = [value for value in others if value is not None]
        return None if reference is None or not compared else reference > max(compared)

    def to_dict(self) -> Figures:
        return {"ok": self.ok, **asdict(self)}

    def rows(self) -> list[Row]:
        values = "–" if self.mean is None else f"{self.mean:.4g}, from {self.lowest:.4g} to {self.highest:.4g}"
        flat = self.scored > 1 and self.lowest == self.highest
        lowest = {True: "", False: ": the reference answers do not score above the others", None: ""}[self.tells_right]
        answers = [
            (f"{answer} answer, mean", "–" if mean is None else f"{mean:.4g}{lowest if answer == ANSWERS[0] else ''}")
            for answer, mean in self.answers.items()
        ]
        return [
            ("answers" if self.answers else "rollouts", self.tried),
            ("scored", self.scored if self.scored or self.failed else "0: the reward applies to none of them"),
            ("failed", self.failed),
            *(line for part in self.parts.values() for line in part.lines()),
            *answers,
            ("reward, mean", values + (": all are equal, nothing to learn from these" if flat else "")),
            ("time per rollout", f"{seconds(self.seconds_mean)}, at most {seconds(self.seconds_max)}"),
        ]


def check_reward(
    data: str | Path,
    reward: Rewards,
    *,
    map: Sequence[str] = (),
    limit: int = TRIED,
    timeout: float = 300.0,
    progress: Progress | None = None,
) -> RewardCheck:
    """Score the first ``limit`` rollouts of ``data`` (run folder, file or glob) with ``reward``; nothing is written. Where
    ``data`` is a file of tasks, their reference, empty and wrong answers are scored instead.

    ``reward``: as ``gymdata.score`` takes it. ``map``: the columns of the tasks, as ``gymdata.collect`` takes it.
    ``timeout``: seconds per rollout. Raises UsageError for an unknown reward, DataError for a path that is
    not there or has no rollouts, OutsideError for a reward server that was never reached.
    """
    path = str(path_of(data, "check_reward"))
    specs, functions = given_rewards(reward)
    if not specs:
        raise UsageError("no reward given", hint="gymdata check --reward SPEC --data RUN")
    if limit < 1:
        raise UsageError.bad_value("limit", limit, "1 or more")
    tasks = _tasks(path, TaskShape.of(checked(map), None, None))
    if tasks is None:
        files_of(path)  # a missing path is reported at once
    rewards = [Weighted(function, weight) for function, weight in load_rewards(specs, None, functions)]
    parts = tallies(rewards)
    rows: Iterable[tuple[RolloutRow, View | DataError]]
    if tasks is not None:
        rows = _answered(tasks, limit)
    else:
        batches = scan_batches(path, ROLLOUTS, _COLUMNS, batch_size=min(limit, 64))
        rows = ((row, saved_view(row)) for row in islice((r for batch in batches for r in batch.to_pylist()), limit))
    tried = asyncio.run(_try_all(rows, rewards, parts, timeout, progress or NullProgress()))
    if not tried:
        raise DataError.empty(path, "rollouts to score")
    kinds = dict.fromkeys(
        answer for answer in ANSWERS for rollout in tried if tasks is not None and rollout.rollout_id == answer
    )
    values = [rollout.reward for rollout in tried if rollout.reward is not None]
    times = [rollout.seconds for rollout in tried]
    return RewardCheck(
        path=path,
        tried=len(tried),
        scored=len(values),
        failed=sum(bool(rollout.faults) for rollout in tried),
        mean=mean_of(values),
        lowest=min(values, default=None),
        highest=max(values, default=None),
        seconds_mean=float(np.mean(times)),
        seconds_max=max(times),
        parts=parts,
        rollouts=tried,
        answers={kind: mean_of(rollout.reward for rollout in tried if rollout.rollout_id == kind) for kind in kinds},
    )


def mean_of(rewards: Iterable[float | None]) -> float | None:
    """The mean of those that are there; None without any."""
    values = [reward for reward in rewards if reward is not None]
    return float(np.mean(values)) if values else None


def _tasks(path: str, shape: TaskShape) -> TaskFile | None:
    """The tasks of a path that holds tasks; None for rollouts, and for what is not there."""
    if find_run_json(path) is not None:
        return None
    try:
        first = next(iter(rows_of(task_files(path)[0], lambda *_: None)), None)
    except (DataError, UsageError):
        return None
    rollouts = {"turns", "rollout_id", "response", "trajectories", "episode"}
    return TaskFile(path, shape=shape) if first is not None and not rollouts & first[1].keys() else None


def _answered(tasks: Iterable[Task], limit: int) -> Iterator[tuple[RolloutRow, View]]:
    """Each task with its reference answer, with an empty answer, and with another task's."""
    first = list(islice(tasks, limit))
    answers: list[str | None] = []
    for task in first:
        answer = task.row.get("answer")
        answer = answer[0] if isinstance(answer, list) and answer else answer
        answers.append(None if answer is None or isinstance(answer, (list, dict)) else str(answer))
    for task, answer in zip(first, answers, strict=True):
        wrong = next((other for other in answers if other not in (None, answer)), "I do not know.")
        for index, (kind, text) in enumerate(zip(ANSWERS, (answer, "", wrong), strict=True)):
            if text is not None:
                messages = [*task.messages, {"role": "assistant", "content": text}]
                produced_by = [*[None] * len(task.messages), 0]
                view = view_of(
                    messages=messages,
                    produced_by=produced_by,
                    task=task.row,
                    tools=task.tools,
                    turns=[],
                    status="completed",
                )
                yield {"rollout_id": kind, "task_id": task.task_id, "rollout_index": index}, view


async def _try_all(
    rows: Iterable[tuple[RolloutRow, View | DataError]],
    rewards: list[Weighted],
    parts: dict[str, PartTally],
    timeout: float,
    progress: Progress,
) -> list[TriedRollout]:
    queue, tried = RewardScheduler(rewards, in_thread, timeout), list[TriedRollout]()
    for row, view in rows:
        began = time.perf_counter()
        scored = await queue.score(view)
        for reward in rewards:
            if (fault := reward.function.useless) is not None and reward.function.source.startswith("url:"):
                raise fault
        tried.append(
            TriedRollout(
                rollout_id=row["rollout_id"],
                task_id=row["task_id"],
                rollout_index=row["rollout_index"],
                reward=None if scored.faults else total(scored.parts),
                parts={part.name: part.value for part in scored.parts},
                turns={part.name: list(part.steps) for part in scored.parts if part.steps is not None},
                faults={name: fault.removeprefix("reward: ") for name, fault in scored.faults.items()},
                seconds=time.perf_counter() - began,
            )
        )
        for part in scored.parts:
            parts[part.name].add(part.value, scored.faults.get(part.name))
        progress.update(done=len(tried))
    return tried


def seconds(value: float) -> str:
    """A time for people: 340 µs, 12 ms, 2.1 s."""
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.1f} s"
