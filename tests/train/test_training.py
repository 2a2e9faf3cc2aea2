"""Training from Python: what is refused before anything heavy is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pytest

import gymdata
from gymdata.errors import DataError
from gymdata.store import write_table
from gymdata.train.settings import TRAINERS
from tests.rollout_files import rollout, two_turns, write_run


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
        getattr(gymdata, f"train_{algorithm}")(file, tmp_path / "no-model", tmp_path / "out")
    assert refused.value.hint is not None
    assert refused.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_table_is_named_with_the_way_on(tmp_path: Path) -> None:
    """A run given for experiences is pointed at the command that makes them, pairs given for rollouts at their trainers."""
    run = write_run(tmp_path / "run", [rollout("a", 0, 0.0, two_turns(1, 50)), rollout("a", 1, 1.0, two_turns(2, 60))])
    gymdata.pairs(run)
    with pytest.raises(DataError, match="holds rollouts, and no experiences") as no_experiences:
        gymdata.train_rl(run, tmp_path / "no-model", tmp_path / "out")
    assert no_experiences.value.hint == f"`gymdata experience {run}` makes experiences of them"
    with pytest.raises(DataError, match="holds pairs, and no rollouts") as no_rollouts:
        gymdata.train_sft(run / "pairs-reward", tmp_path / "no-model", tmp_path / "out")
    assert no_rollouts.value.hint == "train-dpo and train-reward read pairs"
