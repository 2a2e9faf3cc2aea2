"""The figures of reports: known values, and independence of row order."""

from __future__ import annotations

import itertools
import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymdata import stats
from gymdata.errors import DataError


def _brute_pass_at_k(n: int, c: int, k: int) -> float:
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    return sum(any(d) for d in draws) / len(draws)


@pytest.mark.parametrize(("n", "c", "k"), [(1, 0, 1), (4, 1, 1), (4, 1, 2), (5, 2, 3), (6, 3, 4), (4, 4, 2), (5, 0, 5)])
def test_pass_at_k_equals_enumeration(n: int, c: int, k: int) -> None:
    """pass@k is the share of k-subsets that hold a correct rollout."""
    assert stats.pass_at_k(n, c, k) == pytest.approx(_brute_pass_at_k(n, c, k), abs=1e-15)


def test_pass_at_k_refuses_what_it_cannot_estimate() -> None:
    """Fewer rollouts than k is an error, never an extrapolation."""
    with pytest.raises(DataError, match="n=3"):
        stats.pass_at_k(3, 1, 4)


def test_tasks_with_too_few_rollouts_are_reported_apart() -> None:
    """A task with n < k is counted in too_few and left out of the mean."""
    got = stats.pass_at_k_by_task(["a", "a", "b", "a"], [True, False, True, False], k=2)
    assert (got.n_tasks, got.too_few) == (1, 1)
    assert got.value == pytest.approx(2 / 3)
    none = stats.pass_at_k_by_task(["a"], [True], k=2)
    assert math.isnan(none.value)
    assert none.too_few == 1


def test_mean_ci_of_known_data() -> None:
    """The mean is the plain mean and the interval of fair coins has the width that theory gives."""
    values = [0.0, 1.0] * 200
    mean, low, high = stats.mean_ci(values)
    assert mean == 0.5
    half = 1.96 * 0.5 / math.sqrt(400)
    assert low == pytest.approx(0.5 - half, abs=0.01)
    assert high == pytest.approx(0.5 + half, abs=0.01)


def test_mean_ci_resamples_tasks() -> None:
    """Copies of a rollout inside its task do not narrow the interval."""
    tasks, values = list(range(50)), [float(i % 2) for i in range(50)]
    alone = stats.mean_ci(values, tasks)
    copied = stats.mean_ci(values * 8, tasks * 8)
    assert copied == pytest.approx(alone)


def test_mean_ci_says_when_it_cannot_know() -> None:
    """No values give NaN, and one task gives a mean without bounds."""
    assert all(math.isnan(x) for x in stats.mean_ci([]))
    mean, low, high = stats.mean_ci([1.0, 0.0], ["a", "a"])
    assert mean == 0.5
    assert math.isnan(low)
    assert math.isnan(high)
    with pytest.raises(DataError, match="finite"):
        stats.mean_ci([1.0, math.inf])


def test_mean_ci_agrees_between_few_and_many_distinct_values() -> None:
    """Drawing equal groups together gives the same bounds as drawing each group."""
    values = np.random.default_rng(1).normal(size=6_000)
    _, low, high = stats.mean_ci(values)
    _, low2, high2 = stats.mean_ci(np.round(values, 1))
    assert low == pytest.approx(low2, abs=0.004)
    assert high == pytest.approx(high2, abs=0.004)


def test_an_interval_over_tasks_and_seeds_is_wider_where_seeds_differ_and_that_of_tasks_where_they_do_not() -> None:
    """Three seeds of 0.4, 0.5 and 0.6; of equal seeds and of one, the interval is that over tasks."""
    tasks = np.arange(40) % 2.0
    alike = stats.two_way_ci(np.tile(tasks, (3, 1)))
    assert alike == pytest.approx(stats.mean_ci(tasks), abs=0.03)
    assert stats.two_way_ci(tasks[None]) == pytest.approx(stats.mean_ci(tasks), abs=0.03)
    mean, low, high = stats.two_way_ci(tasks + np.array([[-0.4], [0.0], [0.4]]))
    assert mean == pytest.approx(0.5)
    assert (low < alike[1] - 0.1, high > alike[2] + 0.1) == (True, True)
    assert stats.two_way_ci(np.ones((3, 1)))[0] == 1.0
    assert all(map(math.isnan, stats.two_way_ci(np.empty((0, 0)))))


@given(st.permutations(range(6)), st.permutations(range(3)))
def test_the_order_of_tasks_and_seeds_never_matters(tasks: list[int], seeds: list[int]) -> None:
    """The same interval to the last digit."""
    scores = np.array([[0, 1, 1, 0, 1, 0], [1, 1, 1, 0, 0, 1], [0, 0, 0, 0, 1, 0]], np.float64)
    assert stats.two_way_ci(scores[seeds][:, tasks]) == stats.two_way_ci(scores)


def test_paired_difference_is_after_minus_before() -> None:
    """Pairing removes what the tasks have in common, and a rise is positive."""
    before = np.random.default_rng(0).normal(size=100)
    mean, low, high = stats.paired_difference_ci(before, before + 0.25)
    assert (mean, low, high) == pytest.approx((0.25, 0.25, 0.25))
    assert stats.paired_difference_ci([0.0, None, 1.0], [1.0, 5.0, 1.0])[0] == 0.5


def test_wilson_known_values() -> None:
    """Wilson's interval matches published values and stays inside [0, 1]."""
    assert stats.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert stats.wilson(0, 10)[0] == 0.0
    assert stats.wilson(10, 10)[1] == 1.0
    assert math.isnan(stats.wilson(0, 0)[0])


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.floats(-5, 5) | st.none()), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
)
def test_row_order_never_matters(rows: list[tuple[str, float | None]], random: Random) -> None:
    """Shuffled rows give exactly the same figures."""
    mixed = list(rows)
    random.shuffle(mixed)
    for a, b in ((rows, mixed),):
        first = stats.mean_ci([v for _, v in a], [t for t, _ in a])
        second = stats.mean_ci([v for _, v in b], [t for t, _ in b])
        np.testing.assert_array_equal(first, second)
        one, two = (stats.pass_at_k_by_task([t for t, _ in r], [bool(v) for _, v in r], k=2) for r in (a, b))
        assert one == two or (math.isnan(one.value) and math.isnan(two.value))


@pytest.mark.filterwarnings("error")
def test_means_of_very_large_numbers() -> None:
    """The sum may be beyond float64, the mean and its interval are not."""
    mean, low, high = stats.mean_ci([1e308, 1e308, 1e308, 1e308], ["a", "a", "b", "b"])
    assert (mean, low, high) == (1e308, 1e308, 1e308)
    assert stats.mean_ci([-1e308] * 3)[0] == -1e308
