"""The scalars of all rollouts, kept in memory while tokens are read batch by batch: a few numbers each, and no text.

Invariants: rollouts are in the order of their files, and their tokens are read in the same order later; a rollout that is
listed twice is refused; memory is about 30 bytes per rollout and the names of the groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import DataError
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.stats import known_rewards
from gymdata.store import scan_batches
from gymdata.store.lineage import keys_of, refuse_repeats

_COLUMNS = ("rollout_id", "group_id", "status", "reward", "temperature", "n_generated_tokens")
_NAMED = ("rollout_id", "reward", "rewards")


@dataclass(slots=True)
class Scalars:
    """One entry per rollout. ``keys``: hashes of the ids (see ``keys_of``); ``groups``: indices into ``group_ids``;
    ``reward``: NaN for none; ``generated``: number of sampled tokens; ``named``: ids and rewards by name, if
    requested."""

    keys: npt.NDArray[np.uint64]
    groups: npt.NDArray[np.int32]
    group_ids: pa.Array
    reward: npt.NDArray[np.float64]
    truncated: npt.NDArray[np.bool_]
    temperature: npt.NDArray[np.float32]
    generated: npt.NDArray[np.int32]
    named: pa.Table | None = None

    @classmethod
    def read(cls, sources: Sequence[str | Path], *, named: bool = False) -> Scalars:
        """The scalars of all rollouts under ``sources``. Raises DataError when there are none, RefusedError (D701) for
        a duplicate."""
        columns = [*_COLUMNS, "rewards"] if named else _COLUMNS
        batches = (batch for source in sources for batch in scan_batches(source, ROLLOUTS, columns))
        found = cls._of(batches, named)
        if not len(found):
            raise DataError.empty(sources[0], "scored rollouts")
        ids = (b.column(0) for s in sources for b in scan_batches(s, ROLLOUTS, ("rollout_id",)))
        refuse_repeats(found.keys, ids, sources)
        return found

    @classmethod
    def _of(cls, batches: Iterable[pa.RecordBatch], named: bool) -> Scalars:
        keys, groups, kept = [], [], []
        numbers: dict[str, list[np.ndarray]] = {"reward": [], "truncated": [], "temperature": [], "generated": []}
        for batch in batches:
            keys.append(keys_of(batch.column("rollout_id")))
            groups.append(batch.column("group_id").dictionary_encode())
            numbers["reward"].append(known_rewards(batch.column("reward")))
            numbers["truncated"].append(pc.equal(batch.column("status"), "truncated").to_numpy(zero_copy_only=False))
            numbers["temperature"].append(batch.column("temperature").to_numpy())
            numbers["generated"].append(batch.column("n_generated_tokens").to_numpy())
            if named:
                kept.append(batch.select(_NAMED))
        codes = pa.chunked_array(groups, pa.dictionary(pa.int32(), pa.string())).unify_dictionaries()
        return cls(
            _joined(keys, np.uint64),
            _joined([chunk.indices.to_numpy() for chunk in codes.chunks], np.int32),
            codes.chunk(0).dictionary if codes.num_chunks else pa.array([], pa.string()),
            _joined(numbers["reward"], np.float64),
            _joined(numbers["truncated"], np.bool_),
            _joined(numbers["temperature"], np.float32),
            _joined(numbers["generated"], np.int32),
            pa.Table.from_batches(kept) if kept else None,
        )

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def reward_names(self) -> set[str]:
        """The names of stored rewards, where ``named`` was read."""
        if self.named is None:
            return set()
        return set(pc.unique(self.named["rewards"].combine_chunks().flatten().field("name")).to_pylist())


def _joined(parts: list[np.ndarray], kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """Frees each part once it is copied."""
    whole, at = np.empty(sum(map(len, parts)), kind), 0
    parts.reverse()
    while parts:
        part = parts.pop()
        whole[at : at + len(part)] = part
        at += len(part)
    return whole
