"""Servers that say which weights sampled which tokens: kept with every turn, and checked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest

import gymdata
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_table
from tests.collect.saved_rows import rows_of
from tests.faulty_server import Settings
from tests.rollout_files import write_table

pytestmark = pytest.mark.torch


@pytest.fixture
def run(
    server: Callable[[Settings], str], tasks: Any, tmp_path: Path, served: dict[str, Any]
) -> Callable[[str, str], Path]:
    """Collects eight rollouts from a server whose weights have these names; its folder."""

    def collect(name: str, versions: str) -> Path:
        gymdata.collect(
            str(tasks(4)), endpoint=server(Settings(versions=versions)), output=tmp_path / name, **served,
            num_rollouts=2, top_logprobs=2, run_id="one",
        )  # fmt: skip
        return tmp_path / name

    return collect


def turns_of(run: Path) -> list[dict[str, Any]]:
    return [turn for row in rows_of(run) for turn in row["turns"]]


def test_every_turn_says_which_weights_sampled_which_tokens(run: Callable[[str, str], Path]) -> None:
    """The rows are those of a server that names no weights but for that."""
    changed, plain = run("changed", "step-1,step-2"), run("plain", "")
    for turn in turns_of(changed):
        n = len(turn["generation_token_ids"])
        spans = [("step-1", 0, min(3, n)), ("step-2", 3, n)]
        assert turn["weight_versions"] == [
            {"version": v, "start": start, "end": end} for v, start, end in spans if start < end
        ]
    for turn in (these := turns_of(changed)):
        turn["weight_versions"] = None
    assert these == turns_of(plain)


def test_weights_that_nobody_named_are_not_kept(run: Callable[[str, str], Path]) -> None:
    """vLLM calls them "default", which says nothing."""
    assert {turn["weight_versions"] for turn in turns_of(run("run", "default"))} == {None}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_validate_checks_the_spans(run: Callable[[str, str], Path], tmp_path: Path, kind: str) -> None:
    """Weights that changed within a turn are a warning at the place; spans that do not cover the generation an error."""
    table = read_table(run("run", "step-1"), ROLLOUTS)
    rows = table.to_pylist()
    n = [len(row["turns"][0]["generation_token_ids"]) for row in rows]
    whole = copy.deepcopy(rows[0]["turns"][0]["weight_versions"])
    assert whole == [{"version": "step-1", "start": 0, "end": n[0]}]
    for row, spans in enumerate([
        whole,
        [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": n[1]}],
        [{"version": "a", "start": 0, "end": n[2] + 1}],
        [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 2, "end": n[3]}],
        [],
        None,
    ]):  # fmt: skip
        rows[row]["turns"][0]["weight_versions"] = spans
    file = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        write_table(pa.Table.from_pylist(rows, schema=ROLLOUTS.schema), file, ROLLOUTS)
    else:
        file.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    violations = gymdata.validate(file, select=["T214", "T215", "S"]).violations
    assert [(v.row, v.turn, v.position, v.code, v.severity) for v in violations] == [
        (1, 0, 1, "T215", "warning"),
        (2, 0, None, "T214", "error"),
        (3, 0, None, "T214", "error"),
    ]
    assert [v.got for v in violations] == ["a, then b", f"0–{n[2] + 1}", f"0–1, 2–{n[3]}"]
