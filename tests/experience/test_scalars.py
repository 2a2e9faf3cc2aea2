"""What ``gymdata experience`` keeps of every rollout."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from gymdata.commands.experience.scalars import Scalars
from gymdata.errors import DataError, RefusedError
from tests.rollout_files import rollout, two_turns, write_run


def test_a_rollout_takes_a_few_numbers(tmp_path: Path) -> None:
    """Texts of rollouts are not kept, so that ten million rollouts fit into memory whatever their ids are."""
    tasks = [f"{i}-{'long ' * 20}" for i in range(8)]
    made = [rollout(task, index, index / 4, two_turns(5, 40)) for task in tasks for index in range(50)]
    found = Scalars.read([write_run(tmp_path / "run", made)])
    of_rollouts = (getattr(found, name) for name in found.__slots__ if name not in ("group_ids", "masked", "named"))
    assert sum(column.nbytes for column in of_rollouts) <= 32 * len(made)
    assert not found.masked
    assert found.named is None
    assert len(found.group_ids) == 8


def test_two_files_are_read_as_one(tmp_path: Path) -> None:
    """Groups are numbered over all files as they first appear; a reward that is missing is NaN."""
    first = write_run(tmp_path / "a", [rollout("x", 0, 1.0, two_turns(5, 40)), rollout("y", 0, None, two_turns(5, 40))])
    other = [rollout("y", 1, 0.5, two_turns(5, 40)), {**rollout("z", 0, 2.0, two_turns(5, 40)), "status": "truncated"}]
    found = Scalars.read([first, write_run(tmp_path / "b", other)], named=True)
    assert found.group_ids.take(found.groups).to_pylist() == [row["group_id"] for row in first_and(other)]
    assert np.array_equal(found.groups, [0, 1, 1, 2])
    assert np.array_equal(found.reward, [1.0, math.nan, 0.5, 2.0], equal_nan=True)
    assert found.truncated.tolist() == [False, False, False, True]
    assert found.named is not None
    assert found.named["rollout_id"].to_pylist() == ["x-0", "y-0", "y-1", "z-0"]


def first_and(other: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"group_id": rollout(task, 0, 1.0, two_turns(5, 40))["group_id"]} for task in "xy"] + other


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """A rollout that is given twice, and a run without rollouts, are errors."""
    run = write_run(tmp_path / "run", [rollout("x", i, 1.0, two_turns(5, 40)) for i in range(3)])
    with pytest.raises(RefusedError, match="3 rollout"):
        Scalars.read([run, run])
    with pytest.raises(DataError, match="empty"):
        Scalars.read([write_run(tmp_path / "none", [])])
