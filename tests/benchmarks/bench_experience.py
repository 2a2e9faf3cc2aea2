"""``gymdata experience`` on 100,000 rollouts against copying the file's columns with pyarrow, encodings and all; and how
soon a batch of a large experiences file is there."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import gymdata
from gymdata.rollouts.schema import EXPERIENCES, ROLLOUTS
from gymdata.rollouts.turns import turn_digest
from gymdata.store import write_run_json
from gymdata.store.columns import content_hashes
from gymdata.store.run_json import describe_file
from gymdata.store.tables import write_batches
from tests.benchmarks.rows import Row, interleave, seconds

COUNT, GROUP, TURNS = 100_000, 8, 3
AT_MOST = 1.5
_BIG = 27


def rollouts(
    n: int,
    first: int = 0,
    turns: int = TURNS,
    prompt: tuple[int, int] = (60, 120),
    answer: tuple[int, int] = (40, 120),
    said: int = 300,
) -> pa.Table:
    """Chains of ``turns`` calls: ``prompt`` tokens, those of the group, then ``answer`` sampled ones and 10 to 30 of a tool
    each time; a message of ``said`` characters and a few."""
    rng = np.random.default_rng(first)
    deltas = np.where(
        np.arange(n * turns) % turns == 0, rng.integers(*prompt, n * turns), rng.integers(10, 30, n * turns)
    )
    of_group = np.arange(n) // GROUP * GROUP
    deltas[::turns] = deltas[::turns][of_group]
    generations = rng.integers(*answer, n * turns)
    delta_ends, generation_ends = (
        np.concatenate(([0], np.cumsum(deltas))),
        np.concatenate(([0], np.cumsum(generations))),
    )
    delta = np.minimum(rng.zipf(1.2, delta_ends[-1]), 150_000).astype(np.int32)
    for row, same in enumerate(of_group.tolist()):
        begin, like = delta_ends[row * turns], delta_ends[same * turns]
        delta[begin : delta_ends[row * turns + 1]] = delta[like : delta_ends[same * turns + 1]]
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
    asks = [{"role": "user", "content": f"What is {i // GROUP} + 1?"} for i in range(64)]
    texts = [[ask, {"role": "assistant", "content": f"{i}{'x' * said}", "turn": 0}] for i, ask in enumerate(asks)]
    columns = {
        "rollout_id": [f"{i:032x}" for i in index], "run_id": ["run"] * n, "task_id": [f"task-{i // GROUP}" for i in index],
        "group_id": [f"group-{i // GROUP}" for i in index], "rollout_index": index % GROUP, "policy": ["tiny"] * n,
        "policy_hash": ["hash"] * n, "policy_version": [0] * n, "status": ["completed"] * n, "stop_reason": ["stop"] * n,
        "finish_reason": ["stop"] * n, "reward": rng.integers(0, 3, n) / 2.0, "rewards": [[]] * n,
        "temperature": [1.0] * n, "n_turns": [turns] * n, "n_breaks": [0] * n,
        "n_context_tokens": deltas.reshape(n, turns).sum(1), "n_generated_tokens": generations.reshape(n, turns).sum(1),
        "messages": [texts[i % 64] for i in range(n)], "tools": ["[]"] * n, "task": ["{}"] * n, "extra": ["{}"] * n,
        "turns": pa.ListArray.from_arrays(np.arange(0, n * turns + 1, turns, dtype=np.int32), struct),
        "started_at": [datetime(2026, 1, 1, tzinfo=UTC)] * n, "duration_s": [0.5] * n,
    }  # fmt: skip
    hashes = content_hashes(columns["turns"])
    columns |= {name: column.combine_chunks() for name, column in hashes.items()}
    arrays = [c if isinstance(c, pa.Array) else pa.array(c, f.type) for f, c in
              ((f, columns[f.name]) for f in ROLLOUTS.schema)]  # fmt: skip
    return pa.Table.from_arrays(arrays, schema=ROLLOUTS.schema)


def write_run(folder: Path, n: int = COUNT, *, texts: bool = False) -> Path:
    """``texts``: rollouts that have their messages only."""
    file = folder / "rollouts" / "part-00000.parquet"
    file.parent.mkdir(parents=True)
    tables = (rollouts(min(10_000, n - at), at) for at in range(0, n, 10_000))
    parts = (batch for table in tables for batch in (_without_ids(table) if texts else table).to_batches())
    write_batches(parts, file, ROLLOUTS, ROLLOUTS.schema)
    write_run_json(folder, {"run_id": "run", "files": [describe_file(file, n, path=str(file.relative_to(folder)))]})
    return folder


def _without_ids(table: pa.Table) -> pa.Table:
    none = {"turns": [], "n_turns": 0, "n_context_tokens": 0, "n_generated_tokens": 0}
    for name, value in none.items():
        field = table.schema.field(name)
        table = table.set_column(table.schema.get_field_index(name), field, pa.array([value] * len(table), field.type))
    return table


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


def write_experiences(file: Path) -> Path:
    """About a gigabyte: sequences of 300 to 1,300 tokens, numbers that hardly compress."""
    rng = np.random.default_rng(0)
    names = ("logprobs", "advantages", "returns")
    schema = pa.schema([f for f in EXPERIENCES.schema if f.name in {*EXPERIENCES.required(), *names}])
    rows = 4_000

    def batch(at: int) -> pa.RecordBatch:
        ends = np.concatenate(([0], np.cumsum(rng.integers(300, 1_300, rows)))).astype(np.int32)
        n = int(ends[-1])
        tokens = {
            "input_ids": rng.integers(0, 150_000, n).astype(np.int32),
            "loss_mask": (np.arange(n) - np.repeat(ends[:-1], np.diff(ends)) > 200).astype(np.int8),
            **{name: rng.normal(size=n).astype(np.float32) for name in names},
        }
        columns: dict[str, object] = {name: pa.ListArray.from_arrays(ends, values) for name, values in tokens.items()}
        ids = [f"{at + i:032x}" for i in range(rows)]
        columns |= {"run_id": ["run"] * rows, "task_id": ids, "group_id": ids, "rollout_id": ids,
                    "sequence_index": [0] * rows, "turn_starts": [[201]] * rows, "reward": [1.0] * rows,
                    "weight": [1.0] * rows, "temperature": [1.0] * rows, "policy_hash": ["hash"] * rows,
                    "policy_version": [0] * rows}  # fmt: skip
        arrays = [pa.array(columns[f.name], f.type) for f in schema]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    # 4,000 sequences are 3.2 M tokens of about 12 bytes on disk.
    write_batches((batch(at * rows) for at in range(_BIG)), file, EXPERIENCES, schema)
    return file


_FIRST = """
import sys, time
import torch, pyarrow.parquet
from gymdata.commands.experience.loading import load_experiences
import gymdata.commands.experience._torch
began = time.perf_counter()
batches = load_experiences(sys.argv[1], 32, **eval(sys.argv[2]))
next(batches)
print(time.perf_counter() - began)
"""


def first_batches(folder: Path) -> list[Row]:
    """The first batch of 32 of a fresh process, after imports, of a file of a gigabyte; and one in any order."""
    file = write_experiences(folder / "big.parquet")
    size = file.stat().st_size / 1e9

    def fresh(options: str) -> float:
        done = subprocess.run(
            [sys.executable, "-c", _FIRST, str(file), options], capture_output=True, text=True, check=True
        )
        return float(done.stdout)

    times = [fresh("{}") for _ in range(5)]
    build = fresh("{'shuffle_seed': 1}")
    shuffled = [fresh("{'shuffle_seed': 1}") for _ in range(3)]
    what = f"load_experiences, first batch of 32 from {size:.2f} GB after imports"
    rows = [Row(f"{what}, seconds", seconds(times), "3 s", statistics.median(times), at_most=3.0)]
    told = f"{what}, shuffled, seconds (building its cache once: {build:.1f} s)"
    return [*rows, Row(told, seconds(shuffled), "–", statistics.median(shuffled))]


def main() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        fresh = first_batches(Path(folder))
        (Path(folder) / "big.parquet").unlink()
        (Path(folder) / ".big.parquet.arrow").unlink(missing_ok=True)
        run = write_run(Path(folder) / "run")
        part = run / "rollouts" / "part-00000.parquet"
        rows = fresh
        for estimator, settings in (("grpo", {}), ("rloo", {"gamma": 0.99, "whiten": True})):
            out = Path(folder) / f"{estimator}.parquet"
            timing = interleave(
                lambda out=out, e=estimator, s=settings: gymdata.experience(run, out, estimator=e, overwrite=True, **s),
                lambda: copy(part, Path(folder) / "copy.parquet"),
                3,
            )
            told = ", ".join(f"{k} {v}" for k, v in settings.items())
            what = f"experience {estimator} {told}, {COUNT:,} rollouts, against copying the columns"
            rows.append(Row(what, seconds(timing.ours), seconds(timing.rival), timing.cost, at_most=AT_MOST))
            cpu = sum(timing.ours_cpu) / sum(timing.rival_cpu)
            rows.append(Row(f"{what}, CPU time", seconds(timing.ours_cpu), seconds(timing.rival_cpu), cpu))
        return rows
