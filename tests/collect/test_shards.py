"""``collect --shard``: parts that were collected side by side are one run when ``filter`` puts them together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gymdata
from gymdata.cli.main import main
from gymdata.collect.run import collect
from gymdata.collect.task_files import Shard
from gymdata.store import read_run_json, read_table
from tests.collect.conftest import ADDER
from tests.collect.fake_parts import FakeSampler, add_or_answer, parts

TIMES = ("started_at", "duration_s")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows without times, by task and index."""
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in read_table(path).to_pylist()]
    return sorted(rows, key=lambda row: (row["task_id"], row["rollout_index"]))


@pytest.fixture
def shard(tmp_path: Path) -> Callable[..., Path]:
    """Collects a shard of eleven tasks, twice each, with an engine whose answers follow from seed and prompt."""
    tasks = [{"task_id": f"t{k}", "prompt": f"q{k}"} for k in range(11)]
    env = tmp_path / "adder.py"
    env.write_text(ADDER)

    def collected(part: str | None) -> Path:
        out = tmp_path / f"s{(part or 'all').replace('/', '-')}"
        sampler = parts(FakeSampler(add_or_answer), env=f"{env}:Adder")
        collect(tasks, output=out, num_rollouts=2, shard=part, parts=sampler, run_id="array-7", seed=5)
        return out

    return collected


def test_the_shards_together_are_the_run(shard: Callable[..., Path], tmp_path: Path) -> None:
    """As one, three shards hold the rows of the run without shards, ids, seeds and tokens included; lineage leads to all."""
    report = gymdata.filter([shard(f"{k}/3") for k in (1, 2, 3)], tmp_path / "one")
    assert rows_of(tmp_path / "one") == rows_of(shard(None))
    assert report.rollouts_out == 22
    facts = read_run_json(tmp_path / "one")
    assert [Path(p["path"]).name for p in facts["parents"]] == ["s1-3", "s2-3", "s3-3"]
    assert {p["run_id"] for p in facts["parents"]} == {"array-7"}
    assert facts["identity"]["seed"] == 5
    assert gymdata.validate(tmp_path / "one").exit_code == 0


def test_each_attempt_records_its_shard(shard: Callable[..., Path]) -> None:
    """run.json's extent says which part of the tasks was asked for."""
    facts = read_run_json(shard("2/3"))
    assert facts["extent"]["shard"] == facts["attempts"][0]["extent"]["shard"] == "2/3"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=8), unique=True, max_size=40), st.integers(1, 9))
def test_every_task_is_in_one_shard(names: list[str], count: int) -> None:
    """Whatever the names and the number of parts."""
    found = [name for k in range(1, count + 1) for name in names if name in Shard(k, count)]
    assert sorted(found) == sorted(names)


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "1/0", "a/b", "1/2/3"])
def test_a_shard_that_is_no_part_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The flag is named, and what it takes."""
    assert main(["collect", "x.jsonl", "--shard", text, "--run-id", "a", "--seed", "1"]) == 2
    assert f"--shard: got '{text}', expected I/N" in capsys.readouterr().err


def test_a_shard_needs_what_makes_it_a_part_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the run's id and seed its rollouts would be those of another run."""
    assert main(["collect", "x.jsonl", "--shard", "1/2", "--seed", "1"]) == 2
    assert "--shard needs --run-id and --seed" in capsys.readouterr().err
