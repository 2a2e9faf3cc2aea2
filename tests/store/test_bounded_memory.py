"""Reading a file in batches takes no more memory the longer the file is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from gymdata.rollouts.schema import ROLLOUTS
from tests.benchmarks.bench_experience import rollouts

_PEAK = """
import sys
import pyarrow as pa
from gymdata.store import scan_batches
rows = 0
for batch in scan_batches(sys.argv[1], batch_size=64):
    rows += batch.num_rows
print(rows, pa.default_memory_pool().max_memory())
"""


def peak(folder: Path, groups: int) -> int:
    """Most bytes that Arrow held while a file of ``groups`` row groups of 256 rollouts was read in batches."""
    file = folder / f"{groups}.parquet"
    data = rollouts(256)
    with pq.ParquetWriter(file, data.schema.with_metadata(ROLLOUTS.metadata), write_page_checksum=True) as writer:
        for _ in range(groups):
            writer.write_table(pa.Table.from_batches(data.to_batches(), data.schema))
    done = subprocess.run([sys.executable, "-c", _PEAK, str(file)], capture_output=True, text=True, check=True)
    rows, most = map(int, done.stdout.split())
    assert rows == groups * 256
    return most


def test_batches_of_a_longer_file_take_no_more_memory(tmp_path: Path) -> None:
    """Sixteen times the row groups take at most 1.2 times the memory."""
    assert peak(tmp_path, 64) <= 1.2 * peak(tmp_path, 4)
