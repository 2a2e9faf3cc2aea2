"""The list of rollouts, and of groups, that a page shows of a selection."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.commands.view.evidence.facets import task_fields
from gymdata.commands.view.evidence.lines import TEXTS, lines_of
from gymdata.commands.view.evidence.selection import PAGE_GROUPS, PAGE_ROWS, Query, Rows, page_slice
from gymdata.commands.view.evidence.tables import Snapshot, facts_of
from gymdata.commands.view.text import Values
from gymdata.rollouts.messages import RolloutRow

LISTED = [
    *("rollout_id", "run_id", "task_id", "group_id", "rollout_index", "status", "stop_reason", "reward", "rewards"),
    *("n_turns", "n_breaks", "n_context_tokens", "n_generated_tokens", "duration_s"),
]


def by_row(snapshot: Snapshot, query: Query, rows: Rows) -> Values:
    """One page of rollouts, with the fields of tasks that are among its columns."""
    page, pages, on_page = page_slice(query.page, len(rows), PAGE_ROWS)
    fields = [field for field in task_fields(snapshot) if field.name in query.shown]
    listed = listed_rows(snapshot, rows[on_page], query.text)
    for row, number in zip(listed, rows[on_page].tolist(), strict=True):
        row["fields"] = {field.name: field.of(number) for field in fields}
    return {"rows": listed, "page": page, "pages": pages}


def by_group(snapshot: Snapshot, query: Query, rows: Rows) -> Values:
    """One page of groups: of each, the rollouts of the selection, and what holds of all of its rollouts."""
    names = snapshot.table["group_id"].take(pa.array(rows)).combine_chunks().dictionary_encode()
    codes = names.indices.to_numpy(zero_copy_only=False)
    page, pages, shown_codes = page_slice(query.page, len(names.dictionary), PAGE_GROUPS)
    on_page = np.flatnonzero((codes >= shown_codes.start) & (codes < shown_codes.stop))
    members: dict[int, list[RolloutRow]] = {}
    for code, row in zip(codes[on_page].tolist(), listed_rows(snapshot, rows[on_page], query.text), strict=True):
        members.setdefault(code, []).append(row)
    groups = []
    for _, of_group in sorted(members.items()):
        mates = snapshot.where("group_id", of_group[0]["group_id"])
        rewards = finite_rewards(snapshot, mates)
        groups.append(
            {
                "id": of_group[0]["group_id"],
                "task": of_group[0]["task_id"],
                "rows": of_group if query.sort else sorted(of_group, key=lambda row: row["rollout_index"]),
                "size": len(mates),
                "mean": sum(rewards) / len(rewards) if rewards else None,
                "mixed": len(set(rewards)) > 1,
            }
        )
    return {"groups": groups, "page": page, "pages": pages}


def listed_rows(snapshot: Snapshot, numbers: Any, searched: str = "") -> list[RolloutRow]:
    """What a list shows of some rows. Raises DataError."""
    rows: list[RolloutRow] = snapshot.table.select(LISTED).take(pa.array(numbers, pa.int64())).to_pylist()
    for row, line in zip(rows, lines_of(snapshot.read(numbers, TEXTS), searched) if rows else (), strict=True):
        row["parts"] = [(part["name"], part["value"]) for part in row.pop("rewards")]
        row["line"] = line
    return rows


def finite_rewards(snapshot: Snapshot, numbers: list[int]) -> list[float]:
    rewards = snapshot.table["reward"].take(pa.array(numbers, pa.int64())).to_pylist()
    return [reward for reward in rewards if reward is not None and np.isfinite(reward)]


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
