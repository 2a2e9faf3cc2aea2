"""Validation of pairs files: every P code at its row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gymdata.cli.main import main
from gymdata.commands.validate.run import validate
from gymdata.rollouts.schema import PAIRS
from tests.rollout_files import write_table


def pair(index: int, **columns: Any) -> dict[str, Any]:
    row = {
        "pair_id": f"p{index}", "run_id": "r", "task_id": f"t{index}",
        "prompt": [{"role": "user", "content": "q"}],
        "chosen": [{"role": "assistant", "content": "yes"}], "rejected": [{"role": "assistant", "content": "no"}],
        "chosen_rollout_id": f"c{index}", "rejected_rollout_id": f"d{index}", "margin": 1.0, "weight": 1.0,
        "source": "reward", "policy_hash": "h", "policy_version": 0, "temperature": 1.0,
        "prompt_ids": [1, index], "chosen_ids": [5, 6], "rejected_ids": [7], "chosen_mask": [1, 1], "rejected_mask": [1],
        "chosen_logprobs": [-1.0, -2.0], "rejected_logprobs": [-1.0],
    }  # fmt: skip
    return row | columns


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    schema = pa.schema([f for f in PAIRS.schema if f.name not in PAIRS.optional], metadata=PAIRS.metadata)
    write_table(pa.Table.from_pylist(rows, schema=schema), path, PAIRS)
    return path


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_clean_pairs_are_never_flagged(tmp_path: Path, suffix: str) -> None:
    """Two pairs of different tasks are counted with their tokens."""
    report = validate(write(tmp_path / f"pairs.{suffix}", [pair(0), pair(1)]))
    assert (report.violations, report.rollouts, report.tokens) == ([], 2, 10)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("columns", "code", "position"),
    [
        ({"rejected_ids": [5, 6], "rejected_mask": [1, 1], "rejected_logprobs": [-1, -1]}, "P601", None),
        ({"rejected": [{"role": "assistant", "content": "yes"}]}, "P601", None),
        ({"prompt_ids": [], "prompt": []}, "P602", None),
        ({"chosen_rollout_id": "c0"}, "P602", None),
        ({"margin": 0.0}, "P603", None),
        ({"margin": float("nan")}, "P603", None),
        ({"chosen_rollout_id": "d0", "rejected_rollout_id": "c0", "prompt_ids": [1, 0]}, "P604", None),
        ({"chosen_ids": [5, -6]}, "T206", 1),
        ({"chosen_mask": [1]}, "S102", None),
        ({"rejected_logprobs": []}, "L301", None),
        ({"rejected_logprobs": [float("inf")]}, "L302", 0),
        ({"chosen_logprobs": [-1.0, 0.5]}, "L303", 1),
    ],
)
def test_planted_fault_is_found(
    tmp_path: Path, columns: dict[str, Any], code: str, position: int | None, suffix: str
) -> None:
    """One fault in the second pair is found there, and the others are clean."""
    report = validate(write(tmp_path / f"pairs.{suffix}", [pair(0), pair(1, **columns), pair(2)]))
    assert {(v.code, v.row, v.rollout_id, v.position) for v in report.violations} == {(code, 1, "p1", position)}


def test_a_row_that_is_no_pair_hides_no_other(tmp_path: Path) -> None:
    """Each is named at its row with its field, and the faults of the rows between are found."""
    path = write(tmp_path / "pairs.jsonl", [pair(0), pair(1), pair(2, margin=0.0), pair(3)])
    lines = path.read_text().splitlines()
    lines[1] = lines[1].replace('"chosen_ids":[5,6]', '"chosen_ids":[5,6.5]')
    path.write_text("\n".join([*lines, "no JSON"]))
    report = validate(path)
    found = sorted((v.row, v.code, v.rollout_id) for v in report.violations)
    assert found == [(1, "S102", None), (2, "P603", "p2"), (4, "S101", None)]
    assert (report.violations[0].detail, report.violations[0].got) == ("chosen_ids[1]", "number 6.5")
    assert report.rollouts == 3


def test_a_task_on_both_sides_of_a_split(tmp_path: Path) -> None:
    """P605 names the task that two files of one path share, once."""
    write(tmp_path / "pairs.parquet", [pair(0), pair(1)])
    write(tmp_path / "heldout.parquet", [pair(2), pair(3, task_id="t1"), pair(4, task_id="t1")])
    report = validate(str(tmp_path / "*.parquet"))
    assert [(v.code, Path(v.file or "").stem) for v in report.violations] == [("P605", "pairs")]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_the_same_pair_twice(tmp_path: Path, suffix: str) -> None:
    """P606 is a warning at each later copy, in one file or several, and names the first; other ids are another pair."""
    copy = {"prompt_ids": [1, 0]}
    write(tmp_path / f"pairs-1.{suffix}", [pair(0), pair(1, **copy), pair(2)])
    write(tmp_path / f"pairs-2.{suffix}", [pair(3, **copy), pair(4, prompt_ids=[1, 0, 5], chosen_ids=[6, 5])])
    report = validate(str(tmp_path / f"*.{suffix}"))
    found = [(v.code, Path(v.file or "").stem, v.row, v.rollout_id) for v in report.violations]
    assert found == [("P606", "pairs-1", 1, "p1"), ("P606", "pairs-2", 0, "p3")]
    assert {v.severity for v in report.violations} == {"warning"}
    assert all(str(v.detail).endswith(f"pairs-1.{suffix} row 0 (pair p0)") for v in report.violations)


def test_the_same_texts_twice(tmp_path: Path) -> None:
    """Pairs without ids are compared by their messages."""
    names = ("prompt_ids", "chosen_ids", "rejected_ids", "chosen_mask", "rejected_mask", "chosen_logprobs")
    bare: dict[str, Any] = {name: [] for name in (*names, "rejected_logprobs")}
    other = bare | {"chosen": [{"role": "assistant", "content": "maybe"}]}
    rows = [pair(n, **columns) for n, columns in enumerate([bare, bare, other])]
    report = validate(write(tmp_path / "pairs.parquet", rows))
    assert [(v.code, v.row) for v in report.violations if v.code == "P606"] == [("P606", 1)]


def test_a_file_of_pairs_is_counted_in_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pairs are not called rollouts, and have no turns to count."""
    path = write(tmp_path / "pairs.parquet", [pair(1), pair(2)])
    assert main(["validate", str(path)]) == 0
    assert "in 2 pairs, 10 tokens" in capsys.readouterr().out
