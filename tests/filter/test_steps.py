"""The steps of a filter on plain arrays: what stays, and that the order of rows does not matter."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

from gymdata.commands.filter.steps import Funnel
from gymdata.stats import STATISTICS, group_statistic

rewards = st.sampled_from([0.0, 0.1, 0.5, 1.0, math.nan, math.inf])
NAMES = ["a", "b"]
rows = st.lists(
    st.tuples(st.integers(0, 3), rewards, st.sampled_from(["a", "b", None]), st.integers(0, 2)), min_size=1, max_size=12
)


def funnel_of(given_rows: list[Any], order: list[int]) -> tuple[Funnel, dict[str, Any]]:
    picked = [(k, *given_rows[k]) for k in order]
    columns = {
        "index": np.array([k for k, *_ in picked]),
        "reward": np.array([reward for _, _, reward, _, _ in picked]),
        "category": np.array([-1 if c is None else NAMES.index(c) for _, _, _, c, _ in picked]),
        "key": np.array([key for *_, key in picked], np.uint64),
    }
    ids = pa.chunked_array([[f"r{k}"] for k, *_ in picked])
    return Funnel(ids, np.array([group for _, group, *_ in picked])), columns


def kept(given_rows: list[Any], order: list[int], step: str) -> tuple[set[str], Funnel]:
    funnel, columns = funnel_of(given_rows, order)
    if step == "dedupe":
        funnel.dedupe(columns["key"], columns["index"])
    elif step == "best of doubles":
        funnel.dedupe(columns["key"], columns["index"], columns["reward"])
    elif step == "best":
        funnel.best(2, "reward", columns["reward"], columns["index"])
    else:
        funnel.balance("category", columns["category"], NAMES, seed=3)
    return {f"r{order[k]}" for k in np.flatnonzero(funnel.alive)}, funnel


STEPS = ["dedupe", "best of doubles", "best", "balance"]


@given(rows, st.randoms(use_true_random=False), st.sampled_from(STEPS))
def test_the_order_of_rows_changes_nothing(given_rows: list[Any], random: Any, step: str) -> None:
    """Each step keeps the same rollouts, and counts the same reasons, whatever the order of the rows."""
    plain = list(range(len(given_rows)))
    shuffled = random.sample(plain, len(plain))
    (first, a), (second, b) = kept(given_rows, plain, step), kept(given_rows, shuffled, step)
    assert first == second
    assert a.steps == b.steps


@given(rows, st.sampled_from(STEPS))
def test_every_row_is_kept_or_counted_once(given_rows: list[Any], step: str) -> None:
    """What goes in comes out, or is counted under one reason."""
    _, funnel = kept(given_rows, list(range(len(given_rows))), step)
    (account,) = funnel.steps
    assert account.rows_in == len(given_rows) == account.rows_out + sum(account.dropped.values())


@given(rows)
def test_the_best_of_a_group_stay(given_rows: list[Any]) -> None:
    """A group keeps its two highest finite rewards, and no rollout without one."""
    names, _ = kept(given_rows, list(range(len(given_rows))), "best")
    for group in {g for g, *_ in given_rows}:
        finite = sorted((r for g, r, *_ in given_rows if g == group and math.isfinite(r)), reverse=True)
        left = sorted((r for k, (g, r, *_) in enumerate(given_rows) if g == group and f"r{k}" in names), reverse=True)
        assert left == finite[:2]


@given(rows)
def test_every_category_has_the_same_number(given_rows: list[Any]) -> None:
    """After balancing each category has as many rollouts as the rarest had; those without one are gone."""
    names, _ = kept(given_rows, list(range(len(given_rows))), "balance")
    had = [c for _, _, c, _ in given_rows if c is not None]
    left = [c for k, (_, _, c, _) in enumerate(given_rows) if f"r{k}" in names]
    least = min((had.count(c) for c in set(had)), default=0)
    assert sorted(left) == sorted(c for c in set(had) for _ in range(least))


def test_ids_tell_apart_what_is_equal_otherwise() -> None:
    """Of rollouts of one group with one score and one index, which two runs have, the first ids stay."""
    ids = pa.chunked_array([["c", "a"], ["x", "b", "d"]])
    funnel = Funnel(ids, np.array([0, 0, 1, 0, 0]))
    funnel.best(2, "reward", np.array([1.0, 1.0, 0.0, 1.0, 0.5]), np.zeros(5, np.int64))
    assert np.flatnonzero(funnel.alive).tolist() == [1, 2, 3]


@given(rows)
def test_one_of_equal_generations_stays(given_rows: list[Any]) -> None:
    """Of each (group, generation) the lowest index stays; a rollout that generated nothing is nobody's double."""
    names, _ = kept(given_rows, list(range(len(given_rows))), "dedupe")
    seen: set[tuple[int, int]] = set()
    expected = set()
    for k, (group, _, _, key) in enumerate(given_rows):
        if key == 0 or (group, key) not in seen:
            expected.add(f"r{k}")
        seen.add((group, key))
    assert names == expected


