"""The lazy scan of rollouts: what it reads, and that it reads nothing that is not as it was written."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest

from gymdata.errors import DataError
from gymdata.store import Run, read_table, scan_lazy
from tests.rollout_files import rollout, rollouts_table, two_turns


def damaged(path: Path, row_group: int, column: str) -> None:
    """Turn one byte of a column of a row group."""
    group = pq.read_metadata(path).row_group(row_group)
    (chunk,) = (c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == column)
    data = bytearray(path.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 0xFF
    path.write_bytes(data)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three rollouts with rewards 0, 1 and 2, a row group each."""
    table = rollouts_table([rollout("t", k, float(k), two_turns(4, 20 + k)) for k in range(3)])
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1, write_page_checksum=True)
    return tmp_path / "a.parquet"


def test_tokens_of_rows_that_a_filter_leaves_out_are_not_read(file: Path) -> None:
    """A page of token ids that is damaged does not matter to a query whose filter leaves its row group out, and stops
    every query that reads it; so does a damaged page of the column that is filtered by."""
    whole = read_table(file, columns=["turns"])["turns"].to_pylist()
    damaged(file, 1, "turns.list.element.generation_token_ids.list.element")
    for wanted in (0.0, 2.0):
        (row,) = scan_lazy(file).filter(pl.col("reward") == wanted).select("turns").collect().to_dicts()
        assert row["turns"] == whole[int(wanted)]
    assert scan_lazy(file).select(pl.col("reward").sum()).collect(engine="streaming").item() == 3.0
    for query in (scan_lazy(file).filter(pl.col("reward") == 1.0), scan_lazy(file).select("turns")):
        with pytest.raises(DataError, match="damaged"):
            query.collect()
    damaged(file, 0, "reward")
    with pytest.raises(DataError, match="damaged"):
        scan_lazy(file).filter(pl.col("reward") == 2.0).select("turns").collect()


def test_a_filter_may_name_a_column_twice(file: Path) -> None:
    """A range of rewards keeps the rows in it, with all their columns."""
    reward = pl.col("reward")
    rows = scan_lazy(file).filter((reward > 0.0) & (reward < 2.0)).collect()
    assert rows["rollout_id"].to_list() == ["t-1"]


def test_a_changed_file_of_a_run_gives_no_value(tmp_path: Path) -> None:
    """What has another size than in its run.json is refused before the first row, whatever columns are asked for."""
    with Run.open(tmp_path / "run", identity={}, extent={}, operation={}, facts={"stage": "collect"}) as run:
        run.append(rollout("t", 0, 1.0, two_turns(4, 20)))
    (part,) = run.folder.glob("rollouts/*.parquet")
    part.write_bytes(part.read_bytes() + b"PAR1")
    with pytest.raises(DataError, match=r"run\.json"):
        scan_lazy(run.folder).select("reward").collect()
