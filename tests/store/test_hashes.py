"""prompt_hash and generation_hash: written at append, computed where lines lack them, else left alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from gymdata.errors import DataError
from gymdata.rollouts.schema import HASHES, ROLLOUTS
from gymdata.store import read_table, scan_batches
from tests.rollout_files import rollout, two_turns, write_run, write_table


def expected(table: pa.Table) -> list[tuple[int, int]]:
    """(prompt_hash, generation_hash) of each row, from its turns by a loop."""

    def signed(ids: list[int]) -> int:
        return int(np.uint64(xxhash.xxh3_64_intdigest(np.array(ids, "<i4").tobytes())).astype(np.int64))

    rows = table["turns"].to_pylist()
    return [
        (signed(turns[0]["prompt_delta_ids"]), signed([i for t in turns for i in t["generation_token_ids"]]))
        for turns in rows
    ]


def hashes_in(table: pa.Table) -> list[tuple[int, int]]:
    return list(zip(*(table[name].to_pylist() for name in HASHES), strict=True))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", [rollout("t", i, i % 2, two_turns(5, 6 + i)) for i in range(4)])


def test_appended_rows_are_sealed_with_the_hashes_of_their_ids(run: Path):
    (part,) = (run / "rollouts").glob("part-*.parquet")
    raw = pq.read_table(part)
    assert hashes_in(raw) == expected(raw)


def test_lines_without_the_hashes_are_read_as_if_they_had_them(run: Path, tmp_path: Path):
    """Whether they are asked for, alone or with others, or the whole table is read; scans as reads."""
    whole = read_table(run)
    file = tmp_path / "short.jsonl"
    rows = [json.loads(line) for line in write_table(whole, file, ROLLOUTS).read_text().splitlines()]
    file.write_text("".join(json.dumps({k: v for k, v in row.items() if k not in HASHES}) + "\n" for row in rows))
    assert hashes_in(read_table(file)) == hashes_in(whole) == expected(whole)
    only = read_table(file, ROLLOUTS, ["rollout_id", "prompt_hash", "generation_hash"])
    assert only.column_names == ["rollout_id", *HASHES]
    assert hashes_in(only) == expected(whole)
    assert hashes_in(
        pa.Table.from_batches(scan_batches(file, ROLLOUTS, ["generation_hash", "prompt_hash"]))
    ) == expected(whole)


def test_parquet_without_the_columns_is_no_file_of_rollouts(run: Path, tmp_path: Path):
    pq.write_table(read_table(run).drop_columns(list(HASHES)), file := tmp_path / "short.parquet")
    with pytest.raises(DataError, match="prompt_hash"):
        read_table(file)


def test_a_rollout_without_turns_has_no_hashes(tmp_path: Path):
    row = rollout("t", 0, None, []) | {"turns": [], "n_turns": 0, "n_context_tokens": 0, "n_generated_tokens": 0}
    run = write_run(tmp_path / "run", [row])
    assert hashes_in(read_table(run)) == [(None, None)]
