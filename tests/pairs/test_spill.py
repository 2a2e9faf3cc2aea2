"""Tokens that wait in a file instead of memory: the same pairs, whatever the limits, and no file that stays."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gymdata
from gymdata.errors import DataError, StoreError
from gymdata.pairs import candidates, spill
from gymdata.pairs.settings import PairsConfig
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_table
from tests.benchmarks.bench_experience import write_run as many_rollouts
from tests.full_disk import full_disk
from tests.rollout_files import rollout, two_turns, write_run

SCHEMA = pa.schema(
    [("words", pa.dictionary(pa.int32(), pa.string())), ("ids", pa.list_(pa.int32())), ("n", pa.int64())]
)


def rows_of(numbers: list[int]) -> pa.Table:
    columns = [[f"w{n % 3}" for n in numbers], [[n] * (n % 4) for n in numbers], numbers]
    return pa.Table.from_arrays([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), max_size=8), max_size=6), st.sampled_from([0, 200, 1 << 30]))
def test_a_bucket_has_the_rows_that_were_put_there_in_that_order(added: list[list[int]], held_bytes: int) -> None:
    """Whatever part of them is in the file: those of bucket b, in the order in which they came."""
    held, number, expected = spill.Spill(SCHEMA, None, held_bytes), 0, dict[int, list[int]]()
    for buckets in added:
        numbers = list(range(number, number + len(buckets)))
        number += len(buckets)
        held.add(rows_of(numbers), np.array(buckets, np.int64))
        for n, bucket in zip(numbers, buckets, strict=True):
            expected.setdefault(bucket, []).append(n)
    for bucket in range(6):
        assert held.bucket(bucket).to_pylist() == rows_of(expected.get(bucket, [])).to_pylist()
    if held_bytes != 200:
        assert bool(held.written) == (held_bytes == 0 and any(added))
    held.close()


def test_a_disk_that_is_full_is_named(tmp_path: Path) -> None:
    """The error is that of any output on a full disk, and names the folder."""
    held = spill.Spill(SCHEMA, tmp_path, 0)
    with full_disk(at=2_000), contextlib.closing(held), pytest.raises(StoreError, match=str(tmp_path)):
        held.add(rows_of(list(range(1_000))), np.arange(1_000))
    assert list(tmp_path.iterdir()) == []


def some_run(folder: Path) -> Path:
    """40 groups of 1 to 5 rollouts in mixed order, with copies, tools, a break, truncated and unscored ones."""
    draw, rows = random.Random(7), []
    for task in range(40):
        for index in range(draw.randint(1, 5)):
            reward = draw.choice([None, 0.0, 0.25, 0.5, 1.0])
            answer = two_turns(task, draw.randint(40, 60))
            more: dict[str, Any] = {"tools": f"[{task % 2}]", "status": draw.choice(["completed", "truncated"])}
            rows.append(rollout(f"t{task}", index, reward, answer, **more))
    draw.shuffle(rows)
    return write_run(folder, rows)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"strategy": "all", "max_pairs_per_task": 3, "length_balance": 0.5},
    {"strategy": "adjacent", "fork": True, "truncated": "drop"},
    {"strategy": "all", "split": 0.3, "keep_duplicates": True},
]


@pytest.mark.parametrize("given", SETTINGS, ids=lambda given: "-".join(given))
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_pairs_from_a_file_of_waiting_tokens_are_the_same(
    given: dict[str, Any], suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for no rollout in memory, buckets of a group and batches of a pair, files are the same byte for byte,
    nothing else is in the folder, and the report without a file has the same tables."""
    run = some_run(tmp_path / "run")
    whole = gymdata.pairs(run, output=tmp_path / "whole" / f"pairs.{suffix}", **given)
    monkeypatch.setattr(spill, "HELD_BYTES", 0)
    monkeypatch.setattr(candidates, "BUCKET_TOKENS", 1)
    monkeypatch.setattr(candidates, "PAIR_TOKENS", 1)
    monkeypatch.setattr(candidates, "BATCH_ROWS", 7)
    apart = gymdata.pairs(run, output=tmp_path / "apart" / f"pairs.{suffix}", **given)
    assert whole.counts == apart.counts
    assert whole.counts.pairs >= 10
    assert set(whole.files) == ({"train", "heldout"} if "split" in given else {"train"})
    for side, file in whole.files.items():
        assert apart.files[side].read_bytes() == file.read_bytes()
    names = {file.name for file in (tmp_path / "apart").iterdir()}
    assert names == {file.name for file in (tmp_path / "whole").iterdir()}
    unwritten = gymdata.pairs(run, write=False, **given)
    assert unwritten.table.equals(whole.table)
    assert unwritten.heldout == whole.heldout


def test_rows_that_moved_since_they_were_counted_are_found_by_their_ids(tmp_path: Path) -> None:
    """A run that is being collected may seal its rows between two readings; each rollout keeps its own keys."""
    run = some_run(tmp_path / "run")
    config = PairsConfig.load(overrides={"strategy": "all"})
    names = ["rollout_id", "task_id", "group_id", "rollout_index", "status", "n_context_tokens", "n_generated_tokens"]
    rollouts = read_table(run, ROLLOUTS, [*names, "reward"]).rename_columns([*names, "score"])
    found = []
    for table in (rollouts, rollouts.take(pa.array(range(len(rollouts) - 1, -1, -1)))):
        made = candidates.Candidates(config, None)
        frame = made.read([run], table, np.arange(len(table)))
        keys = ("prompt_key", "generation_key", "text_key", "n_sequences")
        found.append({row["rollout_id"]: [row[key] for key in keys] for row in frame.to_pylist()})
        made.close()
    assert found[0] == found[1]
    assert len({tuple(keys) for keys in found[0].values()}) > 20


def test_pairs_that_were_replaced_since_are_not_read_as_ours(tmp_path: Path) -> None:
    """A report's table is what it wrote, or an error that names the file."""
    run = some_run(tmp_path / "run")
    first = gymdata.pairs(run)
    assert repr(first) == f"PairsReport(score='reward', table={first.counts.pairs} rows)"
    gymdata.pairs(run, strategy="all", overwrite=True)
    with pytest.raises(DataError, match=r"pairs\.parquet: the pairs of this report were replaced"):
        first.table.equals(first.table)


_PEAK = """
import sys
import pyarrow as pa
import gymdata
report = gymdata.pairs(sys.argv[1], output=sys.argv[2], strategy="all", max_pairs_per_task=2)
print(report.counts.pairs, pa.default_memory_pool().max_memory())
"""


def test_four_times_the_rollouts_take_hardly_more_memory(tmp_path: Path) -> None:
    """What Arrow holds at most grows by the ids and numbers of rollouts, not by their tokens."""
    peaks = {}
    for n in (12_000, 48_000):
        run = many_rollouts(tmp_path / str(n), n)
        done = subprocess.run([sys.executable, "-c", _PEAK, str(run), str(tmp_path / f"{n}.parquet")],
                              capture_output=True, text=True, check=True)  # fmt: skip
        pairs, peaks[n] = map(int, done.stdout.split())
        assert pairs > n / 8
    assert peaks[48_000] < 1.6 * peaks[12_000]
