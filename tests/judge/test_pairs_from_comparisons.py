"""Pairs from comparisons: only what both positions agree on, with everything else counted under its reason."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gymdata
from gymdata.commands.judge.groups import COLUMNS, Aggregation, group_comparisons, rewards_of, score_table
from gymdata.errors import UsageError
from gymdata.genrm.aggregate import Adjustments
from gymdata.rollouts.schema import COMPARISONS, SCORES
from gymdata.store import read_run_json, read_table, write_run_json
from tests.rollout_files import rollout, two_turns, write_run, write_table

#: (i, j, score_1, score_2, ranking) among three rollouts of one task.
Row = tuple[int, int, float | None, float | None, float | None]


def judged_run(tmp_path: Path, rows: list[Row], n: int = 3, name: str = "j") -> Path:
    """A run of one group with comparisons by judge ``name``."""
    run = tmp_path / "run"
    if not run.exists():
        write_run(run, [rollout("a", i, None, two_turns(1, 40 + i), text=f"answer {i}") for i in range(n)])
    columns: list[dict[str, Any]] = [
        {
            "comparison_id": f"{i}-{j}",
            "group_id": "group-a",
            "task_id": "a",
            "rollout_i": f"a-{i}",
            "rollout_j": f"a-{j}",
            "response_i": i,
            "response_j": j,
            "judge_idx": 0,
            "score_1": one,
            "score_2": two,
            "ranking": ranking,
            "status": "judged" if one is not None or ranking is not None else "failed",
            "judge": "x",
            "run_id": "run-1",
        }
        for i, j, one, two, ranking in rows
    ]
    folder = run / f"judge-{name}"
    table = pa.Table.from_pylist(columns, schema=COMPARISONS.schema)
    write_table(table, folder / "comparisons.parquet", COMPARISONS)
    field = group_comparisons(read_table(run, columns=COLUMNS), "final", None)
    rewards, _, _ = rewards_of(table, field, Aggregation("simple_tiebreaker", Adjustments()))
    write_table(score_table(rewards, field, name, "x"), folder / "scores.parquet", SCORES)
    write_run_json(folder, {"stage": "judge"})
    return run


def names(report) -> list[tuple[str, str]]:
    table = report.table
    return list(zip(table["chosen_rollout_id"].to_pylist(), table["rejected_rollout_id"].to_pylist(), strict=True))


def both(i: int, j: int, one: float, two: float) -> list[Row]:
    """The same verdict in both positions."""
    return [(i, j, one, two, 2), (j, i, two, one, 5)]


def test_consistent_pairs_take_their_margin_from_the_aggregate(tmp_path):
    """Three consistent comparisons give three pairs, widest margin first; the file says where they come from."""
    run = judged_run(tmp_path, [*both(0, 1, 5, 3), *both(1, 2, 3, 1), *both(0, 2, 5, 1)])
    report = gymdata.pairs(run, source="comparisons", strategy="all")
    assert names(report) == [("a-0", "a-2"), ("a-0", "a-1"), ("a-1", "a-2")]
    assert report.table["margin"].to_pylist() == [4, 2, 2]
    assert set(report.table["source"].to_pylist()) == {"genrm"}
    facts = read_run_json(run / "pairs-comparisons")
    assert [Path(p["path"]).name for p in facts["parents"]] == ["run", "judge-j"]
    assert facts["counts"]["comparisons"]["in_both_positions"] == 3


def test_a_winner_that_changes_with_the_positions_gives_no_pair(tmp_path):
    """Flipped, judged in one position only, tied, and outvoted pairs are each dropped under their reason."""
    rows: list[Row] = [(0, 1, 5, 3, 2), (1, 0, 4, 3, 2), (0, 2, 5, 1, 1), *both(1, 2, 3, 3)]
    rows[-2:] = [(1, 2, 3, 3, 3.5), (2, 1, 3, 3, 3.5)]
    report = gymdata.pairs(judged_run(tmp_path, rows), source="comparisons", strategy="all")
    assert names(report) == []
    dropped = {reason: n for reason, n in report.counts.dropped.items() if n}
    assert dropped == {"order_flipped": 1, "not_in_both_positions": 1, "undecided": 1}
    assert report.comparisons["order_flipped"] == report.comparisons["contradicted"] == 1
    loose = gymdata.pairs(tmp_path / "run", source="comparisons", strategy="all", order="any", write=False)
    assert ("a-0", "a-2") in names(loose)
    assert loose.counts.dropped["order_flipped"] == 1


def test_cycles_are_reported_and_the_aggregate_never_overrules_the_judge(tmp_path):
    """a > b > c > a: the pair whose aggregate points the other way is dropped."""
    run = judged_run(tmp_path, [*both(0, 1, 5, 1), *both(1, 2, 4, 3), *both(2, 0, 3, 2)])
    report = gymdata.pairs(run, source="comparisons", strategy="all")
    assert report.comparisons["cycles"] == 1
    assert report.counts.dropped["against_comparisons"] == 2
    assert names(report) == [("a-0", "a-1")]


def test_neither_positions_nor_row_order_change_a_pair(tmp_path):
    """The same comparisons, shuffled and with all positions exchanged, give the same pairs."""
    rows: list[Row] = [*both(0, 1, 5, 3), *both(1, 2, 3, 1), (0, 2, 4, 1, 1), (2, 0, 4, 2, 1)]
    expected = None
    for number, order in enumerate(itertools.islice(itertools.permutations(rows), 0, 720, 240)):
        for swap in (False, True):
            mine = [(j, i, two, one, 7 - r) if swap else (i, j, one, two, r) for i, j, one, two, r in order]
            run = judged_run(tmp_path / f"{number}{swap}", mine)
            table = gymdata.pairs(run, source="comparisons", strategy="all", write=False).table
            expected = expected or table
            assert table.equals(expected)
    assert expected is not None
    assert expected.num_rows == 2


def test_which_judge_is_meant(tmp_path):
    """With one judge it is that one; with several it must be named; rewards of a judge are rewards by name."""
    run = judged_run(tmp_path, both(0, 1, 5, 3))
    judged_run(tmp_path, both(0, 1, 1, 3), name="k")
    with pytest.raises(UsageError, match="j, k"):
        gymdata.pairs(run, source="comparisons")
    assert names(gymdata.pairs(run, source="comparisons", judge="k")) == [("a-1", "a-0")]
    assert names(gymdata.pairs(run, reward="j", write=False)) == [("a-0", "a-1")]
    write_run(tmp_path / "none", [rollout("a", i, 0.0, two_turns(1, 40 + i)) for i in range(2)])
    with pytest.raises(UsageError, match="no comparisons"):
        gymdata.pairs(tmp_path / "none", source="comparisons")


def test_fork_pairs_begin_where_the_rollouts_part(tmp_path):
    """What both share is prompt; each whole sequence stays, and both sides keep a generated token."""
    from gymdata.commands.validate.run import validate

    run = judged_run(tmp_path, [*both(0, 1, 5, 3), *both(1, 2, 3, 1), *both(0, 2, 5, 1)])
    whole = gymdata.pairs(run, source="comparisons", strategy="all", write=False).table.to_pylist()
    report = gymdata.pairs(run, source="comparisons", strategy="all", fork=True)
    for before, after in zip(whole, report.table.to_pylist(), strict=True):
        assert after["prompt_ids"] == [1, 1, 10, 11, 2, 30, 31]
        for side in ("chosen", "rejected"):
            assert after["prompt_ids"] + after[f"{side}_ids"] == before["prompt_ids"] + before[f"{side}_ids"]
            assert len(after[f"{side}_ids"]) == len(after[f"{side}_mask"]) == len(after[f"{side}_logprobs"]) == 2
            assert after[f"{side}_mask"] == [1, 1]
    found = validate(str(report.files["train"]))
    assert "P602" not in str(found)
