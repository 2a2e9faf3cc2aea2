"""What memory offline commands take of 10 million rollouts of a handful of tokens: in less than 4 GB, what is kept of each.

Run: ``python -m tests.benchmarks.scale_rows [ROLLOUTS] [WORD …]`` for another number, and for the commands whose names hold
one of the words.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

import pyarrow as pa

from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import write_run_json
from gymdata.store.run_json import describe_file
from gymdata.store.tables import write_batches
from tests.benchmarks.bench_experience import GROUP, rollouts
from tests.benchmarks.bench_scale import measured_all, needed
from tests.benchmarks.rows import Row

MOST_GB = 4.0
NAMES = (
    "query, averages", "query, sorted to a file", "validate", "filter --where", "filter --best-n --balance",
    "filter --dedupe", "pairs best-worst", "pairs all, at most 4 a task", "experience grpo", "report", "score",
)  # fmt: skip
_CHUNK = 40_000


def main(n: int = 10_000_000, names: Collection[str] = NAMES) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="gymdata-bench-") as scratch:
        here = Path(scratch)
        write_run(here / "run", n)
        for name, cost in measured_all(needed(names), here):
            ours = f"{cost.peak_mb / 1e3:.2f} GB, {cost.cpu_s / n * 1e6:.1f} µs of CPU a rollout"
            rows.append(
                Row(
                    f"memory of {name}, {n:,} rollouts",
                    ours,
                    f"{MOST_GB:g} GB",
                    cost.peak_mb / 1e3 / MOST_GB,
                    at_most=1.0,
                )
            )
            print(f"{name}: {ours}", file=sys.stderr, flush=True)
    return rows


def write_run(folder: Path, n: int) -> None:
    """The same 40,000 rollouts over and over, under other ids, in 10 files."""
    chunk = rollouts(_CHUNK, turns=1, prompt=(3, 6), answer=(2, 6), said=8)
    entries = []
    for part in range(10):
        file = folder / "rollouts" / f"part-{part:05d}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        first, end = n * part // 10, n * (part + 1) // 10
        write_batches(_renamed(chunk, first, end), file, ROLLOUTS, ROLLOUTS.schema)
        entries.append(describe_file(file, end - first, path=str(file.relative_to(folder))))
    write_run_json(folder, {"run_id": "run", "files": entries})


def _renamed(chunk: pa.Table, first: int, end: int) -> Iterator[pa.RecordBatch]:
    for begin in range(first, end, _CHUNK):
        table, index = chunk.slice(0, min(_CHUNK, end - begin)), range(begin, min(begin + _CHUNK, end))
        made = {
            "rollout_id": [f"{i * 0x9E3779B97F4A7C15 % 2**64:032x}" for i in index],
            "task_id": [f"task-{i // GROUP}" for i in index],
            "group_id": [f"group-{i // GROUP}" for i in index],
        }
        for name, values in made.items():
            at = table.schema.get_field_index(name)
            table = table.set_column(at, table.schema.field(name), pa.array(values, pa.string()))
        yield from table.combine_chunks().to_batches()


if __name__ == "__main__":
    from tests.benchmarks.rows import markdown

    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    words = [word for word in sys.argv[1:] if not word.isdigit()]
    chosen = [name for name in NAMES if not words or any(word in name for word in words)]
    print(markdown(main(*numbers[:1] or [10_000_000], names=chosen)))
