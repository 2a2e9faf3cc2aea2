"""Choosing rollouts by what is known about them without their tokens: the steps of ``gymdata filter``.

Invariants: the order of the rows changes nothing but the order of the rows; every row that a step drops is counted
under one reason; random draws are seeded hashes of the ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


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
    """The table ``rows`` of a DuckDB connection: ``row``, ``rollout_id``, ``group_id``, ``rollout_index`` and what steps
    need. A step makes ``is_left`` false where it drops a row. ``steps``: how many rows each dropped, and why."""

    def __init__(self, con: Any) -> None:
        self.steps: list[Step] = []
        self._con = con
        con.execute("ALTER TABLE rows ADD COLUMN is_left BOOLEAN DEFAULT true")

    def condition(self, name: str, text: str, column: str) -> None:
        """Keep the rows for which ``column`` is true."""
        self._drop(name, text, {"a value is missing": f"{column} IS NULL", "not true": f"NOT {column}"})

    def dedupe(self, *, ranked: bool) -> None:
        """Of the rows of a group with equal ``key``, keep the one with the highest ``score`` (if ``ranked``). A row without
        a key duplicates no other row."""
        order = "score DESC NULLS LAST, rollout_index" if ranked else "rollout_index"
        double = f"key IS NOT NULL AND {_after_first(1, 'group_id, key', order)}"
        self._drop("dedupe", "same generated tokens in its group", {"same as another of its group": double})

    def best(self, n: int, by: str) -> None:
        """Keep the ``n`` rows of each group with the highest ``score``; those without one go. Ties go to the lower index."""
        beyond = _after_first(n, "group_id", "score DESC, rollout_index")
        self._drop("best-n", f"{n} by {by}", {f"no {by}": "score IS NULL", f"not among the best {n}": beyond})

    def balance(self, by: str, seed: int) -> None:
        """Keep as many rows of every ``category`` as the rarest one has left, drawn by a seeded hash of their ids."""
        counting = "SELECT category::VARCHAR, count(*) FILTER (is_left) FROM rows WHERE category IS NOT NULL"
        counts = self._all(f"{counting} GROUP BY 1 ORDER BY 1")
        left = [n for _, n in counts if n]
        least = min(left, default=0)
        over = _after_first(least, "category", f"md5('{seed} ' || rollout_id)")
        reasons = {f"no {by}": "category IS NULL", f"over the {least:,} of the rarest": over}
        notes = [f"{category}: {f'{n:,} before' if n else 'none was left'}" for category, n in counts]
        self._drop("balance", f"{len(left):,} values of {by}", reasons, notes)

    def _drop(self, name: str, detail: str, reasons: Mapping[str, str], notes: Sequence[str] = ()) -> None:
        """Drop the rows for which any of ``reasons`` (text → SQL) is true; each is counted under the first that is."""
        left = "SELECT count(*), count(DISTINCT group_id) FROM rows WHERE is_left"
        rows_in, groups_in = self._all(left)[0]
        drop = "UPDATE rows SET is_left = false WHERE is_left AND"
        dropped = {reason: self._all(f"{drop} {sql}")[0][0] for reason, sql in reasons.items()}
        rows_out, groups_out = self._all(left)[0]
        dropped = {reason: n for reason, n in dropped.items() if n}
        self.steps.append(Step(name, detail, rows_in, rows_out, groups_in, groups_out, dropped, list(notes)))

    def _all(self, sql: str) -> list[Any]:
        rows: list[Any] = self._con.execute(sql).fetchall()
        return rows


def _after_first(n: int, alike: str, order: str) -> str:
    """SQL that is true for the rows that are left but the first ``n`` of those that are ``alike``: by ``order``, then by
    rollout id, whatever their order in the file."""
    place = f"row_number() OVER (PARTITION BY {alike} ORDER BY {order}, rollout_id)"
    return f"row IN (SELECT row FROM rows WHERE is_left QUALIFY {place} > {n})"
