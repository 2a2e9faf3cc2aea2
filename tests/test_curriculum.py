"""The curriculum's schedule, filter and order, and the traps that such code falls into."""

from __future__ import annotations

import math
from decimal import Decimal
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymdata.curriculum import CurriculumConfig, count_included, group_statistics, percentile_at, select_groups
from gymdata.errors import UsageError

DEFAULTS = CurriculumConfig()


def scores_of(n: int) -> dict[str, list[float | None]]:
    return {f"t{i:03d}": [i / n, i / n + 1] for i in range(n)}


@pytest.mark.parametrize(
    ("n", "expected"), [(10, [3, 5, 7, 9, 10]), (7, [3, 4, 5, 7, 7]), (1, [1, 1, 1, 1, 1]), (0, [0, 0, 0, 0, 0])]
)
def test_the_schedule_holds_for_five_epochs_a_stage(n: int, expected: list[int]):
    """30 % in epochs 1–5, 50 % in 6–10, 70 % in 11–15, 90 % in 16–20 and all from 21 on."""
    groups = group_statistics(scores_of(n))
    got = [len(select_groups(groups, epoch, DEFAULTS).included) for epoch in range(1, 26)]
    assert got == [k for k in expected for _ in range(5)]


def test_shares_are_counted_in_exact_decimals():
    """0.1 + 0.2 selects 3 of 10, not 4."""
    config = CurriculumConfig(initial_percentile=0.1, increment_percentile=0.2, expansion_interval=1)
    assert percentile_at(2, config) == Decimal("0.3")
    assert count_included(10, percentile_at(2, config)) == 3


def test_a_difference_of_exactly_the_threshold_passes():
    """Rewards 0.8 and 0.9 pass a threshold of 0.1 in spite of rounding."""
    assert select_groups(group_statistics({"a": [0.8, 0.9]}), 1, DEFAULTS).included == ("a",)


def test_a_single_group_does_not_escape_the_variance_filter():
    """One group of equal rewards is left out, and nothing is selected."""
    selection = select_groups(group_statistics({"a": [1.0, 1.0]}), 1, DEFAULTS)
    assert selection.included == ()
    assert selection.left_out == {"a": "rewards too alike"}


def test_unknown_scores_are_not_zero_and_nan_does_not_pass():
    """A missing, NaN or infinite score is left out of a group's statistics; a group of only those is left out."""
    (a, b) = group_statistics({"a": [None, 1.0, math.nan, math.inf], "b": [None, math.nan]})
    assert (a.mean, a.score_range, a.n_unscored) == (1.0, 0.0, 3)
    assert select_groups([a, b], 1, DEFAULTS).left_out == {"a": "rewards too alike", "b": "no score is known"}


def test_equal_scores_have_their_own_mean_and_large_ones_a_right_one():
    """Neither is rounded away, nor beyond float64."""
    groups = group_statistics({"a": [0.1] * 3, "b": [1e308] * 2, "c": [-1e308, 1e308, 1e308, 1e308], "d": [0.25, 0.5]})
    assert [group.mean for group in groups] == [0.1, 1e308, 0.5e308, 0.375]


@given(st.lists(st.floats(allow_nan=True), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_the_order_of_scores_cannot_change_the_last_bit(scores: list[float], random: Random) -> None:
    """Statistics are the same numbers, bit for bit, in whatever order the scores come."""
    one, other = (repr(group_statistics({"a": values})) for values in (scores, random.sample(scores, len(scores))))
    assert one == other


def test_easy_groups_come_first_unless_sorted_ascending():
    """The highest mean reward comes first by default, equal means by task id."""
    groups = group_statistics({"b": [0, 1], "a": [0, 1], "c": [0.5, 1.5]})
    config = CurriculumConfig(initial_percentile=1.0)
    assert select_groups(groups, 1, config).included == ("c", "a", "b")
    ascending = CurriculumConfig(initial_percentile=1.0, sort_ascending=True)
    assert select_groups(groups, 1, ascending).included == ("a", "b", "c")


def test_random_subsampling_is_seeded_by_epoch_and_keeps_its_share():
    """The same seed and epoch draw the same share of the selected groups; another epoch draws others."""
    groups = group_statistics(scores_of(40))
    config = CurriculumConfig(initial_percentile=1.0, random_subsample=0.5, seed=7)
    first = select_groups(groups, 1, config).included
    assert len(first) == 20
    assert select_groups(groups[::-1], 1, config).included == first
    assert select_groups(groups, 2, config).included != first


def test_the_state_names_tasks_and_the_epoch_of_the_last_expansion():
    """State is JSON with task ids, and the last expansion is the epoch at which the share last grew."""
    groups = group_statistics(scores_of(10))
    state = select_groups(groups, 7, DEFAULTS).state
    assert (state["current_percentile"], state["last_expansion_epoch"], state["total_groups"]) == (0.5, 6, 10)
    assert state["included_groups"][0] == "t009"
    assert select_groups(groups, 40, DEFAULTS).state["last_expansion_epoch"] == 21


@pytest.mark.parametrize("bad", [{"initial_percentile": 0}, {"expansion_interval": 0}, {"random_subsample": 1.5}])
def test_settings_out_of_range_are_refused(bad: dict):
    """A share of nothing, an interval of no epochs or more than everything is a usage error that names the key."""
    with pytest.raises(UsageError, match=next(iter(bad))):
        CurriculumConfig.of(bad, "curriculum")


@given(st.dictionaries(st.text("abc", min_size=1), st.lists(st.none() | st.floats(), max_size=4)), st.integers(1, 30))
def test_every_group_is_selected_or_has_a_reason(scores: dict[str, list[float | None]], epoch: int):
    """Selection and reasons partition the groups, in whatever order they come."""
    groups = group_statistics(scores)
    selection = select_groups(groups, epoch, DEFAULTS)
    assert set(selection.included) | set(selection.left_out) == set(scores)
    assert not set(selection.included) & set(selection.left_out)
    assert select_groups(groups[::-1], epoch, DEFAULTS) == selection
