"""What ``gymdata query`` costs beyond its start-up: 100,000 rollouts with tokens, touching only reward columns.

Whole processes; the rival is the same query over one rollout, so the difference is what the data costs, in seconds.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gymdata.rollouts.schema import ROLLOUTS, TURN
from gymdata.store import write_run_json
from tests.benchmarks.rows import Row, interleave, seconds
from tests.rollout_files import write_table

ROWS, TURNS, TOKENS = 100_000, 2, 64
QUERIES = {
    "reward by task": "SELECT task_id, avg(reward), count(*) FROM rollouts GROUP BY 1 ORDER BY 2 DESC LIMIT 5",
    "named reward": "SELECT avg(reward_exact), count(reward_exact) FROM rollouts",
}


def write_rollouts(folder: Path, n: int) -> Path:
    """A run of ``n`` rollouts of two turns with random tokens."""
    rng = np.random.default_rng(0)

    def lists(values: pa.Array, size: int) -> pa.ListArray:
        return pa.ListArray.from_arrays(pa.array(np.arange(len(values) // size + 1, dtype=np.int32) * size), values)

    m = n * TURNS
    ids = lists(pa.array(rng.integers(0, 50_000, m * TOKENS, dtype=np.int32)), TOKENS)
    turn: dict[str, Any] = {
        "parent": pa.array(np.tile(np.arange(TURNS, dtype=np.int32) - 1, n)),
        "prefix_length": pa.array(np.tile(np.arange(TURNS, dtype=np.int32) * 2 * TOKENS, n)),
        "prompt_delta_ids": ids,
        "generation_token_ids": ids,
        "generation_log_probs": lists(pa.array(-rng.random(m * TOKENS, dtype=np.float32)), TOKENS),
        "finish_reason": pa.array(["stop"] * m),
        "digest": pa.array(np.zeros(m, np.int64)),
    }
    turns = pa.StructArray.from_arrays([turn.get(f.name, pa.nulls(m, f.type)) for f in TURN], fields=list(TURN))
    message = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer", "turn": 0}]
    reward = rng.integers(0, 2, n).astype(float)
    columns: dict[str, Any] = {
        "rollout_id": [f"{i:032x}" for i in range(n)],
        "task_id": [f"task-{i // 8}" for i in range(n)],
        "group_id": [f"group-{i // 8}" for i in range(n)],
        "rollout_index": np.arange(n) % 8,
        "reward": reward,
        "rewards": [[{"name": "exact", "value": r}, {"name": "style", "value": 0.5}] for r in reward.tolist()],
        "messages": [message] * n,
        "turns": lists(turns, TURNS),
    }
    zero = {pa.string(): "", pa.timestamp("us", tz="UTC"): 0}
    arrays = []
    for f in ROLLOUTS.schema:
        values = columns.get(f.name, [zero.get(f.type, 1)] * n)
        arrays.append(values if isinstance(values, pa.Array) else pa.array(values, f.type))
    table = pa.Table.from_arrays(arrays, schema=ROLLOUTS.arrow)
    write_table(table, folder / "rollouts" / "part-00000.parquet", ROLLOUTS)
    write_run_json(folder, {"run_id": "bench"})
    return folder


def command(sql: str, run: Path) -> Callable[[], object]:
    return lambda: subprocess.run(
        [sys.executable, "-m", "gymdata.cli", "query", sql, str(run)], check=True, stdout=subprocess.DEVNULL
    )


def main() -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        large, one = write_rollouts(Path(folder, "large"), ROWS), write_rollouts(Path(folder, "one"), 1)
        for name, sql in QUERIES.items():
            timing = interleave(command(sql, large), command(sql, one))
            extra = statistics.median(timing.ours) - statistics.median(timing.rival)
            what = f"query {name}, {ROWS:,} rollouts: seconds beyond start-up"
            rows.append(Row(what, seconds(timing.ours), seconds(timing.rival) + " (one rollout)", extra, at_most=1.0))
    return rows
