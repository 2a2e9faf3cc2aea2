"""Rollouts whose calls branch, break and retry, and others that are cut into sequences in every way."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from tests.rollout_files import rollout, rollouts_table, two_turns

BREAK = [([1, 5], [10, 2]), ([1, 5, 10, 2, 7], [11, 2]), ([1, 6, 9], [12, 13])]


RETRY = [([1, 5], [10, 2]), ([1, 5], [20, 2]), ([1, 5, 20, 2, 7], [21])]


BRANCH = [([1, 5], [10, 2]), ([1, 5, 10, 2, 7, 7], [11, 2]), ([1, 5, 10, 2, 7, 8], [12, 2])]


SHAPES = [two_turns(5, 40), [([1, 2, 3], [4, 2])], BREAK, RETRY, BRANCH, [], [([1, 2], []), ([1, 2, 3], [9])]]


def column(shapes: list[Any]) -> tuple[pa.ListArray, pa.Array]:
    table = rollouts_table([rollout("t", i, 1.0, calls) for i, calls in enumerate(shapes)])
    return table["turns"].combine_chunks(), table["rollout_id"].combine_chunks()
