"""Pairs as a reward model's trainer gets them: those it learns from, and those of other tasks that measure it.

Invariants: no task is on both sides; which side a task is on depends on its id, the share and the seed alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from gymdata.rollouts.messages import split_tasks
from gymdata.train.data import PAIR_COLUMNS, TrainingPairs, training_pairs

#: Columns of a pairs file that a reward model's training reads.
REWARD_COLUMNS = (*PAIR_COLUMNS, "task_id")


@dataclass(frozen=True)
class RewardPairs(TrainingPairs):
    """Pairs to train on, and ``heldout`` pairs of the tasks ``heldout_tasks`` (one entry a pair) to measure on."""

    heldout: TrainingPairs | None = None
    heldout_tasks: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        measured = 0 if self.heldout is None else len(self.heldout)
        return {"pairs": len(self), "heldout_pairs": measured, "heldout_tasks": len(set(self.heldout_tasks))}


def reward_pairs(
    table: pa.Table, split: float, seed: int, max_length: int | None = None, where: str = "pairs"
) -> RewardPairs:
    """The pairs of a table (``REWARD_COLUMNS``), those of a share ``split`` of the tasks held out; 0 holds none out.

    Raises as ``gymdata.train.data.training_pairs``, and UsageError when there are too few tasks to split.
    """
    tasks = table["task_id"].to_pylist()
    held = split_tasks(tasks, split, seed) if split else set()
    out = np.array([task in held for task in tasks], np.bool_)
    train = training_pairs(table.filter(pa.array(~out)), max_length, where)
    if not out.any():
        return RewardPairs(**vars(train))
    heldout = training_pairs(table.filter(pa.array(out)), max_length, where)
    task_of = dict(zip(table["pair_id"].to_pylist(), tasks, strict=True))
    return RewardPairs(**vars(train), heldout=heldout, heldout_tasks=tuple(task_of[p] for p in heldout.pair_ids))
