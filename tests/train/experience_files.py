"""Files of small experiences, and the log-probabilities of their tokens, computed one row alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
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


N = 7


def reference_logps(policy: Path, row: dict[str, Any]) -> Any:
    """float64 log π of every token after the first, one row alone, no padding, at the row's temperature."""
    import torch
    from transformers import AutoModelForCausalLM

    model = _models.setdefault(policy, AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64))
    ids = torch.tensor([row["input_ids"]])
    logits = model(input_ids=ids).logits[0, :-1] / (row["temperature"] or 1.0)
    return model, torch.log_softmax(logits, dim=-1)[torch.arange(ids.shape[1] - 1), ids[0, 1:]]


_models: dict[Path, Any] = {}


def experience_rows(policy: Path, temperatures: tuple[float, ...] = (0.5,), noise: float = 0.4) -> list[dict[str, Any]]:
    """Prompt, a generation, tool tokens, a generation; saved log-probs are the model's own plus noise."""
    rng = np.random.default_rng(5)
    rows = []
    for i in range(N):
        mask = [0] * int(rng.integers(2, 6)) + [1] * int(rng.integers(2, 6)) + [0] * 3 + [1] * int(rng.integers(1, 6))
        ids = rng.integers(3, 200, len(mask)).tolist()
        row: dict[str, Any] = {
            "run_id": "run", "task_id": f"t{i // 2}", "group_id": f"g{i // 2}", "rollout_id": f"rollout-{i}",
            "sequence_index": 0,
            "input_ids": ids, "loss_mask": mask, "turn_starts": [mask.index(1)], "reward": 1.0,
            "weight": 1.0 + 0.5 * (i % 2), "temperature": temperatures[i % len(temperatures)], "policy_hash": "other",
            "policy_version": 0,
        }  # fmt: skip
        logps = [0.0, *reference_logps(policy, row)[1].tolist()]
        row["logprobs"] = [lp + noise * float(z) if m else 0.0
                           for lp, m, z in zip(logps, mask, rng.normal(size=len(mask)), strict=True)]  # fmt: skip
        row["advantages"] = [float(a) if m else 0.0 for a, m in zip(rng.normal(size=len(mask)), mask, strict=True)]
        row["returns"] = row["advantages"]
        row["ref_logprobs"] = [lp - 0.3 * m for lp, m in zip(row["logprobs"], mask, strict=True)]
        rows.append(row)
    return rows


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    schema = pa.schema([f for f in EXPERIENCES.schema if f.name in rows[0]])
    return write_table(pa.Table.from_pylist(rows, schema=schema), folder / "experiences.parquet", EXPERIENCES)
