"""Which rollout of its group an imported row is, where the row does not say.

Invariant: a row that repeats an earlier one, byte for byte, is the same rollout and gets the same place, so that the
imported run shows the duplicate (D701) as its file does.
"""

from __future__ import annotations

from collections import Counter

import xxhash


class Numbering:
    """Places of the rows of one import, given in the order of the rows."""

    def __init__(self) -> None:
        self._next: Counter[str] = Counter()
        self._known: dict[bytes, tuple[str, int]] = {}

    def place(self, content: bytes, group: str | None) -> tuple[str, int]:
        """(group, index in it) of a row. Without ``group`` the row is a group of its own."""
        key = xxhash.xxh3_128_digest(content)
        known = self._known.get(key)
        if known is not None:
            return known
        name = group or f"row-{self._next.total()}"
        place = self._known[key] = name, self._next[name]
        self._next[name] += 1
        return place
