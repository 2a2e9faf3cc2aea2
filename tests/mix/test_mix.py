"""``mix`` on files: parts of sources by weight, tasks whole, nothing twice."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gymdata
from gymdata.cli.main import main
from gymdata.errors import RefusedError, UsageError
from gymdata.rollouts.schema import PAIRS, ROLLOUTS
from gymdata.store import read_run_json, read_table, write_run_json
from tests.rollout_files import rollout, two_turns, write_run


def make_run(folder: Path, name: str, tasks: int, each: int = 2, **identity: Any) -> Path:
    rows = [
        rollout(f"{name}{task}", index, float(index % 2), two_turns(4, 10 * task + index))
        for task in range(tasks)
        for index in range(each)
    ]
    run = write_run(folder / name, rows)
    write_run_json(run, read_run_json(run) | {"identity": identity})
    return run


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Twenty tasks and ten tasks of two rollouts each."""
    return make_run(tmp_path, "a", 20), make_run(tmp_path, "b", 10)


def taken(path: Path) -> Counter[str]:
    """Rollouts of each run, by the first letter of their names."""
    return Counter(name[0] for name in read_table(path, ROLLOUTS, ["rollout_id"])["rollout_id"].to_pylist())


def test_the_shares_of_the_rows_are_the_weights(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """Without a number of rows as many are taken as the smaller part allows, and each row is as it was read."""
    a, b = runs
    report = gymdata.mix({a: 0.5, b: 0.5}, tmp_path / "o")
    assert taken(tmp_path / "o") == {"a": 20, "b": 20}
    assert [(one.taken, one.taken_tasks, one.share) for one in report.sources] == [(20, 10, 0.5), (20, 10, 0.5)]
    before = {row["rollout_id"]: row for run in runs for row in read_table(run).to_pylist()}
    assert all(row == before[row["rollout_id"]] for row in read_table(tmp_path / "o").to_pylist())


def test_tasks_are_whole_and_a_seed_draws_the_same(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """Each task in the output has all its rollouts; the same seed takes the same tasks, another one others."""
    weights = dict(zip(runs, (7, 3), strict=True))
    tasks_of = {}
    for name, seed in (("o", 1), ("again", 1), ("other", 2)):
        gymdata.mix(weights, tmp_path / name, rows=20, seed=seed)
        tasks = read_table(tmp_path / name, ROLLOUTS, ["task_id"])["task_id"].to_pylist()
        assert set(Counter(tasks).values()) == {2}
        tasks_of[name] = set(tasks)
    assert taken(tmp_path / "o") == {"a": 14, "b": 6}
    assert tasks_of["o"] == tasks_of["again"] != tasks_of["other"]


def test_a_split_keeps_tasks_together(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """No task is on both sides, and both sides together are what was taken."""
    gymdata.mix(dict.fromkeys(runs, 1), tmp_path / "o", test_share=0.2)
    sides = [
        set(read_table(tmp_path / "o" / f"{side}.parquet", ROLLOUTS, ["task_id"])["task_id"].to_pylist())
        for side in ("train", "test")
    ]
    assert not sides[0] & sides[1]
    assert [len(side) for side in sides] == [16, 4]


def test_the_sources_are_in_the_lineage(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """run.json names every source, its weight and what was taken; validate finds in the output what it finds in them."""
    gymdata.mix(dict(zip(runs, (3, 1), strict=True)), tmp_path / "o")
    facts = read_run_json(tmp_path / "o")
    assert [Path(parent["path"]) for parent in facts["parents"]] == list(runs)
    assert (facts["stage"], list(facts["config"]["weights"].values())) == ("mix", [3.0, 1.0])
    assert [one["taken"] for one in facts["counts"]["sources"]] == [40, 12]
    assert gymdata.validate(tmp_path / "o").by_code.keys() == gymdata.validate(runs[0]).by_code.keys()


def test_pairs_are_mixed_with_pairs(tmp_path: Path) -> None:
    """The output of two pairs files holds pairs, with the columns of both; pairs and rollouts are refused."""
    made = []
    for name in ("a", "b"):
        run = make_run(tmp_path, name, 6, 4)
        gymdata.pairs(run, output=tmp_path / f"{name}-pairs")
        made.append(tmp_path / f"{name}-pairs")
    report = gymdata.mix(dict.fromkeys(made, 1), tmp_path / "o")
    pairs = read_table(tmp_path / "o", PAIRS)
    assert report.table == "pairs"
    assert pairs.num_rows == report.rows_out > 0
    assert {name[0] for name in pairs["task_id"].to_pylist()} == {"a", "b"}
    with pytest.raises(UsageError, match="mix rollouts with rollouts") as refused:
        gymdata.mix({made[0]: 1, tmp_path / "a": 1}, tmp_path / "x")
    assert "holds pairs" in refused.value.message
    shutil.copytree(made[0], tmp_path / "copy")
    with pytest.raises(RefusedError, match="more than once") as twice:
        gymdata.mix({made[0]: 1, tmp_path / "copy": 1}, tmp_path / "y")
    assert twice.value.code == "P606"


PROMPTS = {
    "first": "Write a poem about the sea at night, in four lines that rhyme.",
    "copy": "write a poem about the sea at  night, in four lines that rhyme!",
    "other": "How many grams are in three and a half kilograms of flour?",
}


def test_near_duplicates_are_not_in_the_output(tmp_path: Path) -> None:
    """A task of the second source whose prompt differs from one of the first in case, white space and one mark is left out
    with all its rows, and named with the earlier one; as equal it does not count."""
    pytest.importorskip("rensa", reason="pip install 'gymdata[mix]'")
    sources = []
    for number, names in enumerate((("first", "other"), ("copy",))):
        rows = []
        for name in names:
            row = rollout(name, 0, 1.0, two_turns(4, 10 * number + len(rows)))
            row["messages"][0]["content"] = PROMPTS[name]
            rows.append(row)
        extra = [rollout(f"more{number}", 0, 1.0, two_turns(4, 90 + number))]
        extra[0]["messages"][0]["content"] = f"{number} {'zero' if number else 'one two three four'}"
        sources.append(write_run(tmp_path / str(number), [*rows, *extra]))
    weights = {sources[0]: 3, sources[1]: 1}
    assert gymdata.mix(weights, dry_run=True, near_duplicates=1.0).similar == {}
    report = gymdata.mix(weights, tmp_path / "o", near_duplicates=0.8)
    names = set(read_table(tmp_path / "o", ROLLOUTS, ["task_id"])["task_id"].to_pylist())
    assert (report.similar, names) == ({"copy": "first"}, {"first", "other", "more0", "more1"})


def test_a_source_that_has_nothing_new_is_named(tmp_path: Path) -> None:
    """Where every task of a source is like an earlier one, nothing is written, and the source is named."""
    pytest.importorskip("rensa", reason="pip install 'gymdata[mix]'")
    sources = []
    for name in "ab":
        row = rollout(name, 0, 1.0, two_turns(4, 10))
        row["messages"][0]["content"] = PROMPTS["first"]
        sources.append(write_run(tmp_path / name, [row]))
    with pytest.raises(RefusedError, match="b: nothing to take: every task is like an earlier one"):
        gymdata.mix(dict.fromkeys(sources, 1), tmp_path / "o", near_duplicates=0.9)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("weights", "settings", "message"),
    [
        ((1, 0), {}, "the weight of .*: got 0, expected a number above 0"),
        ((1, True), {}, "expected a number above 0"),
        ((0.5, 0.5), {"rows": 60}, "rows=60 would take 30 rows from .*, which has 20"),
        ((0.5, 0.5), {"rows": 0}, "rows"),
        ((0.5, 0.5), {"test_share": 1.5}, "test_share"),
        ((0.5, 0.5), {"near_duplicates": 0.1}, "near_duplicates"),
    ],
)
def test_what_cannot_be_mixed_is_named(
    runs: tuple[Path, Path], tmp_path: Path, weights: tuple[float, float], settings: dict[str, Any], message: str
) -> None:
    """A weight that is no number above 0, more rows than there are, and shares that are none are refused by name."""
    with pytest.raises(UsageError, match=message):
        gymdata.mix(dict(zip(runs, weights, strict=True)), tmp_path / "o", **settings)
    assert not (tmp_path / "o").exists()


def test_other_tokenizers_and_repeated_rollouts_are_refused(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """One file holds the ids of one tokenizer, and a rollout once."""
    for run, digest in zip(runs, "xy", strict=True):
        write_run_json(run, read_run_json(run) | {"identity": {"tokenizer_hash": digest}})
    with pytest.raises(UsageError, match="different tokenizers"):
        gymdata.mix(dict.fromkeys(runs, 1), tmp_path / "o")
    shutil.copytree(runs[0], tmp_path / "copy")
    with pytest.raises(RefusedError, match="more than once") as refused:
        gymdata.mix({runs[0]: 1, tmp_path / "copy": 1}, tmp_path / "o")
    assert refused.value.code == "D701"


def test_the_command_prints_what_it_took(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SOURCE=WEIGHT on the command line; --dry-run writes nothing; a source without a weight is a usage error."""
    words = ["mix", f"{runs[0]}=0.7", f"{runs[1]}=0.3"]
    assert main([*words, "--dry-run", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [one["taken"] for one in printed["sources"]] == [40, 16]
    assert main([*words, "-o", str(tmp_path / "o")]) == 0
    assert "28.6%" in capsys.readouterr().out
    assert main(["mix", str(runs[0]), "-o", str(tmp_path / "x")]) == 2
    assert "=WEIGHT" in capsys.readouterr().err
    assert main([*words, f"{runs[0]}=0.1", "-o", str(tmp_path / "x")]) == 2
    assert f"{runs[0]} is given twice" in capsys.readouterr().err


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    weights=st.lists(st.floats(0.01, 100), min_size=5, max_size=5),
)
def test_the_most_rows_repeat_none(sizes: list[int], weights: list[float]) -> None:
    """Whatever the weights, no source gives more rows than it has, and one is used up to within a row."""
    import numpy as np

    from gymdata.mix.run import rows_of_sources

    there = np.array(sizes)
    counts = rows_of_sources([str(n) for n in range(len(sizes))], np.array(weights[: len(sizes)]), there, None)
    assert (counts <= there).all()
    assert (there - counts).min() <= 1