@given(rows)
def test_the_best_of_equal_generations_stays(given_rows: list[Any]) -> None:
    """With a score, of each (group, generation) the highest finite one stays, of equal ones the lowest index."""
    names, _ = kept(given_rows, list(range(len(given_rows))), "best of doubles")
    expected = {f"r{k}" for k, (*_, key) in enumerate(given_rows) if key == 0}
    for double in {(group, key) for group, _, _, key in given_rows if key}:
        mine = [
            (r if math.isfinite(r) else -1, -k) for k, (g, r, _, key) in enumerate(given_rows) if (g, key) == double
        ]
        expected.add(f"r{-max(mine)[1]}")
    assert names == expected


@given(rows, st.sampled_from(STATISTICS))
def test_group_statistics_are_of_what_is_known(given_rows: list[Any], what: str) -> None:
    """Statistics are over finite values: none is NaN, equal values have their own mean and a deviation of exactly 0."""
    groups, values = np.array([g for g, *_ in given_rows]), np.array([r for _, r, *_ in given_rows])
    result = group_statistic(what, values, groups, 4)
    for group in range(4):
        known = sorted(v for v in values[groups == group].tolist() if math.isfinite(v))
        if not known or (what == "std" and len(known) == 1):
            assert math.isnan(result[group])
            continue
        same = len(set(known)) == 1
        expected = {
            "mean": known[0] if same else np.mean(known), "min": known[0], "max": known[-1],
            "std": 0.0 if same else np.std(known, ddof=1) if len(known) > 1 else math.nan, "sum": np.sum(known),
        }[what]  # fmt: skip
        assert math.isclose(result[group], expected, rel_tol=1e-12, abs_tol=0.0)


@pytest.mark.filterwarnings("error")
def test_statistics_of_very_large_numbers() -> None:
    """Means and deviations are exact where sums and squares are beyond float64; such a sum is infinite."""
    values, groups = np.array([1e308, 1e308, -1e308, 1e308]), np.array([0, 0, 1, 1])
    assert group_statistic("mean", values, groups, 2).tolist() == [1e308, 0.0]
    assert group_statistic("std", values, groups, 2).tolist() == [0.0, pytest.approx(np.sqrt(2) * 1e308)]
    assert group_statistic("sum", values, groups, 2).tolist() == [np.inf, 0.0]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(allow_nan=True)), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
    st.sampled_from(STATISTICS),
)
def test_the_order_of_rows_cannot_change_the_last_bit(values: list[Any], random: Any, what: str) -> None:
    """A statistic is the same number, bit for bit, in whatever order the rows come."""
    shuffled = random.sample(values, len(values))
    one, other = (
        group_statistic(what, np.array([v for _, v in rows]), np.array([g for g, _ in rows]), 3)
        for rows in (values, shuffled)
    )
    np.testing.assert_array_equal(one, other)
