"""A file of small experiences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from gymdata.rollouts.schema import EXPERIENCES
from gymdata.store import write_table


def experiences(folder: Path, rows: list[dict[str, Any]]) -> str:
    """Experiences of the given columns, the others filled in."""
    full = [
        {
            "run_id": "run", "task_id": f"t{i // 2}", "group_id": f"g{i // 2}", "rollout_id": f"r{i}", "sequence_index": 0,
            "input_ids": [5, 6, 7 + i], "loss_mask": [0, 1, 1], "logprobs": [0.0, -1.0, -1.0],
            "advantages": [0.0, 1.0, 1.0], "returns": [0.0, 1.0, 1.0], "turn_starts": [1], "reward": 1.0, "weight": 1.0,
            "temperature": 1.0, "policy_hash": f"policy-{i % 2}", "policy_version": 0, **row,
        }
        for i, row in enumerate(rows)
    ]  # fmt: skip
    names = {name for row in full for name in row}
    schema = pa.schema([field for field in EXPERIENCES.schema if field.name in names])
    return str(write_table(pa.Table.from_pylist(full, schema=schema), folder / "experiences.parquet", EXPERIENCES))
