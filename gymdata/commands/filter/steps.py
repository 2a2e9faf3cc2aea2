"""Choosing rollouts by what is known about them without their tokens: the steps of ``gymdata filter``.

Invariants: the order of the rows changes nothing but the order of the rows; every row that a step drops is counted
under one reason; random draws are seeded hashes of the ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa


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
    """The table ``rows`` of a DuckDB connection, from which steps delete: ``row``, ``rollout_id``, ``group_id``,
    ``rollout_index`` and what steps need. ``steps``: how many rows each dropped, and why."""

    def __init__(self, con: Any) -> None:
        self.steps: list[Step] = []
        self._con = con
        self._left = self.counts()

    def condition(self, name: str, text: str, column: str) -> None:
        """Keep the rows for which ``column`` is true."""
        self._drop(name, text, {"a value is missing": f"{column} IS NULL", "not true": f"NOT {column}"})

    def dedupe(self, *, ranked: bool) -> None:
        """Of the rows of a group with equal ``key``, keep the one with the highest ``score`` (if ``ranked``). A row without
        a key duplicates no other row."""
        order = ["score DESC NULLS LAST", "rollout_index"] if ranked else ["rollout_index"]
        double = _after_first(1, "FROM rows WHERE key IS NOT NULL", ["group_id", "key"], order)
        self._drop("dedupe", "same generated tokens in its group", {"same as another of its group": double})

    def best(self, n: int, by: str) -> None:
        """Keep the ``n`` rows of each group with the highest ``score``; those without one go. Ties go to the lower index."""
        beyond = _after_first(n, "FROM rows", ["group_id"], ["score DESC", "rollout_index"])
        self._drop("best-n", f"{n} by {by}", {f"no {by}": "score IS NULL", f"not among the best {n}": beyond})

    def balance(self, by: str, had: Sequence[str], seed: int) -> None:
        """Keep as many rows of every ``category`` as the rarest one has left, drawn by a seeded hash of their ids. ``had``:
        the categories of the input, also those of which no row is left."""
        counts = dict(self._all("SELECT category::VARCHAR, count(*) FROM rows WHERE category IS NOT NULL GROUP BY 1"))
        least = min(counts.values(), default=0)
        over = _after_first(least, "FROM rows", ["category"], [f"md5('{seed} ' || rollout_id)"])
        notes = [f"{category}: {n:,} before" for category, n in sorted(counts.items())]
        notes += [f"{category}: none was left" for category in sorted(set(had) - counts.keys())]
        reasons = {f"no {by}": "category IS NULL", f"over the {least:,} of the rarest": over}
        self._drop("balance", f"{len(counts):,} values of {by}", reasons, notes)

    def categories(self) -> list[str]:
        """The distinct values of ``category`` that are left, as text."""
        return [text for (text,) in self._all("SELECT DISTINCT category::VARCHAR FROM rows WHERE category IS NOT NULL")]

    def left(self) -> pa.Table:
        """The rows that are left."""
        return self._con.sql("FROM rows").to_arrow_table()

    def _drop(self, name: str, detail: str, reasons: Mapping[str, str], notes: Sequence[str] = ()) -> None:
        """Delete the rows for which any of ``reasons`` (text → SQL) is true; each is counted under the first that is."""
        rows_in, groups_in = self._left
        deleted = {reason: self._all(f"DELETE FROM rows WHERE {sql}")[0][0] for reason, sql in reasons.items()}
        rows_out, groups_out = self._left = self.counts()
        dropped = {reason: n for reason, n in deleted.items() if n}
        self.steps.append(Step(name, detail, rows_in, rows_out, groups_in, groups_out, dropped, list(notes)))

    def counts(self) -> tuple[int, int]:
        """How many rows are left, of how many groups."""
        rows, groups = self._all("SELECT count(*), count(DISTINCT group_id) FROM rows")[0]
        return rows, groups

    def _all(self, sql: str) -> list[Any]:
        rows: list[Any] = self._con.execute(sql).fetchall()
        return rows


def _after_first(n: int, rows: str, alike: Sequence[str], order: Sequence[str]) -> str:
    """SQL that is true for ``rows`` but the first ``n`` of those that are alike: by ``order``, then by rollout id,
    whatever their order in the file."""
    place = f"row_number() OVER (PARTITION BY {', '.join(alike)} ORDER BY {', '.join([*order, 'rollout_id'])})"
    return f"row IN (SELECT row {rows} QUALIFY {place} > {n})"
