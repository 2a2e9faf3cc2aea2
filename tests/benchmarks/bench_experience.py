"""``gymdata experience`` on 100,000 rollouts against copying the file's columns with pyarrow, encodings and all."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gymdata.api.crediting import build_experiences
from gymdata.core.schema import ROLLOUTS
from gymdata.core.tokens import turn_digest
from gymdata.store import write_run_json
from gymdata.store.tables import write_batches
from tests.benchmarks.rows import Row, interleave, seconds

COUNT, GROUP, TURNS = 100_000, 8, 3


def rollouts(n: int, first: int = 0, turns: int = TURNS) -> pa.Table:
    """Chains of ``turns`` calls: about 90 prompt tokens, then 40 to 120 sampled ones and 20 of a tool each time."""
    rng = np.random.default_rng(first)
    deltas = np.where(
        np.arange(n * turns) % turns == 0, rng.integers(60, 120, n * turns), rng.integers(10, 30, n * turns)
    )
    generations = rng.integers(40, 120, n * turns)
    delta_ends, generation_ends = (
        np.concatenate(([0], np.cumsum(deltas))),
        np.concatenate(([0], np.cumsum(generations))),
    )
    delta = np.minimum(rng.zipf(1.2, delta_ends[-1]), 150_000).astype(np.int32)
    generation = np.minimum(rng.zipf(1.2, generation_ends[-1]), 150_000).astype(np.int32)
    log_probs = -rng.exponential(0.4, generation_ends[-1]).astype(np.float32)
    turn = np.arange(n * turns) % turns
    held = np.concatenate(([0], np.cumsum(deltas + generations)[:-1]))
    prefix = held - np.repeat(held[::turns], turns)
    digests, above = [], 0
    for t in range(n * turns):
        above = 0 if turn[t] == 0 else above
        d, g = slice(delta_ends[t], delta_ends[t + 1]), slice(generation_ends[t], generation_ends[t + 1])
        above = turn_digest(above, int(prefix[t]), delta[d], generation[g], log_probs[g])
        digests.append(above)
    kind = ROLLOUTS.schema.field("turns").type.value_type

    def lists(ends: np.ndarray, values: np.ndarray) -> pa.Array:
        return pa.ListArray.from_arrays(ends.astype(np.int32), values)

    made = {
        "parent": pa.array(turn - 1, pa.int32()), "prefix_length": pa.array(prefix, pa.int32()),
        "prompt_delta_ids": lists(delta_ends, delta), "generation_token_ids": lists(generation_ends, generation),
        "generation_log_probs": lists(generation_ends, log_probs), "finish_reason": pa.array(["stop"] * (n * turns)),
        "digest": pa.array(digests, pa.int64()),
    }  # fmt: skip
    struct = pa.StructArray.from_arrays(
        [made.get(f.name, pa.nulls(n * turns, f.type)) for f in kind], fields=list(kind)
    )
    index = np.arange(first, first + n)
    said = [[{"role": "user", "content": f"What is {i} + {i}?"}, {"role": "assistant", "content": "It is " + "x" * 300,
             "turn": 0}] for i in range(64)]  # fmt: skip
    columns = {
        "rollout_id": [f"{i:032x}" for i in index], "run_id": ["run"] * n, "task_id": [f"task-{i // GROUP}" for i in index],
        "group_id": [f"group-{i // GROUP}" for i in index], "rollout_index": index % GROUP, "policy": ["tiny"] * n,
        "policy_hash": ["hash"] * n, "policy_version": [0] * n, "status": ["completed"] * n, "stop_reason": ["stop"] * n,
        "finish_reason": ["stop"] * n, "reward": rng.integers(0, 3, n) / 2.0, "rewards": [[]] * n,
        "temperature": [1.0] * n, "n_turns": [turns] * n, "n_breaks": [0] * n,
        "n_context_tokens": deltas.reshape(n, turns).sum(1), "n_generated_tokens": generations.reshape(n, turns).sum(1),
        "messages": [said[i % 64] for i in range(n)], "tools": ["[]"] * n, "task": ["{}"] * n, "extra": ["{}"] * n,
        "turns": pa.ListArray.from_arrays(np.arange(0, n * turns + 1, turns, dtype=np.int32), struct),
        "started_at": [datetime(2026, 1, 1, tzinfo=UTC)] * n, "duration_s": [0.5] * n,
    }  # fmt: skip
    arrays = [c if isinstance(c, pa.Array) else pa.array(c, f.type) for f, c in
              ((f, columns[f.name]) for f in ROLLOUTS.schema)]  # fmt: skip
    return pa.Table.from_arrays(arrays, schema=ROLLOUTS.schema)


def write_run(folder: Path, n: int = COUNT) -> Path:
    file = folder / "rollouts" / "part-00000.parquet"
    file.parent.mkdir(parents=True)
    parts = (batch for at in range(0, n, 10_000) for batch in rollouts(min(10_000, n - at), at).to_batches())
    write_batches(parts, file, ROLLOUTS, ROLLOUTS.schema)
    write_run_json(folder, {"run_id": "run", "files": [{"path": str(file.relative_to(folder)), "rows": n}]})
    return folder


def copy(source: Path, target: Path) -> None:
    """Every column, row group by row group, written as it was: zstd, dictionaries, split floats, checksums."""
    file = pq.ParquetFile(source)
    leaves = {file.schema.column(i).path for i in range(len(file.schema.names))}
    with pq.ParquetWriter(
        target, file.schema_arrow, compression="zstd", compression_level=1, write_page_checksum=True,
        use_dictionary=[c for c in ROLLOUTS.dictionary if c in leaves],
        use_byte_stream_split=[c for c in ROLLOUTS.split if c in leaves],
    ) as writer:  # fmt: skip
        for group in range(file.num_row_groups):
            writer.write_table(file.read_row_group(group))


def main() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder) / "run")
        part = run / "rollouts" / "part-00000.parquet"
        rows = []
        for estimator, settings in (("grpo", {}), ("rloo", {"gamma": 0.99, "whiten": True})):
            out = Path(folder) / f"{estimator}.parquet"
            timing = interleave(
                lambda out=out, e=estimator, s=settings: build_experiences(run, out, estimator=e, overwrite=True, **s),
                lambda: copy(part, Path(folder) / "copy.parquet"),
                3,
            )
            told = ", ".join(f"{k} {v}" for k, v in settings.items())
            what = f"experience {estimator} {told}, {COUNT:,} rollouts, against copying the columns"
            bound = 2.0 if not settings else None
            rows.append(Row(what, seconds(timing.ours), seconds(timing.rival), timing.cost, at_most=bound))
            cpu = sum(timing.ours_cpu) / sum(timing.rival_cpu)
            rows.append(Row(f"{what}, CPU time", seconds(timing.ours_cpu), seconds(timing.rival_cpu), cpu))
        return rows
