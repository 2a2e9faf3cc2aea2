"""Choosing rollouts by what is known about them without their tokens: the steps of ``gymdata filter``.

Invariants: the order of the rows changes nothing but the order of the rows; every row that a step drops is counted
under one reason; what is drawn is drawn by a seeded hash of its id. Group columns are over finite values only: a missing
reward is never counted as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

Mask = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did. ``dropped``: reason → rollouts; ``rows_in`` = ``rows_out`` + all of ``dropped``."""

    name: str
    detail: str
    rows_in: int
    rows_out: int
    groups_in: int
    groups_out: int
    dropped: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Funnel:
    """Rows going through steps. ``alive``: which are left; ``steps``: what became of the others."""

    def __init__(self, rollout_ids: Sequence[str], groups: Array) -> None:
        """``groups``: each row's group as a code from 0."""
        self.alive: Mask = np.ones(len(groups), bool)
        self.steps: list[Step] = []
        self._ids = rollout_ids
        self._groups = groups
        self._by_id: Array | None = None

    def drop(self, name: str, detail: str, reasons: dict[str, Mask], notes: Sequence[str] = ()) -> None:
        """Drop the living rows that any reason names; the first one that does is what is counted."""
        rows_in, groups_in = int(self.alive.sum()), self._n_groups()
        dropped = {}
        for reason, bad in reasons.items():
            hit = self.alive & bad
            if hit.any():
                dropped[reason] = int(hit.sum())
            self.alive = self.alive & ~bad
        rows_out = int(self.alive.sum())
        self.steps.append(Step(name, detail, rows_in, rows_out, groups_in, self._n_groups(), dropped, list(notes)))

    def condition(self, name: str, text: str, true: Mask, unknown: Mask) -> None:
        """Keep the rows for which a condition is true."""
        self.drop(name, text, {"a value is missing": unknown, "not true": ~true})

    def dedupe(self, keys: Array, index: Array) -> None:
        """Keep, of the rows of a group with one ``key``, that with the lowest ``index``. A key of 0 is nobody's double."""
        order = self._order(index.astype(np.float64))
        rows = order[self.alive[order] & (keys[order] != 0)]
        pairs = np.stack((self._groups[rows].astype(np.uint64), keys[rows].astype(np.uint64)), axis=1)
        _, first = np.unique(pairs, axis=0, return_index=True)
        double = np.zeros(len(self.alive), bool)
        double[np.delete(rows, first)] = True
        self.drop("dedupe", "same generated tokens in its group", {"same as another of its group": double})

    def best(self, n: int, by: str, score: Array, index: Array) -> None:
        """Keep the ``n`` highest scores of each group; one that is not finite is none. Ties go to the lower index."""
        order = self._order(index.astype(np.float64))
        scored = order[self.alive[order] & np.isfinite(score[order])]
        scored = scored[np.argsort(-score[scored], kind="stable")]
        scored = scored[np.argsort(self._groups[scored], kind="stable")]
        beyond = np.zeros(len(self.alive), bool)
        beyond[scored[_place_in_run(self._groups[scored]) >= n]] = True
        self.drop("best-n", f"{n} by {by}", {f"no {by}": ~np.isfinite(score), f"not among the best {n}": beyond})

    def balance(self, by: str, categories: Sequence[str | None], seed: int) -> None:
        """Keep as many rows of every category as the rarest living one has, drawn by a seeded hash of their ids."""
        import polars as pl

        none = np.array([category is None for category in categories], bool)
        drawn = [xxhash.xxh3_64_intdigest(name.encode(), seed) for name in self._ids]
        rows = pl.DataFrame(
            {"category": categories, "drawn": drawn, "id": self._ids, "alive": self.alive},
            schema={"category": pl.String, "drawn": pl.UInt64, "id": pl.String, "alive": pl.Boolean},
        ).with_row_index("row")
        rows = rows.filter(pl.col("category").is_not_null())
        living = rows.filter("alive").sort("drawn", "id")
        counts = dict(living.group_by("category").len().sort("category").iter_rows())
        least = min(counts.values(), default=0)
        over = np.zeros(len(self.alive), bool)
        over[living.filter(pl.int_range(pl.len()).over("category") >= least)["row"].to_numpy()] = True
        gone = sorted(set(rows["category"].unique()) - counts.keys())
        notes = [f"{category}: {n:,} before" for category, n in counts.items()]
        notes += [f"{category}: none was left" for category in gone]
        reasons = {f"no {by}": none, f"over the {least:,} of the rarest": over}
        self.drop("balance", f"{len(counts):,} values of {by}", reasons, notes)

    def _order(self, first: Array) -> Array:
        """Row numbers by ``first``, then by rollout id, whatever their order in the file."""
        if self._by_id is None:
            self._by_id = np.argsort(np.array(self._ids, dtype=object), kind="stable")
        return self._by_id[np.argsort(first[self._by_id], kind="stable")]

    def _n_groups(self) -> int:
        return len(np.unique(self._groups[self.alive]))


def _place_in_run(values: Array) -> Array:
    """0, 1, 2, … within each stretch of equal values."""
    if not len(values):
        return np.zeros(0, np.int64)
    starts = np.flatnonzero(np.r_[True, values[1:] != values[:-1]])
    return np.arange(len(values)) - np.repeat(starts, np.diff(np.r_[starts, len(values)]))
