"""What all rollouts of a path have in common: D701, D702 and R503."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

from gymdata.checks.violations import CHECKS, Check, CheckSettings, Violation, code_pages
from gymdata.rollouts.ragged import Array, first_like
from gymdata.rollouts.turn_columns import Evidence

_CODES = code_pages("""
R503 no variance (warning): all rewards of the group are equal
A group of two or more rollouts that all got the same reward gives no pair and no advantage. Reported once a group, at
its first rollout.

D701 duplicate rollout (error): the rollout occurs twice
The same rollout_id (for foreign rows: the same row) was seen before; counting or training it twice skews both.

D702 identical generations (warning): another rollout of the group generated the same tokens
Expected at temperature 0 and on very short answers; otherwise a seed was probably used twice.
""")


#: What is kept of a rollout besides its id: its row and file, 16 bytes of its id or its content, its group's number (-1:
#: none), hash and length of its generations, and its reward, if it was scored.
_KEPT = np.dtype(
    [
        ("row", np.int64),
        ("file", np.int32),
        ("id", np.uint64, 2),
        ("group", np.int32),
        ("tokens", np.uint64),
        ("length", np.int64),
        ("reward", np.float64),
        ("scored", np.bool_),
    ]
)


@CHECKS.register("duplicates")
class Duplicates(Check):
    """Checks that need all rows of a path: D701, D702, R503. Keeps 57 bytes, and its id, of each rollout."""

    codes = _CODES

    def __init__(self, settings: CheckSettings) -> None:
        super().__init__(settings)
        self._files: dict[str, int] = {}
        self._groups: dict[str, int] = {}
        self._ids: list[str | None] = []
        self._batches: list[Array] = []

    def find(self, e: Evidence) -> Iterator[Violation]:
        """Keep hashes of a batch for ``finish``."""
        ids, groups = list(e.rollout_id), e.group_id if e.group_id is not None else [None] * e.n
        contents = e.row_keys if e.row_keys is not None else [None] * e.n
        generated = e.turns.by_rollout(e.turns.generation)
        kept = np.zeros(e.n, _KEPT)
        kept["row"], kept["tokens"], kept["length"] = e.rows, generated.hashes(), generated.lengths
        kept["file"] = self._files.setdefault(e.file or "", len(self._files))
        keys = (
            content or _key(name, len(self._ids) + k)
            for k, (name, content) in enumerate(zip(ids, contents, strict=True))
        )
        kept["id"] = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2)
        kept["group"] = [-1 if name is None else self._groups.setdefault(name, len(self._groups)) for name in groups]
        if e.reward is not None and e.reward_null is not None:
            kept["reward"], kept["scored"] = e.reward, ~e.reward_null
        self._ids += ids
        self._batches.append(kept)
        yield from ()

    def finish(self) -> list[Violation]:
        """The duplicates, and R503 for every group of two or more whose rewards are all equal, at its first rollout."""
        kept = np.concatenate([np.zeros(0, _KEPT), *self._batches])
        files, groups = list(self._files), list(self._groups)

        def fault(r: int, code: str, **more: Any) -> Violation:
            return Violation(code, int(kept["row"][r]), self._ids[r], file=files[kept["file"][r]] or None, **more)

        def location(r: int) -> str:
            return f"{files[kept['file'][r]]} row {kept['row'][r]}".strip()

        first = first_like(*kept["id"].T)
        is_copy = first != np.arange(len(kept))
        violations = [
            fault(r, "D701", detail=f"first seen at {location(int(first[r]))}")
            for r in np.flatnonzero(is_copy).tolist()
        ]
        in_group = ~is_copy & (kept["group"] >= 0)
        rows = np.flatnonzero(in_group & (kept["length"] > 0))
        first = first_like(*(kept[name][rows] for name in ("group", "tokens", "length")))
        for k in np.flatnonzero(first != np.arange(len(rows))).tolist():
            twin = int(rows[first[k]])
            violations.append(fault(int(rows[k]), "D702", detail=f"same tokens as {self._ids[twin] or location(twin)}"))
        rows = np.flatnonzero(in_group & kept["scored"])
        _, leads, group, sizes = np.unique(
            kept["group"][rows], return_index=True, return_inverse=True, return_counts=True
        )
        reward = kept["reward"][rows]
        varies = np.bincount(group, weights=reward != reward[leads][group], minlength=len(leads)) > 0
        for g in np.flatnonzero((sizes > 1) & ~varies & np.isfinite(reward[leads])).tolist():
            r = int(rows[leads[g]])
            got = f"{kept['reward'][r]:g} for all {sizes[g]}"
            violations.append(fault(r, "R503", got=got, detail=f"group {groups[kept['group'][r]]}"))
        return violations


def _key(name: str | None, number: int) -> bytes:
    """16 bytes that no other rollout has: of its id, or of its number among all where it has none."""
    if name is None:
        return xxhash.xxh3_128_digest(str(number).encode(), 1)
    return xxhash.xxh3_128_digest(name.encode("utf-8", "surrogatepass"))
