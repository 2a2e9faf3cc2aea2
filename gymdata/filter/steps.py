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
import pyarrow.compute as pc
import xxhash

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
        drawn: list[Array] = []
        for chunk in self._ids.chunks:
            for start in range(0, len(chunk), _TEXTS):
                # A slice at a time: as Python objects, ids take three times as much.
                texts = chunk.slice(start, _TEXTS).to_pylist()
                drawn.append(np.array([xxhash.xxh3_64_intdigest(text.encode(), seed) for text in texts], np.uint64))
        return np.concatenate(drawn) if drawn else np.empty(0, np.uint64)

    def _after_first(self, n: int, able: Mask, *, of: Sequence[Array], order: Sequence[Array]) -> Mask:
        """Living rows that are ``able``, but for the first ``n`` of those that are alike in ``of``: by ``order``, then by
        rollout id, whatever their order in the file."""
        rows = np.flatnonzero(self.alive & able)
        keys = [column[rows] for column in (*of, *order)]
        permutation = np.lexsort(keys[::-1])
        if _equal_to_previous(keys, permutation).any():
            # As Python objects, or as keys of every sort, ids would take most of the memory.
            rank = np.empty(len(rows), np.int64)
            rank[pc.sort_indices(self._ids.take(pa.array(rows))).to_numpy()] = np.arange(len(rows))
            permutation = np.lexsort([rank, *keys[::-1]])
        begin = np.flatnonzero(~_equal_to_previous(keys[: len(of)], permutation))
        later = np.arange(len(permutation)) - np.repeat(begin, np.diff(begin, append=len(permutation))) >= n
        result = np.zeros(len(self.alive), bool)
        result[rows[permutation[later]]] = True
        return result

    def _n_groups(self) -> int:
        return len(np.unique(self._groups[self.alive]))


def _equal_to_previous(keys: Sequence[Array], permutation: Array) -> Mask:
    """Which of ``permutation`` has the same values in all ``keys`` as the one before it."""
    same = np.ones(len(permutation), bool)
    same[:1] = False
    for key in keys:
        ordered = key[permutation]
        same[1:] &= ordered[1:] == ordered[:-1]
    return same
