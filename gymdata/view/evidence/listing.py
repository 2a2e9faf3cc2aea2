"""The list of rollouts, and of groups, that a page shows of a selection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.rollouts.messages import RolloutRow
from gymdata.view.evidence.facets import Column
from gymdata.view.evidence.index import RolloutIndex, Snapshot
from gymdata.view.evidence.selection import PAGE_GROUPS, PAGE_ROWS, Query, Selection, page_slice
from gymdata.view.evidence.stages import facts_of
from gymdata.view.text import Values

LISTED = [
    *("rollout_id", "run_id", "task_id", "group_id", "rollout_index", "status", "stop_reason", "reward", "rewards"),
    *("n_turns", "n_breaks", "n_context_tokens", "n_generated_tokens", "duration_s"),
]


@dataclass(frozen=True, slots=True)
class Listing:
    """Pages of lists over one snapshot. A row has its texts."""

    index: RolloutIndex
    snapshot: Snapshot

    def by_row(self, query: Query, selection: Selection, fields: Iterable[Column]) -> Values:
        """One page of rollouts, with the ``fields`` of tasks that are among its columns."""
        page, pages, on_page = page_slice(query.page, len(selection.rows), PAGE_ROWS)
        numbers = selection.rows[on_page]
        listed = self._rows(numbers, query.text)
        for row, number in zip(listed, numbers.tolist(), strict=True):
            row["fields"] = {field.name: field.of(number) for field in fields if field.name in query.shown}
        return {"rows": listed, "page": page, "pages": pages, "scale": scale_of(self.snapshot)}

    def by_group(self, query: Query, selection: Selection) -> Values:
        """One page of groups: of each, the rollouts of the selection, and what holds of all of its rollouts."""
        names = self.snapshot.table["group_id"].take(pa.array(selection.rows)).combine_chunks().dictionary_encode()
        codes = names.indices.to_numpy(zero_copy_only=False)
        page, pages, shown_codes = page_slice(query.page, len(names.dictionary), PAGE_GROUPS)
        on_page = np.flatnonzero((codes >= shown_codes.start) & (codes < shown_codes.stop))
        groups: dict[int, list[RolloutRow]] = {}
        for code, row in zip(codes[on_page].tolist(), self._rows(selection.rows[on_page], query.text), strict=True):
            groups.setdefault(code, []).append(row)
        shown = []
        for _, rows in sorted(groups.items()):
            group_rewards = self.snapshot.table["reward"].take(
                pa.array(self.snapshot.where("group_id", rows[0]["group_id"]), pa.int64())
            )
            rewards = [reward for reward in group_rewards.to_pylist() if reward is not None and np.isfinite(reward)]
            shown.append(
                {
                    "id": rows[0]["group_id"],
                    "task": rows[0]["task_id"],
                    "rows": rows if query.sort else sorted(rows, key=lambda row: row["rollout_index"]),
                    "size": len(group_rewards),
                    "mean": sum(rewards) / len(rewards) if rewards else None,
                    "mixed": len(set(rewards)) > 1,
                }
            )
        return {"groups": shown, "page": page, "pages": pages, "scale": scale_of(self.snapshot)}

    def _rows(self, numbers: Any, searched: str) -> list[RolloutRow]:
        rows: list[RolloutRow] = self.snapshot.table.select(LISTED).take(pa.array(numbers, pa.int64())).to_pylist()
        lines = self.index.lines(self.snapshot, numbers.tolist(), searched)
        for row, number in zip(rows, numbers.tolist(), strict=True):
            row["parts"] = [(part["name"], part["value"]) for part in row.pop("rewards")]
            row["line"] = lines[number]
        return rows


def run_names(snapshot: Snapshot, *, several: bool = False) -> dict[str, str]:
    """Each run's id and what its folder is called. ``several``: nothing where there is one run, which needs no name."""
    names = {run: str(run) for run in sorted(pc.unique(snapshot.table["run_id"]).to_pylist())}
    if len(names) > 1:
        called = {str(facts_of(path).get("run_id")): path for path in snapshot.paths}
        short = {run: called[run].name for run in names if run in called}
        once = Counter(short.values())
        names |= {run: name if name and once[name] == 1 else str(called[run]) for run, name in short.items()}
    return {} if several and len(names) == 1 else names


def scale_of(snapshot: Snapshot) -> tuple[float, float]:
    """The least and the highest reward of all, at least 0 to 1."""
    bounds = pc.min_max(snapshot.table["reward"]).as_py()
    low, high = bounds["min"], bounds["max"]
    if low is None or not np.isfinite([low, high]).all():
        return 0.0, 1.0
    return min(0.0, low), max(1.0, high)
