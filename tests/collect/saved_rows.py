"""What a run that was collected holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gymdata.store import read_failures, read_table

_TIMES = ("started_at", "duration_s")


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The run's rows without times, in the order of task and index."""
    rows = read_table(run).to_pylist()
    for row in rows:
        for key in _TIMES:
            del row[key]
    return sorted(rows, key=lambda row: (row["task_id"], row["rollout_index"]))


def failures_of(run: Path) -> list[dict[str, Any]]:
    return read_failures(run)


def samples_of(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What was sampled and scored, without the names that runs give it."""
    names = ("prompt_delta_ids", "generation_token_ids", "prefix_length")
    return [(row["messages"], row["reward"], [[t[name] for name in names] for t in row["turns"]]) for row in rows]


def log_probs_of(rows: list[dict[str, Any]]) -> list[float]:
    return [value for row in rows for turn in row["turns"] for value in turn["generation_log_probs"]]
