"""A refusal is at most 300 characters with its hint, however many names or long a value it is about."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import gymdata
from gymdata.errors import DataError, GymdataError, UsageError
from gymdata.filter.conditions import unknown_column
from gymdata.texts import abridged

MANY = [f"column_number_{n}" for n in range(60)]
LONG = "x" * 5_000


@pytest.mark.parametrize(
    "error",
    [
        UsageError.unknown_key("wrong", MANY, "sft.yaml"),
        UsageError.unknown_key(LONG, MANY, "sft.yaml"),
        UsageError.unknown_key("wrong", MANY, "sft.yaml", dict.fromkeys(MANY)),
        UsageError.unknown_choice("--from", "wrong", MANY),
        UsageError.bad_value("--reward", LONG, "a number"),
        UsageError.bad_value("--reward", MANY, "a number"),
        DataError.missing_columns("a.parquet", "rollouts", MANY, MANY),
        DataError.not_a_run("folder", MANY),
        DataError.nothing_to_train([Path(name) for name in MANY], "rollouts"),
        unknown_column("wrong", MANY, "--where"),
    ],
)
def test_a_refusal_about_many_names_or_a_long_value_is_short(error: GymdataError) -> None:
    assert len(str(error)) <= 300


@pytest.mark.parametrize("read", [gymdata.validate, lambda file: gymdata.import_rollouts(file, file.parent / "run")])
def test_rows_of_many_columns_are_refused_in_short(read: Callable[[Path], object], tmp_path: Path) -> None:
    """The path aside, which is as long as it is."""
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(dict.fromkeys(MANY, 1)) + "\n")
    with pytest.raises(DataError) as refused:
        read(file)
    assert len(str(refused.value).replace(str(tmp_path), "")) <= 300
    assert "column_number_0" in str(refused.value)


def test_an_abridged_list_says_how_many_more_there_are() -> None:
    """Names are whole, but for one that alone is too long."""
    assert abridged(["a", "b"]) == "a, b"
    assert abridged([]) == ""
    *first, last = abridged(MANY).split(", ")
    assert set(first) < set(MANY)
    assert last == f"{MANY[len(first)]} and {len(MANY) - len(first) - 1} more"
    assert len(abridged([LONG, "b"])) < 140
