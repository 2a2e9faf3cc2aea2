"""Which rollouts are pending: requested, not there yet, and not given up.

Invariants: a rollout that is in the run is never pending again; one that failed is pending until it has failed
``max_attempts`` times, where an attempt that ended because the engine died under it does not count (it was not its
fault) and one whose prompt leaves no room to generate counts for all of them (no other would); a task that was edited
since rollouts of it were collected is refused, whatever the engine.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
import pyarrow as pa

from gymdata.errors import StoreError, counted
from gymdata.rollouts.messages import Task

_SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class RunKey:
    """The part of the ids that all rollouts of one run share."""

    run_id: str
    policy: str
    policy_hash: str
    policy_version: int

    def group_id(self, task: Task) -> str:
        """128 bits in hex: all rollouts of this task in this run under this policy version."""
        return _hash(self.run_id, task.task_id, task.content_hash, self.policy_hash, self.policy_version)

    def rollout_id(self, task: Task, index: int) -> str:
        """128 bits in hex: this one."""
        return _hash(self.run_id, task.task_id, task.content_hash, self.policy_hash, self.policy_version, index)


def request_seed(seed: int, task: Task, turn: int, index: int) -> int:
    """Seed of model call ``turn`` of rollout ``index``: 0 ≤ seed < 2⁶³."""
    base = hashlib.blake2b(orjson.dumps((seed, task.task_id, task.content_hash, turn)), digest_size=8).digest()
    return (int.from_bytes(base) + index) % _SEEDS


def _hash(*parts: str | int) -> str:
    return hashlib.blake2b(orjson.dumps(parts), digest_size=16).hexdigest()


#: The columns that are needed of existing rollouts.
COLUMNS = ("rollout_id", "task_id", "rollout_index")


@dataclass(frozen=True, slots=True)
class OwedGroup:
    """The pending members of one task's group, ascending."""

    task: Task
    group_id: str
    indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ResumeState:
    """How much there is to do: pending rollouts, and those out of attempts."""

    pending: int
    exhausted: int


class AttemptTracker:
    """Knows what is there and what failed. Memory: 16 bytes per rollout there, plus one entry per task and failure."""

    def __init__(
        self,
        key: RunKey,
        *,
        num_rollouts: int,
        max_attempts: int,
        existing: pa.Table,
        failures: Sequence[Mapping[str, object]] = (),
    ) -> None:
        self._key = key
        self._num_rollouts = num_rollouts
        self.max_attempts = max_attempts
        ids = existing.column("rollout_id").to_pylist()
        self._there = {bytes.fromhex(i) for i in ids}
        self._sample: dict[str, tuple[int, str]] = {}
        for task_id, index, rollout_id in zip(
            existing.column("task_id").to_pylist(), existing.column("rollout_index").to_pylist(), ids, strict=True
        ):
            self._sample.setdefault(task_id, (index, rollout_id))
        self._attempts = Counter(str(f["rollout_id"]) for f in failures if f.get("counts", True))
        for failure in failures:
            if failure.get("final"):
                rollout_id, spent = str(failure["rollout_id"]), failure["attempt"]
                self._attempts[rollout_id] = max(self._attempts[rollout_id], int(str(spent)))

    def attempts(self, rollout_id: str) -> int:
        """Failed attempts that count, so far."""
        return self._attempts[rollout_id]

    def failed(self, rollout_id: str, *, final: bool = False) -> int:
        """Count one more failed attempt, or with ``final`` all that are allowed; returns how many there are now."""
        self._attempts[rollout_id] += 1
        if final:
            self._attempts[rollout_id] = max(self._attempts[rollout_id], self.max_attempts)
        return self._attempts[rollout_id]

    def resume_state(self, tasks: Iterable[Task], run: Path) -> ResumeState:
        """Walk all tasks once. Raises StoreError.edited_task."""
        edited: list[str] = []
        pending = exhausted = 0
        for task in tasks:
            sampled = self._sample.get(task.task_id)
            if sampled is not None and self._key.rollout_id(task, sampled[0]) != sampled[1]:
                edited.append(task.task_id)
                continue
            for index in range(self._num_rollouts):
                rollout_id = self._key.rollout_id(task, index)
                if bytes.fromhex(rollout_id) in self._there:
                    continue
                if self._attempts[rollout_id] >= self.max_attempts:
                    exhausted += 1
                else:
                    pending += 1
        if edited:
            raise StoreError(
                f"{run}: {counted(len(edited), 'task was', 'tasks were')} edited since rollouts of them were collected "
                f"(first: {edited[0]!r})",
                hint="give edited tasks a new task_id, or collect into another folder",
            )
        return ResumeState(pending, exhausted)

    def groups(self, tasks: Iterable[Task]) -> Iterator[OwedGroup]:
        """The pending members, task by task in file order; tasks with none are skipped."""
        everything = tuple(range(self._num_rollouts))
        for task in tasks:
            # Before the first failure of a fresh run nothing needs to be looked up.
            fresh = not self._there and not self._attempts
            indexes = (
                everything if fresh else tuple(i for i in everything if self._is_pending(self._key.rollout_id(task, i)))
            )
            if indexes:
                yield OwedGroup(task, self._key.group_id(task), indexes)

    def _is_pending(self, rollout_id: str) -> bool:
        return bytes.fromhex(rollout_id) not in self._there and self._attempts[rollout_id] < self.max_attempts
