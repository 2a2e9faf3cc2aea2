"""Choosing rollouts by what is known about them without their tokens: the steps of ``gymdata filter``.

Invariants: the order of the rows changes nothing but the order of the rows; every row that a step drops is counted
under one reason; random draws are seeded hashes of the ids. Group columns are over finite values only: a missing reward
is never counted as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from gymdata.commands.filter.conditions import connection

Mask = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]
#: Ids that are converted to Python objects at a time.
_TEXTS = 65_536


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
    """Rows that go through steps. ``alive``: which are left; ``steps``: how many each step dropped, and why."""

    def __init__(self, rollout_ids: pa.ChunkedArray, groups: Array) -> None:
        """``groups``: each row's group as a code from 0."""
        self.alive: Mask = np.ones(len(groups), bool)
        self.steps: list[Step] = []
        self._ids = rollout_ids
        self._groups = groups

    def drop(self, name: str, detail: str, reasons: dict[str, Mask], notes: Sequence[str] = ()) -> None:
        """Drop the remaining rows that any reason matches; each is counted under the first that does."""
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

    def dedupe(self, keys: Array, index: Array, score: Array | None = None) -> None:
        """Of the rows of a group with equal ``keys``, keep the one with the highest finite ``score`` (if given), of
        equals the one with the lowest ``index``. A row with key 0 duplicates no other row."""
        ranked = [] if score is None else [np.where(np.isfinite(score), -score + 0.0, np.inf)]
        double = self._after_first(1, keys != 0, of=[self._groups, keys], order=[*ranked, index])
        self.drop("dedupe", "same generated tokens in its group", {"same as another of its group": double})

    def best(self, n: int, by: str, score: Array, index: Array) -> None:
        """Keep the ``n`` highest scores of each group; one that is not finite does not count. Ties go to the lower index."""
        finite = np.isfinite(score)
        beyond = self._after_first(n, finite, of=[self._groups], order=[-score + 0.0, index])
        self.drop("best-n", f"{n} by {by}", {f"no {by}": ~finite, f"not among the best {n}": beyond})

    def balance(self, by: str, categories: Array, names: Sequence[str], seed: int) -> None:
        """Keep as many rows of every category as the rarest one has left, drawn by a seeded hash of their ids.

        ``categories``: each row's place in ``names``, -1 for none."""
        valid = categories >= 0
        sizes, living = (np.bincount(categories[rows], minlength=len(names)) for rows in (valid, self.alive & valid))
        counts = {name: n for name, n in zip(names, living.tolist(), strict=True) if n}
        least = min(counts.values(), default=0)
        over = self._after_first(least, valid, of=[categories], order=[self._drawn(seed)])
        gone = sorted(name for name, n in zip(names, sizes.tolist(), strict=True) if n and name not in counts)
        notes = [f"{category}: {n:,} before" for category, n in sorted(counts.items(), key=lambda item: str(item[0]))]
        notes += [f"{category}: none was left" for category in gone]
        reasons = {f"no {by}": ~valid, f"over the {least:,} of the rarest": over}
        self.drop("balance", f"{len(counts):,} values of {by}", reasons, notes)

    def _drawn(self, seed: int) -> Array:
        """A random number per rollout, determined by its id and the seed."""
        # Some at a time: as Python objects, ids take three times as much.
        batches = pa.table([self._ids], ["id"]).to_batches(max_chunksize=_TEXTS)
        drawn = ([xxhash.xxh3_64_intdigest(t.encode(), seed) for t in batch[0].to_pylist()] for batch in batches)
        return np.concatenate([np.array(numbers, np.uint64) for numbers in drawn])

    def _after_first(self, n: int, able: Mask, *, of: Sequence[Array], order: Sequence[Array]) -> Mask:
        """Living rows that are ``able``, but for the first ``n`` of those that are alike in ``of``: by ``order``, then by
        rollout id, whatever their order in the file."""
        keys = [f"k{k}" for k in range(len(of) + len(order))]
        arrays = [np.arange(len(able)), self._ids, self.alive & able, *of, *order]
        with connection("filter") as con:
            con.register("given", pa.table(arrays, ["row", "id", "able", *keys]))
            alike, ordered = ", ".join(keys[: len(of)]), ", ".join([*keys[len(of) :], "id"])
            place = f"row_number() OVER (PARTITION BY {alike} ORDER BY {ordered})"
            later = con.sql(f"SELECT row FROM given WHERE able QUALIFY {place} > {n}").to_arrow_table()["row"]
        result = np.zeros(len(self.alive), bool)
        result[later.to_numpy()] = True
        return result

    def _n_groups(self) -> int:
        return len(np.unique(self._groups[self.alive]))
