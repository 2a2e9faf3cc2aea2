"""Tokens of selected rollouts wait in a file: the same pairs, whatever the sizes of batches, and no file that stays."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import gymdata
from gymdata.commands.pairs import candidates
from gymdata.commands.pairs.settings import PairsConfig
from gymdata.errors import DataError, StoreError
from tests.benchmarks.bench_experience import write_run as many_rollouts
from tests.kills import full_disk
from tests.rollout_files import rollout, two_turns, write_run


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
def test_pairs_from_a_file_of_waiting_tokens_are_the_same(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With batches of a pair and of few rollouts, files are the same byte for byte,
    nothing else is in the folder, and the report without a file has the same tables."""
    run = some_run(tmp_path / "run")
    whole = gymdata.pairs(run, output=tmp_path / "whole", **given)
    monkeypatch.setattr(candidates, "PAIR_TOKENS", 1)
    monkeypatch.setattr(candidates, "BATCH_ROWS", 7)
    apart = gymdata.pairs(run, output=tmp_path / "apart", **given)
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


def test_contents_are_of_the_rollouts_that_were_chosen(tmp_path: Path) -> None:
    """Each rollout keeps its own keys and contents; rows that moved between the two readings are refused."""
    run = some_run(tmp_path / "run")
    config = PairsConfig.load(overrides={"strategy": "all"})
    rollouts, files = candidates.read_rollouts([run], config)
    rollouts = rollouts.append_column("score", rollouts["reward"])
    rows = np.arange(len(rollouts))
    made = candidates.Candidates(rollouts, files, rows, config, None)
    made.read(rows)
    ((contents, row_of),) = made.contents([rows])
    assert contents["rollout_id"].take(pa.array(row_of)).to_pylist() == rollouts["rollout_id"].to_pylist()
    keys = [tuple(row[key] for key in ("prompt_key", "generation_key", "text_key")) for row in made.frame.to_pylist()]
    assert len(set(keys)) > 20
    made.close()
    moved = candidates.Candidates(rollouts.take(pa.array(rows[::-1])), files, rows, config, None)
    with pytest.raises(DataError, match="changed while they were read"):
        moved.read(rows)
    moved.close()


def test_a_disk_that_is_full_is_named_and_holds_no_file(tmp_path: Path) -> None:
    """The error is that of any output on a full disk, and names the folder that is being made."""
    run = some_run(tmp_path / "run")
    (tmp_path / "out").mkdir()
    with full_disk(at=2_000), pytest.raises(StoreError, match=str(tmp_path / ".out.tmp")):
        gymdata.pairs(run, output=tmp_path / "out", strategy="all")
    assert not any((tmp_path / "out").iterdir())
    assert not (tmp_path / ".out.tmp").exists()


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


@pytest.mark.full
def test_four_times_the_rollouts_take_hardly_more_memory(tmp_path: Path) -> None:
    """What Arrow holds at most grows by the ids and numbers of rollouts, not by their tokens."""
    peaks = {}
    for n in (12_000, 48_000):
        run = many_rollouts(tmp_path / str(n), n)
        done = subprocess.run([sys.executable, "-c", _PEAK, str(run), str(tmp_path / f"pairs-{n}")],
                              capture_output=True, text=True, check=True)  # fmt: skip
        pairs, peaks[n] = map(int, done.stdout.split())
        assert pairs > n / 8
    assert peaks[48_000] < 1.6 * peaks[12_000]
