"""Reading a file in batches takes no more memory the longer the file is, and what is kept of each row takes few bytes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gymdata.checks.codes.duplicates import Duplicates
from gymdata.checks.violations import CheckSettings
from gymdata.commands.query.run import query
from gymdata.rollouts.schema import ROLLOUTS, SCORES
from gymdata.rollouts.turn_columns import from_arrow
from gymdata.store import scan_batches
from gymdata.store.sinks import ParquetSink
from tests.benchmarks.bench_experience import rollouts
from tests.forks import forks


def read(file: Path) -> int:
    return sum(batch.num_rows for batch in scan_batches(file, batch_size=64))


def ask(file: Path) -> int:
    answer = query("SELECT count(*), sum(len(turns)), max(messages[1].content) FROM rollouts", file)
    return int(answer.column(0)[0].as_py())


def measured(read_rows: Callable[[Path], int], file: Path, said: Path) -> int:
    said.write_text(f"{read_rows(file)} {pa.default_memory_pool().max_memory()}")
    return 0


def peak(read_rows: Callable[[Path], int], folder: Path, groups: int) -> int:
    """Most bytes that Arrow held in a process that reads a file of ``groups`` row groups of 256 rollouts."""
    file, said = folder / f"{groups}.parquet", folder / "said"
    data = rollouts(256)
    with pq.ParquetWriter(file, data.schema.with_metadata(ROLLOUTS.metadata), write_page_checksum=True) as writer:
        for _ in range(groups):
            writer.write_table(pa.Table.from_batches(data.to_batches(), data.schema))
    with forks() as processes:
        assert processes.start(measured, read_rows, file, said).wait() == 0
    rows, most = map(int, said.read_text().split())
    assert rows == groups * 256
    return most


def test_batches_of_a_longer_file_take_no_more_memory(tmp_path: Path) -> None:
    """Sixteen times the row groups take at most 1.2 times the memory."""
    assert peak(read, tmp_path, 64) <= 1.2 * peak(read, tmp_path, 4)


@pytest.mark.full
def test_a_query_of_a_longer_file_takes_no_more_memory(tmp_path: Path) -> None:
    """Sixteen times the row groups take less than twice the memory: DuckDB's threads hold a few small batches each."""
    assert peak(ask, tmp_path, 128) < 2 * peak(ask, tmp_path, 8)


def test_validation_keeps_few_bytes_of_a_rollout() -> None:
    """What duplicates and equal rewards are found by takes less than 250 bytes a rollout, their ids of 44 included, and less
    than 500 while they are found."""
    across = Duplicates(CheckSettings())
    batches = {first: rollouts(1_000, first, turns=1).to_batches()[0] for first in range(0, 16_000, 1_000)}
    tracemalloc.start()
    try:
        for first, batch in batches.items():
            list(across.find(from_arrow(batch, first)))
        kept = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        across.finish()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert kept < 250 * 16_000
    assert most < 500 * 16_000


def test_row_groups_are_cut_by_bytes(tmp_path: Path) -> None:
    """Rows without tokens are not held until the end, and a batch that is too large is cut; no row is lost."""
    rows = {name: ["x"] * 1_000 for name in SCORES.schema.names} | {"value": np.arange(1_000.0)}
    table = pa.table([pa.array(rows[f.name], f.type) for f in SCORES.schema], schema=SCORES.arrow)
    sink = ParquetSink(tmp_path / "x.parquet", SCORES, SCORES.arrow)
    sink.group_bytes = 20_000
    for batch in table.to_batches(max_chunksize=700):
        sink.write(batch)
    sink.close()
    file = pq.ParquetFile(tmp_path / "x.parquet")
    # Read again they have room for nulls, too.
    assert all(file.read_row_group(g).nbytes <= 22_000 for g in range(file.num_row_groups))
    assert pq.read_table(tmp_path / "x.parquet").equals(table)
