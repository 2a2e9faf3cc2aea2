"""Choosing rollouts by what is known about them without their tokens: the steps of ``gymdata filter``.

Invariants: the order of the rows changes nothing but the order of the rows; every row that a step drops is counted
under one reason; what is drawn is drawn by a seeded hash of its id. Group columns are over finite values only: a missing
reward is never counted as 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
        double = self._after_first(1, keys != 0, of={"group": self._groups, "key": keys}, order={"index": index})
        self.drop("dedupe", "same generated tokens in its group", {"same as another of its group": double})

    def best(self, n: int, by: str, score: Array, index: Array) -> None:
        """Keep the ``n`` highest scores of each group; one that is not finite does not count. Ties go to the lower index."""
        finite = np.isfinite(score)
        beyond = self._after_first(n, finite, of={"group": self._groups}, order={"score": -score + 0.0, "index": index})
        self.drop("best-n", f"{n} by {by}", {f"no {by}": ~finite, f"not among the best {n}": beyond})

    def balance(self, by: str, categories: Sequence[str | None], seed: int) -> None:
        """Keep as many rows of every category as the rarest living one has, drawn by a seeded hash of their ids."""
        known = np.array([category is not None for category in categories], bool)
        counts = Counter(category for category, alive in zip(categories, self.alive & known, strict=True) if alive)
        least = min(counts.values(), default=0)
        drawn = np.array([xxhash.xxh3_64_intdigest(name.encode(), seed) for name in self._ids], np.uint64)
        over = self._after_first(least, known, of={"category": categories}, order={"drawn": drawn})
        gone = sorted({c for c in categories if c is not None} - counts.keys())
        notes = [f"{category}: {n:,} before" for category, n in sorted(counts.items(), key=lambda item: str(item[0]))]
        notes += [f"{category}: none was left" for category in gone]
        reasons = {f"no {by}": ~known, f"over the {least:,} of the rarest": over}
        self.drop("balance", f"{len(counts):,} values of {by}", reasons, notes)

    def _after_first(self, n: int, able: Mask, *, of: Mapping[str, Any], order: Mapping[str, Array]) -> Mask:
        """Living rows that are ``able``, but for the first ``n`` of those that are alike in ``of``: by ``order``, then by
        rollout id, whatever their order in the file."""
        import polars as pl

        rows = pl.LazyFrame({**of, **order, "id": self._ids}).with_row_index("row").filter(pl.Series(self.alive & able))
        later = rows.sort(*order, "id").filter(pl.int_range(pl.len()).over(*of) >= n).select("row").collect()["row"]
        found = np.zeros(len(self.alive), bool)
        found[later.to_numpy()] = True
        return found

    def _n_groups(self) -> int:
        return len(np.unique(self._groups[self.alive]))
