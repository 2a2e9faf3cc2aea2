"""Selection of pairs: the strict rules, the accounting, and that row order never matters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymdata.commands.pairs import select as pairs
from gymdata.commands.pairs.strategies import STRATEGIES
from gymdata.errors import UsageError
from gymdata.rollouts.messages import split_tasks


def frame(*groups: tuple[str, list[float | None]], **columns: list[Any]) -> pa.Table:
    """One row a score; rollout ids are group letter and index."""
    rows = [(g, i, s) for g, scores in groups for i, s in enumerate(scores)]
    return pa.table(
        {
            "group_id": pa.array([g for g, _, _ in rows], pa.string()),
            "task_id": pa.array([g[:1] for g, _, _ in rows], pa.string()),
            "rollout_id": pa.array([f"{g}{i}" for g, i, _ in rows], pa.string()),
            "rollout_index": pa.array([i for _, i, _ in rows], pa.int32()),
            "score": pa.array([s for _, _, s in rows], pa.float64()),
            **columns,
        }
    )


def names(table: pa.Table, selection: pairs.Selection) -> list[tuple[str, str]]:
    ids = table["rollout_id"].to_pylist()
    return [(ids[a], ids[b]) for a, b in zip(selection.chosen, selection.rejected, strict=True)]


def adds_up(counts: pairs.PairCounts) -> bool:
    groups = counts.groups_too_small + counts.groups_without_variance + counts.groups_paired + counts.groups_all_dropped
    return counts.candidates == counts.pairs + sum(counts.dropped.values()) and counts.groups == groups


@pytest.mark.parametrize(
    ("strategy", "scores", "chosen"),
    [
        ("best-worst", [0.5, 1.0, 1.0, 0.0, 0.0], [("a1", "a4"), ("b1", "b0")]),
        (
            "all",
            [1.0, 0.0, 0.5, 0.0],
            [("a0", "a1"), ("a0", "a3"), ("a0", "a2"), ("a2", "a1"), ("a2", "a3"), ("b1", "b0")],
        ),
        ("adjacent", [0.0, 0.6, 1.0], [("a1", "a0"), ("a2", "a1"), ("b1", "b0")]),
    ],
)
def test_a_strategy_pairs_by_rank(strategy: Any, scores: list[float], chosen: list[tuple[str, str]]) -> None:
    """best-worst: the highest score (lowest index) over the lowest (highest index); all: every two different scores, widest
    first, ties by index; adjacent: each with the next lower one."""
    f = frame(("a", scores), ("b", [0.0, 1.0]))
    assert names(f, pairs.select_pairs(f, strategy)) == chosen


@pytest.mark.parametrize("strategy", STRATEGIES.names())
def test_missing_and_non_finite_scores_never_pair(strategy: str) -> None:
    """Null, NaN and infinite scores are counted as unscored and are in no pair."""
    f = frame(("a", [None, 1.0, math.nan, 0.0, math.inf, -math.inf]), ("b", [None, 1.0]))
    got = pairs.select_pairs(f, strategy)
    assert names(f, got) == [("a1", "a3")]
    assert got.counts.rollouts_unscored == 5
    assert got.counts.groups_too_small == 1
    assert adds_up(got.counts)


@pytest.mark.parametrize(
    ("low", "high", "least", "made"),
    [(0.5, 0.5 + 1e-10, 0.0, 0), (0.7, 0.8, 0.1, 0), (0.8, 0.9, 0.1, 0), (0.7, 0.8, 0.09, 1), (0.0, 1.0, 1.0, 0)],
)
def test_margin_is_strict_within_tolerance(low: float, high: float, least: float, made: int) -> None:
    """A margin must beat min_margin by more than rounding: 0.8 − 0.7 is not more than 0.1."""
    got = pairs.select_pairs(frame(("a", [low, high])), min_margin=least)
    assert got.counts.pairs == made
    assert adds_up(got.counts)


#: A pair each of a, b, c and d.
FOUR = [(name, [1.0, 0.0]) for name in "abcd"]
TWICE = [("a1", [1.0, 0.0, 0.5]), ("a2", [1.0, 0.0, 0.5])]


@pytest.mark.parametrize(
    ("groups", "columns", "settings", "kept", "dropped"),
    [
        pytest.param(
            FOUR,
            {
                "prompt_key": [1, 1, 2, 2, 3, 4, 5, 5],
                "generation_key": [7, 7, 1, 2, 3, 4, 5, 6],
                "text_key": [1, 2, 9, 9, 3, 4, 0, 0],
            },
            {},
            ["d0 d1"],
            {"identical": 2, "other_prompt": 1},
            id="equal ids, equal text and other prompts, after pairing",
        ),
        pytest.param(
            [("ax", [1.0, 0.0]), ("ay", [0.0, 1.0]), ("az", [1.0, 0.0])],
            {"prompt_key": [1] * 6, "generation_key": [10, 11, 10, 11, 10, 12]},
            {},
            ["az0 az1"],
            {"contradictory": 2},
            id="both of two pairs that rank the same answers both ways",
        ),
        pytest.param(
            [("ax", [1.0, 0.9, 0.0]), ("ay", [0.5, 0.0])],
            {"truncated": [True] + [False] * 4},
            {"strategy": "all", "max_per_task": 1, "truncated": "drop"},
            ["ax1 ax2"],
            {"truncated": 2, "over_the_cap": 1},
            id="all but the widest margins of a task, after the other filters",
        ),
        pytest.param(
            [("a", [0.2, 0.0]), ("b", [1.0, 0.0]), ("c", [0.3, 0.0]), ("d", [0.3, 0.0])],
            {"n_generated_tokens": [5, 1, 5, 1, 1, 5, 3, 3]},
            {"length_balance": 0.5},
            ["b0 b1", "c0 c1", "d0 d1"],
            {"length_balance": 1},
            id="the narrowest of those that the longer one wins",
        ),
        pytest.param(
            [("a", [1.0, 0.5, 0.0])],
            {"truncated": [False, False, True]},
            {},
            ["a0 a2"],
            {},
            id="no truncated loser without a request",
        ),
        pytest.param(
            [("a", [1.0, 0.5, 0.0])],
            {"truncated": [False, False, True]},
            {"truncated": "drop"},
            [],
            {"truncated": 1},
            id="a truncated loser on request, and no other in its place",
        ),
        pytest.param(
            TWICE,
            {"content_key": [7, 8, 9, 7, 8, 9]},
            {"strategy": "all", "max_per_task": 3},
            ["a10 a11", "a10 a12", "a12 a11"],
            {"duplicate": 3},
            id="copies before the cap",
        ),
        pytest.param(
            TWICE,
            {"content_key": [7, 8, 9, 7, 8, 9]},
            {"strategy": "all", "max_per_task": 3, "duplicates": "keep"},
            ["a10 a11", "a10 a12", "a20 a21"],
            {"over_the_cap": 3},
            id="no copies on request",
        ),
        pytest.param(
            [("a", [0.5, 0.0]), ("b", [1.0, 0.0])],
            {"content_key": [1, 2, 1, 2]},
            {},
            ["b0 b1"],
            {"duplicate": 1},
            id="of copies that were scored twice the narrower margin",
        ),
    ],
)
def test_what_is_dropped(
    groups: list[Any], columns: dict[str, list[Any]], settings: dict[str, Any], kept: list[str], dropped: dict[str, int]
) -> None:
    """Each pair that is dropped is counted under one reason, and the others stay."""
    unsigned = {name: pa.array(v, pa.uint64()) if name.endswith("_key") else pa.array(v) for name, v in columns.items()}
    f = frame(*groups, **unsigned)
    got = pairs.select_pairs(f, **settings)
    assert [f"{one} {other}" for one, other in names(f, got)] == kept
    assert {reason: count for reason, count in got.counts.dropped.items() if count} == dropped
    assert adds_up(got.counts)


def test_split_is_by_task_and_repeatable() -> None:
    """The held-out side has the asked share of the tasks, whatever the order, and never all or none."""
    tasks = [f"t{i}" for i in range(50)]
    held = split_tasks(tasks, 0.1, seed=1)
    assert len(held) == 5
    assert held == split_tasks(tasks[::-1] * 2, 0.1, seed=1)
    assert held != split_tasks(tasks, 0.1, seed=2)
    assert len(split_tasks(["a", "b"], 0.01)) == 1
    with pytest.raises(UsageError, match=r"got 1 task, expected at least 2, .*\n.*split=0 in training"):
        split_tasks(["a"], 0.1)
    with pytest.raises(UsageError):
        split_tasks(tasks, 1.0)


rows = st.lists(
    st.tuples(
        st.sampled_from(["a1", "a2", "b1", "c1"]),
        st.sampled_from([None, 0.0, 0.5, 1.0, math.nan]),
        st.integers(1, 4),  # generation
        st.integers(0, 3),  # length
        st.booleans(),
    ),
    max_size=24,
)


@given(
    rows,
    st.permutations(range(24)),
    st.sampled_from(STRATEGIES.names()),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([None, 0.0, 0.5]),
)
def test_row_order_never_matters(
    data: list[Any], order: list[int], strategy: str, cap: int | None, balance: float | None
) -> None:
    """Shuffled rows give the same pairs in the same order, and every candidate is accounted for."""
    f = pa.table(
        {
            "group_id": pa.array([r[0] for r in data], pa.string()),
            "task_id": pa.array([r[0][0] for r in data], pa.string()),
            "rollout_id": pa.array([f"r{i:02d}" for i in range(len(data))], pa.string()),
            "rollout_index": pa.array([i % 5 for i in range(len(data))], pa.int32()),
            "score": pa.array([r[1] for r in data], pa.float64()),
            "generation_key": pa.array([r[2] for r in data], pa.uint64()),
            "n_generated_tokens": pa.array([r[3] for r in data], pa.int64()),
            "truncated": pa.array([r[4] for r in data], pa.bool_()),
        }
    )
    mixed = f.take(pa.array([i for i in order if i < len(data)], pa.int64()))
    settings: dict[str, Any] = {"max_per_task": cap, "length_balance": balance, "truncated": "drop"}
    first, second = (pairs.select_pairs(t, strategy, **settings) for t in (f, mixed))
    assert names(f, first) == names(mixed, second)
    assert first.counts == second.counts
    assert adds_up(first.counts)
    assert (first.margin > pairs.TOLERANCE).all()
    assert np.isfinite(first.margin).all()
    groups, keys = f["group_id"].to_pylist(), f["generation_key"].to_pylist()
    for a, b in zip(first.chosen, first.rejected, strict=True):
        assert groups[a] == groups[b]
        assert keys[a] != keys[b]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0])), max_size=24))
def test_every_content_pair_is_there_once(rows: list[tuple[str, int, float]]) -> None:
    """Whatever the rollouts hold, no two pairs hold the same and no content pair is lost."""
    by_group = {name: [(score, content) for group, content, score in rows if group == name] for name in "abc"}
    keys = [content for members in by_group.values() for _, content in members]
    f = frame(
        *((name, [score for score, _ in members]) for name, members in by_group.items()),
        task_id=pa.array(["t"] * len(rows), pa.string()),
        content_key=pa.array(keys, pa.int64()),
    )
    contents = f["content_key"].to_numpy()
    every, once = (pairs.select_pairs(f, "all", duplicates=how) for how in ("keep", "drop"))
    made = list(zip(contents[once.chosen].tolist(), contents[once.rejected].tolist(), strict=True))
    assert len(made) == len(set(made))
    assert set(made) == set(zip(contents[every.chosen].tolist(), contents[every.rejected].tolist(), strict=True))
    assert adds_up(once.counts)
