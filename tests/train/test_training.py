"""Training from Python: what is refused before anything heavy is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pytest

from gymdata.errors import DataError
from gymdata.store import write_table
from gymdata.train.run import train
from gymdata.train.settings import TRAINERS


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize("algorithm", sorted(TRAINERS))
def test_a_file_without_rows_is_refused_before_torch(
    tmp_path: Path, algorithm: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file, that it has 0 rows, and what to do; no model is looked at and nothing is written."""
    for module in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    table = TRAINERS[algorithm].table
    rows = pa.schema([table.schema.field(name) for name in table.required()]).empty_table()
    file = write_table(rows, tmp_path / f"{table.name}.{suffix}", table)
    with pytest.raises(DataError, match=f"{file.name}: got 0 {table.name}, expected at least 1") as refused:
        train(algorithm, file, tmp_path / "no-model", tmp_path / "out")
    assert refused.value.hint is not None
    assert refused.value.exit_code == 2
    assert not (tmp_path / "out").exists()
