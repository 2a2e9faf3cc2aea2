"""What a rollout is called, and the seed of each of its model calls.

What always holds: ids depend only on what a rollout is (run, task and its content, policy, index), so a replay makes the
same id and two runs never share one. Seeds depend on ``--seed``, the task and the turn but not on the run, so the same
seed gives the same samples in another folder; member ``i`` of a group is seeded ``base + i``, which is also what vLLM
does for member ``i`` of a request with n > 1: grouped and single requests sample the same.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import orjson

from gymdata.ports import Task

_SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class RunKey:
    """What all rollouts of one run share in their ids."""

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
