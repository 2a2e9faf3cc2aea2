"""Repairing: every choice gives a file that validates without errors, changes no token, and counts its cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gymdata import filter as filter_rollouts
from gymdata import import_rollouts
from gymdata.commands.validate.fix import fix
from gymdata.commands.validate.run import validate
from gymdata.errors import DataError, StoreError, UsageError
from gymdata.rollouts.schema import HASHES
from gymdata.rollouts.turns import expand_prompts
from gymdata.store import read_table
from gymdata.store.columns import content_hashes
from tests.rollout_files import rollout
from tests.validate.generate import (
    NATIVE_PLANTS,
    NEMO_PLANTS,
    chat,
    native_rows,
    nemo_rows,
    one_in_two,
    write_lines,
    write_native,
)

CHOICES = ["split", "truncate", "drop"]
#: Turn 1 rewrites a generated token, turn 3 rewrites one of turn 2.
BROKEN = [
    ([1, 2], [3, 4]),
    ([1, 2, 3, 9, 5], [6, 7]),
    ([1, 2, 3, 9, 5, 6, 7, 8], [10, 11]),
    ([1, 2, 3, 9, 5, 6, 7, 8, 10, 99, 12], [13]),
]


def generations(path: Path) -> list[list[list[int]]]:
    return [[t["generation_token_ids"] for t in turns] for turns in read_table(path)["turns"].to_pylist()]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_breaks_are_split_truncated_or_dropped(tmp_path: Path, suffix: str) -> None:
    """Split keeps every generation in one of three rollouts, truncate the first turn, drop nothing."""
    source = write_native(tmp_path, [rollout("t", 0, 1.0, BROKEN, messages=chat(4)), *native_rows(n=2)], suffix)
    clean = generations(source)[1:]
    split = [[[3, 4]], [[6, 7], [10, 11]], [[13]], *clean]
    expected = {"split": split, "truncate": [[[3, 4]], *clean], "drop": clean}
    for choice in CHOICES:
        target = tmp_path / f"{choice}.parquet"
        account = fix(source, choice, target)  # type: ignore[arg-type]  # a text, not a literal
        assert generations(target) == expected[choice]
        assert validate(target).errors == 0
        assert (account.rollouts_in, account.rollouts_with_errors, account.errors_after) == (3, 1, 0)
        assert account.rollouts_out == len(expected[choice])
        assert validate(target).turns == validate(source).turns - account.costs[choice].turns_lost
        lost = {name: cost.generated_tokens_lost for name, cost in account.costs.items()}
        assert lost == {"split": 0, "truncate": 5, "drop": 7}
    parts = read_table(tmp_path / "split.parquet")
    assert parts["rollout_id"].to_pylist()[:3] == ["t-0-part1", "t-0-part2", "t-0-part3"]
    prompts = expand_prompts(parts["turns"].to_pylist()[1])
    assert [p.tolist() for p in prompts] == [BROKEN[1][0], BROKEN[2][0]]


@pytest.mark.parametrize("choice", ["split", "truncate"])
def test_the_hashes_of_a_part_are_of_its_own_tokens(tmp_path: Path, choice: Any) -> None:
    """Parts of one rollout have other tokens than it and each other, so no deduplication takes them for one."""
    source = write_native(tmp_path, [rollout("t", 0, 1.0, BROKEN, messages=chat(4))], "parquet")
    fix(source, choice, tmp_path / "fixed.parquet")
    fixed = read_table(tmp_path / "fixed.parquet")
    computed = content_hashes(fixed["turns"])
    assert {name: fixed[name].to_pylist() for name in HASHES} == {n: h.to_pylist() for n, h in computed.items()}
    assert filter_rollouts(tmp_path / "fixed.parquet", dedupe=True, write=False).rollouts_out == fixed.num_rows


@pytest.mark.parametrize("choice", CHOICES)
def test_every_native_fault_is_repaired(tmp_path: Path, choice: Any) -> None:
    """Whatever errors are planted, the copy has none, clean rollouts are all in it, its account adds up, and the source is
    as it was."""
    rows = one_in_two(native_rows(n=2 * len(NATIVE_PLANTS)), NATIVE_PLANTS)
    source = write_native(tmp_path, rows, "jsonl")
    before = source.read_bytes()
    account = fix(source, choice, tmp_path / "fixed.jsonl")
    assert account.errors_after == 0
    clean = account.rollouts_in - account.rollouts_with_errors
    assert account.rollouts_out == clean + account.costs[choice].rollouts_after
    kept = read_table(tmp_path / "fixed.jsonl")["rollout_id"].to_pylist()
    assert set(kept) >= {row["rollout_id"] for row in rows[::2]}
    assert source.read_bytes() == before


def test_rows_of_nemo_gym_are_imported_before_they_are_repaired(tmp_path: Path) -> None:
    """The refusal says so; what the import makes of them has no errors after the repair."""
    rows = one_in_two(nemo_rows(n=2 * len(NEMO_PLANTS)), NEMO_PLANTS)
    source = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(UsageError, match="holds NeMo Gym rows; --fix repairs rollouts") as refused:
        fix(source, "split", tmp_path / "fixed.parquet")
    assert refused.value.hint == f"`gymdata import {source} -o RUN` first"
    import_rollouts(source, tmp_path / "run")
    account = fix(tmp_path / "run", "split", tmp_path / "fixed.parquet")
    assert (account.errors_after, account.rollouts_out > len(rows) // 2) == (0, True)


def test_nothing_is_repaired_in_place(tmp_path: Path) -> None:
    """The source, an existing file, and an unknown choice are refused."""
    source = write_native(tmp_path, native_rows(n=2), "parquet")
    with pytest.raises(UsageError, match="is one of the files that are repaired"):
        fix(source, "drop", source)
    (tmp_path / "there.parquet").touch()
    with pytest.raises(StoreError, match="exists"):
        fix(source, "drop", tmp_path / "there.parquet")
    with pytest.raises(UsageError, match="--fix"):
        fix(source, "mend", tmp_path / "x.parquet")  # type: ignore[arg-type]  # a text, not a literal


def test_keys_that_no_table_has_are_left_out_of_the_copy(tmp_path: Path) -> None:
    """Every other command refuses such a row, so a warning alone would be of no use."""
    source = write_native(tmp_path, native_rows(n=2), "jsonl")
    *before, last = source.read_text().splitlines()
    row = json.loads(last)
    row["surprise"] = row["turns"][0]["surprise"] = 1
    source.write_text("\n".join([*before, json.dumps(row), ""]))
    with pytest.raises(DataError, match=r"unknown fields surprise, turns\[\]\.surprise") as refused:
        read_table(source)
    assert refused.value.hint == f"`gymdata validate {source}` names every such row, and repairs a copy"
    account = fix(source, "drop", tmp_path / "fixed.jsonl")
    assert (account.rollouts_out, account.rollouts_with_errors, account.errors_after) == (2, 0, 0)
    assert generations(tmp_path / "fixed.jsonl")[1] == [t["generation_token_ids"] for t in row["turns"]]


def test_a_fault_that_is_not_of_structure_leaves_its_row_readable(tmp_path: Path) -> None:
    """A log-probability that is no number costs the turns from it on; a reward that is none costs the rollout."""
    rows = native_rows(n=3)
    rows[1]["turns"][2]["generation_log_probs"][0] = float("nan")
    rows[2]["reward"] = float("inf")
    account = fix(write_native(tmp_path, rows, "parquet"), "truncate", tmp_path / "out.parquet")
    assert (account.rows_unreadable, account.rollouts_out) == (0, 2)
    assert [len(row["turns"]) for row in read_table(tmp_path / "out.parquet").to_pylist()] == [4, 2]
