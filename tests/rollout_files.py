"""Small rollouts with literal ids, and run folders of them: two calls each, branches, breaks, retries, scores."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gymdata.rollouts.schema import EXPERIENCES, ROLLOUTS, Table
from gymdata.rollouts.turns import Call, TurnEncoder
from gymdata.store.columns import content_hashes
from gymdata.store.journal import line_of
from gymdata.store.tables import shaped, write_batches

#: Which prompt and generation each call had: ids only, log-probs are −1, −2, … (over 64 of them in a file are L306).
Calls = Sequence[tuple[Sequence[int], Sequence[int]]]


def with_hashes(data: pa.Table) -> pa.Table:
    """A table; of rollouts with the hashes that they lack."""
    for name, hashes in content_hashes(data["turns"]).items() if "turns" in data.column_names else ():
        if name in data.column_names and data[name].null_count:
            data = data.set_column(data.schema.get_field_index(name), name, hashes)
    return data


def write_table(data: pa.Table, path: str | Path, table: Table) -> Path:
    """A file of ``table``, .parquet or .jsonl, with the hashes that rollouts lack. Returns the path."""
    file, rows = Path(path), shaped(with_hashes(data), table)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_batches(rows.to_batches(), file, table, rows.schema)
    return file


def two_turns(task: int, answer: int) -> Calls:
    """Prompt ``[1, task]``, a call, a tool answer ``[30, 31]``, and an answer."""
    prompt, call = [1, task], [10, 11, 2]
    return [(prompt, call), (prompt + call + [30, 31], [answer, 2])]


def rollout(
    task: str,
    index: int,
    reward: float | None,
    calls: Calls,
    *,
    text: str | None = None,
    logprob: float = -1.0,
    **columns: Any,
) -> dict[str, Any]:
    """One rollouts row; ``columns`` replace what is made here. ``logprob``: of the first token of each generation."""
    encoder = TurnEncoder()
    for prompt, generation in calls:
        logprobs = np.float32(logprob) - np.arange(len(generation), dtype=np.float32)
        encoder.add(Call(np.array(prompt, np.int32), np.array(generation, np.int32), logprobs, "stop"))
    said = text if text is not None else " ".join(map(str, calls[-1][1] if calls else []))
    messages = [{"role": "user", "content": f"question {task}"}]
    for turn in range(len(calls) - 1):
        messages += [{"role": "assistant", "content": "calling", "turn": turn}, {"role": "tool", "content": "42"}]
    messages.append({"role": "assistant", "content": said, "turn": max(len(calls) - 1, 0)})
    row = {
        "rollout_id": f"{task}-{index}",
        "run_id": "run-1",
        "task_id": task,
        "group_id": f"group-{task}",
        "rollout_index": index,
        "policy": "tiny",
        "policy_hash": "hash",
        "policy_version": 0,
        "status": "completed",
        "stop_reason": "stop",
        "finish_reason": "stop",
        "reward": reward,
        "rewards": [{"name": "exact", "value": reward}],
        "temperature": 1.0,
        "n_turns": len(encoder.turns),
        "n_breaks": encoder.n_breaks,
        "n_context_tokens": encoder.n_context_tokens,
        "n_generated_tokens": encoder.n_generated_tokens,
        "messages": messages,
        "tools": "[]",
        "task": json.dumps({"task_id": task}),
        "extra": "{}",
        "turns": encoder.turns,
        "started_at": datetime(2026, 1, 1, tzinfo=UTC),
        "duration_s": 0.5,
    }
    return row | columns


def rollouts_table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=ROLLOUTS.arrow)


def write_run(folder: Path, rows: Sequence[dict[str, Any]], suffix: str = "parquet") -> Path:
    """A run folder with one sealed part."""
    part = f"rollouts/part-00000.{suffix}"
    write_table(rollouts_table(rows), folder / part, ROLLOUTS)
    if suffix == "jsonl":
        edit_segment(folder / part, "", "")
    # As little as readers need; without a hash, tests may change the part.
    facts = {"run_id": "run-1", "files": [{"path": part, "rows": len(rows)}]}
    (folder / "run.json").write_text(json.dumps(facts))
    return folder


def edit_segment(file: Path, old: str, new: str) -> None:
    """Replace a text in lines of JSON; each has the checksum of its content afterwards."""
    bodies = (re.sub(r',"crc32":"[0-9a-f]{8}"}$', "}", line) for line in file.read_text().splitlines())
    file.write_bytes(b"".join(line_of(body.replace(old, new).encode()) for body in bodies))


def training_data(algorithm: str, source: Path | pa.Table, **settings: Any) -> Any:
    """What ``gymdata train-ALGORITHM`` trains of a file or of a table, made in one part."""
    from gymdata.commands.train.settings import TRAINERS

    config = TRAINERS[algorithm].load(None, {"model": "model", "output": "out", **settings})
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(source, pa.Table):
            source = write_table(source, Path(folder) / "table.parquet", config.table)
        (data,) = config.parts(str(source), 1_000_000)
        return data


BREAK = [([1, 5], [10, 2]), ([1, 5, 10, 2, 7], [11, 2]), ([1, 6, 9], [12, 13])]


RETRY = [([1, 5], [10, 2]), ([1, 5], [20, 2]), ([1, 5, 20, 2, 7], [21])]


BRANCH = [([1, 5], [10, 2]), ([1, 5, 10, 2, 7, 7], [11, 2]), ([1, 5, 10, 2, 7, 8], [12, 2])]


SHAPES = [two_turns(5, 40), [([1, 2, 3], [4, 2])], BREAK, RETRY, BRANCH, [], [([1, 2], []), ([1, 2, 3], [9])]]


def column(shapes: list[Any]) -> tuple[pa.ListArray, pa.Array]:
    table = rollouts_table([rollout("t", i, 1.0, calls) for i, calls in enumerate(shapes)])
    return table["turns"].combine_chunks(), table["rollout_id"].combine_chunks()


def scored_run(folder: Path, tasks: int = 5) -> Path:
    """Four rollouts a task with rewards 0, 1, 0.5 and none."""
    rewards = (0.0, 1.0, 0.5, None)
    return write_run(
        folder, [rollout(f"t{t}", i, r, two_turns(5 + t, 40 + i)) for t in range(tasks) for i, r in enumerate(rewards)]
    )


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


def write_experiences(folder: Path, rows: list[dict[str, Any]]) -> Path:
    schema = pa.schema([f for f in EXPERIENCES.schema if f.name in rows[0]])
    return write_table(pa.Table.from_pylist(rows, schema=schema), folder / "experiences.parquet", EXPERIENCES)
