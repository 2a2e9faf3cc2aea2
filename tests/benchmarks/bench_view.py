"""What the pages of ``gymdata view`` cost over 100,000 and 1,000,000 rollouts with prompts of 200 and answers of 800
characters: the first page with its facets, a value of a facet, texts and filters that were not asked for before, one
rollout of 20,000 tokens, and the server's memory.

The server is a process of its own, asked over HTTP; the rival column is the bound in seconds or megabytes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_table, write_run_json
from tests.benchmarks.bench_query import write_rollouts
from tests.benchmarks.rows import Row
from tests.rollout_files import rollout, write_table

ROWS, LONG = 100_000, 20_000
#: Texts that a rollout in 100 has, one in 100,000, none; the first one reads the messages.
SEARCHES = ("needle", "unique-77777", "nowhere")
FACET = 'task.level == "hard"'
FILTERS = (
    "reward > 0.5",
    "mean_reward between 0.01 and 0.99 and n_turns < 3",
    'task.level == "hard"',
    'contains(task_id, "77") and reward_style >= 0.5',
    "n_generated_tokens > std_n_generated_tokens and task.number % 7 == 3",
)


def write_run(folder: Path, parts: int) -> Path:
    """``parts`` times 100,000 rollouts with tokens and task rows, and one of 20,000 tokens."""
    base = write_rollouts(folder, ROWS)
    first = folder / "rollouts" / "part-00000.parquet"
    table, texts = read_table(first, ROLLOUTS), messages()
    for part in range(parts):
        numbers = np.arange(ROWS) + part * ROWS
        tasks = [json.dumps({"level": ("easy", "hard")[n % 2], "number": n}) for n in range(ROWS // 8 + 1)]
        columns = {
            "rollout_id": [f"{n:032x}" for n in numbers],
            "task_id": [f"task-{n // 8}" for n in numbers],
            "group_id": [f"group-{n // 8:026}" for n in numbers],
            "task": [tasks[n // 8] for n in range(ROWS)],
            "messages": texts,
        }
        for name, values in columns.items():
            field = ROLLOUTS.schema.field(name)
            table = table.set_column(table.column_names.index(name), field, [pa.array(values, field.type)])
        write_table(table, folder / "rollouts" / f"part-{part:05}.parquet", ROLLOUTS)
    write_table(
        pa.Table.from_pylist([long_rollout()], ROLLOUTS.arrow),
        folder / "rollouts" / f"part-{parts:05}.parquet",
        ROLLOUTS,
    )
    write_run_json(folder, {"run_id": "bench"})
    return base


def messages() -> list[list[dict[str, object]]]:
    """A question of 200 characters, and an answer of 800 with a tool call, of 5,000 words."""
    rng = np.random.default_rng(1)
    words = np.array(["".join(map(chr, rng.integers(97, 123, 7))) for _ in range(5_000)])
    rollouts: list[list[dict[str, object]]] = []
    asked, answered = (words[rng.integers(0, 5_000, (ROWS, size))].tolist() for size in (25, 100))
    for n in range(ROWS):
        answer = [*answered[n], f"unique-{n}", *(["needle"] if n % 100 == 0 else [])]
        function = {"name": "look_up", "arguments": {"word": answered[n][0], "number": n}}
        calls = json.dumps([{"id": f"call-{n}", "type": "function", "function": function}])
        rollouts.append([{"role": "user", "content": " ".join(asked[n])},
                         {"role": "assistant", "content": " ".join(answer), "turn": 0, "tool_calls": calls}])  # fmt: skip
    return rollouts


def long_rollout() -> dict[str, object]:
    ids = np.random.default_rng(0).integers(0, 50_000, LONG).tolist()
    return rollout("long", 0, 1.0, [(ids[:100], ids[100:])], text="answer", rollout_id="long")


@contextmanager
def served(run: Path) -> Iterator[tuple[str, int]]:
    """The address of a server over ``run`` and its process id."""
    command = [sys.executable, "-m", "gymdata.cli", "view", str(run), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            yield server.stderr.readline().split()[1], server.pid
        finally:
            server.terminate()


def timed(url: str) -> float:
    began = time.perf_counter()
    with urllib.request.urlopen(url) as answer:
        answer.read()
    return time.perf_counter() - began


def memory(pid: int) -> float:
    """Resident megabytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def measured(run: Path) -> dict[str, float]:
    """Seconds and megabytes of a server over ``run``."""
    with served(run) as (base, pid):
        first = timed(f"{base}/")
        facet = timed(f"{base}/?{urllib.parse.urlencode({'where': FACET})}")
        searches = [timed(f"{base}/?text={text}") for text in SEARCHES]
        filters = [timed(f"{base}/?{urllib.parse.urlencode({'where': text})}") for text in FILTERS]
        sort = timed(f"{base}/?sort=n_generated_tokens&down=1&by=group")
        long = [timed(f"{base}/rollout?id=long") + timed(f"{base}/data/tokens?id=long") for _ in range(3)]
        return {
            "first page": first, "a value of a facet": facet, "first search of texts": searches[0],
            "slowest later search": max(searches[1:]), "slowest filter": max(filters),
            "median filter": statistics.median(filters), "sorted by group": sort,
            "rollout of 20,000 tokens": max(long), "memory": memory(pid),
        }  # fmt: skip


def main() -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        small, large = (measured(write_run(Path(folder, str(parts)), parts)) for parts in (1, 10))
    for what, value in small.items():
        unit, limit = ("MB", 600.0) if what == "memory" else ("s", 1.0)
        rows.append(
            Row(f"view, 100,000 rollouts: {what}", f"{value:.3g} {unit} (1,000,000: {large[what]:.3g} {unit})",
                f"{limit:g} {unit}", value / limit, at_most=1.0)
        )  # fmt: skip
    return rows
