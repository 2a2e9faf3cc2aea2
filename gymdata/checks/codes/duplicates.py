"""What all rollouts of a path have in common: D701, D702 and R503."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from gymdata.checks.violations import CHECKS, Check, CheckSettings, Code, Violation
from gymdata.rollouts.ragged import Array, first_like
from gymdata.rollouts.turn_columns import Evidence

_CODES = (
    Code(
        "R503",
        "no variance",
        "warning",
        "all rewards of the group are equal",
        "A group of two or more rollouts that all got the same reward gives no pair and no advantage. Reported once a "
        "group, at its first rollout.",
    ),
    Code(
        "D701",
        "duplicate rollout",
        "error",
        "the rollout occurs twice",
        "The same rollout_id (for foreign rows: the same row) was seen before; counting or training it twice skews both.",
    ),
    Code(
        "D702",
        "identical generations",
        "warning",
        "another rollout of the group generated the same tokens",
        "Expected at temperature 0 and on very short answers; otherwise a seed was probably used twice.",
    ),
)


@CHECKS.register("duplicates")
class Duplicates(Check):
    """Checks that need all rows of a path: D701, D702, R503. Keeps 150 bytes per rollout, in arrays, besides the
    ids."""

    codes = _CODES

    def __init__(self, settings: CheckSettings) -> None:
        super().__init__(settings)
        self._ids, self._groups = _Names(), _Names()
        self._files: list[str] = []
        #: Per batch: row, file, hash and length of the generations, reward, whether there is one.
        self._batches: list[tuple[Array, ...]] = []

    def find(self, e: Evidence) -> Iterator[Violation]:
        """Keep hashes of a batch for ``finish``."""
        file = e.file or ""
        if file not in self._files[-1:]:
            self._files.append(file)
        self._ids.add(e.rollout_id, e.row_keys)
        self._groups.add(e.group_id if e.group_id is not None else [None] * e.n)
        generated = e.turns.by_rollout(e.turns.generation)
        scored = np.zeros(e.n, np.bool_) if e.reward is None or e.reward_null is None else ~e.reward_null
        reward = np.zeros(e.n) if e.reward is None else np.array(e.reward, np.float64)
        of_file = np.full(e.n, len(self._files) - 1, np.int32)
        self._batches.append((np.array(e.rows), of_file, generated.hashes(), generated.lengths, reward, scored))
        yield from ()

    def finish(self) -> list[Violation]:
        """The duplicates, and R503 for every group of two or more whose rewards are all equal, at its first rollout."""
        if not self._batches:
            return []
        row, of_file, hashes, lengths, reward, scored = map(np.concatenate, zip(*self._batches, strict=True))
        self._batches.clear()

        def fault(r: int, code: str, **more: Any) -> Violation:
            return Violation(code, int(row[r]), self._ids[r], file=self._files[of_file[r]] or None, **more)

        def location(r: int) -> str:
            return f"{self._files[of_file[r]]} row {row[r]}".strip()

        first = np.where(self._ids.missing, np.arange(len(row)), first_like(*self._ids.keys))
        copies = np.flatnonzero(first != np.arange(len(row)))
        violations = [fault(r, "D701", detail=f"first seen at {location(int(first[r]))}") for r in copies.tolist()]
        counts = (first == np.arange(len(row))) & ~self._groups.missing
        rows = np.flatnonzero(counts & (lengths > 0))
        keys = [key[rows] for key in self._groups.keys]
        first = first_like(*keys, hashes[rows], lengths[rows])
        for k in np.flatnonzero(first != np.arange(len(rows))):
            twin = int(rows[first[k]])
            violations.append(fault(int(rows[k]), "D702", detail=f"same tokens as {self._ids[twin] or location(twin)}"))
        rows = np.flatnonzero(counts & scored)
        group, inverse = np.unique(first_like(*(key[rows] for key in self._groups.keys)), return_inverse=True)
        leads, n = rows[group], np.bincount(inverse)
        varies = np.bincount(inverse, weights=reward[rows] != reward[leads][inverse]) > 0
        for g in np.flatnonzero((n > 1) & ~varies & np.isfinite(reward[leads])).tolist():
            r = int(leads[g])
            violations.append(fault(r, "R503", got=f"{reward[r]:g} for all {n[g]}", detail=f"group {self._groups[r]}"))
        return violations


class _Names:
    """A text or None a row: its UTF-8 and 16 bytes that no other text has."""

    def __init__(self) -> None:
        self._texts: list[tuple[bytes, npt.NDArray[np.int32]]] = []
        self._keys: list[Array] = []
        self._known: list[npt.NDArray[np.bool_]] = []
        self._begin = [0]

    def add(self, texts: Iterable[str | None], keys: Iterable[bytes | None] | None = None) -> None:
        """The names of the next rows; ``keys``: of those without a name, 16 bytes that no other has."""
        encoded = [None if text is None else text.encode("utf-8", "surrogatepass") for text in texts]
        lengths = np.fromiter((-1 if text is None else len(text) for text in encoded), np.int32, len(encoded))
        self._texts.append((b"".join(text or b"" for text in encoded), lengths))
        keys = [None] * len(encoded) if keys is None else list(keys)
        digests = b"".join(key or xxhash.xxh3_128_digest(text or b"") for text, key in zip(encoded, keys, strict=True))
        self._known.append((lengths >= 0) | np.asarray([key is not None for key in keys], np.bool_))
        self._keys.append(np.frombuffer(digests, np.uint64).reshape(-1, 2))
        self._begin.append(self._begin[-1] + len(encoded))

    @property
    def keys(self) -> tuple[Array, Array]:
        """Two numbers per row, both equal for equal texts; meaningless for None."""
        joined = np.concatenate(self._keys)
        self._keys = [joined]
        return joined[:, 0], joined[:, 1]

    @property
    def missing(self) -> npt.NDArray[np.bool_]:
        return ~np.concatenate(self._known)

    def __getitem__(self, row: int) -> str | None:
        part = bisect_right(self._begin, row) - 1
        text, lengths = self._texts[part]
        index = row - self._begin[part]
        if lengths[index] < 0:
            return None
        end = int(np.maximum(lengths[: index + 1], 0).sum(dtype=np.int64))
        return text[end - int(lengths[index]) : end].decode("utf-8", "surrogatepass")
