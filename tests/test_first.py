"""The saved run gives what it gave at first: codes, pairs, experiences, answers of SQL, trained tokens and first losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import first


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("first")


@pytest.fixture(scope="module")
def made(work: Path) -> dict[str, pa.Table]:
    return first.tables(work)


def saved(name: str) -> Any:
    return json.loads((first.FIRST / f"{name}.json").read_text())


def test_validate_finds_the_same_violations_of_the_saved_run():
    """Codes, rollouts, turns and positions are those that were found at first."""
    assert first.violations() == saved("violations")


def test_queries_of_the_saved_run_give_the_same_rows():
    """Rewards per task, tokens per turn and the shapes of rollouts are those of the first day."""
    assert first.answers() == saved("answers")


@pytest.mark.parametrize(
    "name", [*(f"pairs-{s}" for s in first.STRATEGIES), *(f"experiences-{e}" for e in first.ESTIMATORS)]
)
def test_the_saved_run_gives_the_same_table(made: dict[str, pa.Table], name: str):
    """Rollouts, ids, masks and logprobs are equal, and margins, advantages and returns to the precision of float32."""
    now, before = made[name], pq.read_table(first.FIRST / f"{name}.parquet")
    assert now.num_rows == before.num_rows
    for column in before.column_names:
        here, there = now[column].combine_chunks(), before[column].combine_chunks()
        if pa.types.is_list(there.type) and pa.types.is_floating(there.type.value_type):
            assert pa.compute.list_value_length(here).equals(pa.compute.list_value_length(there)), column
            np.testing.assert_allclose(here.flatten().to_numpy(), there.flatten().to_numpy(), rtol=1e-6, atol=1e-7)
        elif pa.types.is_floating(there.type):
            np.testing.assert_allclose(here.to_numpy(), there.to_numpy(), rtol=1e-6, atol=1e-7)
        else:
            assert here.to_pylist() == there.to_pylist(), column


@pytest.mark.full
@pytest.mark.torch
def test_each_trainer_trains_the_same_tokens_with_the_same_first_losses(made: dict[str, pa.Table], work: Path):
    """Two steps over all of the data: the count of trained tokens, and both losses within rounding."""
    now, before = first.trainings(work), saved("trainings")
    assert {name: result["trained_tokens"] for name, result in now.items()} == {
        name: result["trained_tokens"] for name, result in before.items()
    }
    for name, result in before.items():
        assert now[name]["losses"] == pytest.approx(result["losses"], rel=1e-4, abs=1e-6), name
