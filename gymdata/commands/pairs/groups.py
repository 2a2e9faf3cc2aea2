"""Scored rollouts in the order in which strategies see them: by group, best first.

The order depends on tasks, scores, indices and ids only, so the order of the rows changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.rollouts.ragged import Ints
from gymdata.workers.tuning import give_back

#: Rows whose groups are looked at together, for memory.
_BLOCK = 1 << 20


class Groups:
    """The scored rollouts sorted by (group, score from high, rollout_index, rollout_id): what strategies choose from.

    One entry per scored rollout: ``score`` (float64), ``index`` (its rollout_index), ``group`` (its group's number) and
    ``row`` (of the frame). One entry per group with a score: ``start``, where it begins, and ``size``. ``rng``: for
    strategies that draw.
    """

    def __init__(self, frame: pa.Table, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        scores = pc.fill_null(frame["score"].cast(pa.float64()), np.nan).to_numpy()
        groups, self.n_groups = group_ranks(frame)
        self.total = len(scores)
        scored = np.flatnonzero(np.isfinite(scores))
        index = frame["rollout_index"].to_numpy().astype(np.int64)
        # Adding 0 makes -0.0 the 0.0 that it is equal to.
        dense = (ranks(pa.chunked_array([key[scored]]))[0] for key in (-scores + 0.0, index))
        keys = [groups[scored], *dense]
        order = _sorted_by(keys)
        ordered = [key[order] for key in keys]
        if np.logical_and.reduce([key[1:] == key[:-1] for key in ordered]).any():
            # Two rollouts of one group may share an index (files of two runs): their ids break the tie.
            order = _sorted_by([*keys, ranks(frame["rollout_id"])[0][scored]])
        # Candidates are several times as many as rollouts, and each is two of these.
        self.row = scored[order].astype(np.int32 if self.total <= np.iinfo(np.int32).max else np.int64)
        self.score: npt.NDArray[np.float64] = scores[self.row]
        self.index: Ints = index[self.row]
        self.group: Ints = groups[self.row]
        self.start: Ints = run_starts(self.group)
        self.size: Ints = np.diff(np.append(self.start, len(order)))
        give_back()


def run_starts(values: np.ndarray) -> Ints:
    """Where runs of equal values begin."""
    return np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])


def _sorted_by(keys: Sequence[Ints]) -> Ints:
    """Order by dense keys, the first one most significant: packed into one number when they fit."""
    packed = np.zeros(len(keys[0]), np.int64)
    room = 1
    for key in keys:
        size = int(key.max(initial=0)) + 1
        room *= size
        if room >= 1 << 62:
            order: np.ndarray = np.lexsort(list(reversed(keys)))
            return order
        packed = packed * size + key
    return np.argsort(packed)


def ranks(values: pa.ChunkedArray) -> tuple[Ints, int]:
    """Each value's place among the distinct ones, in their order, and how many distinct ones there are."""
    rank, indices = _coded(values)
    return rank[indices], len(rank)


def _coded(values: pa.ChunkedArray) -> tuple[Ints, Ints]:
    """The places of the distinct values in their order, and which of them each value is."""
    encoded = values.combine_chunks().dictionary_encode()
    order = pc.array_sort_indices(encoded.dictionary).to_numpy()
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank, encoded.indices.to_numpy()


def group_ranks(rows: pa.Table) -> tuple[Ints, int]:
    """The place of each row's group among the groups, and how many there are: in the order of their tasks, those of one
    task in that of their ids. Ids of groups are drawn for each run, and the same rollouts must give the same pairs."""
    group, n = ranks(rows["group_id"])
    if "task_id" not in rows.column_names:
        return group, n
    rank, tasks = _coded(rows["task_id"])
    task = np.full(n, len(rank))
    blocks = [slice(begin, begin + _BLOCK) for begin in range(0, len(group), _BLOCK)]
    for block in blocks:
        np.minimum.at(task, group[block], rank[tasks[block]])
    position = np.empty(n, np.int64)
    position[np.lexsort((np.arange(n), task))] = np.arange(n)
    for block in blocks:
        group[block] = position[group[block]]
    return group, n
