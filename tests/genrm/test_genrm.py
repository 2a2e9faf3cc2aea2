"""Schedules, aggregation and the bias report, by the worked numbers; positions and row order never matter."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymdata import genrm
from gymdata.errors import UsageError
from gymdata.genrm.aggregate import Adjustments, Sizes
from gymdata.genrm.matches import Matches
from gymdata.genrm.schedule import Match
from gymdata.genrm.verdict import Verdict

CLOSE = {"rtol": 0, "atol": 1e-9}


def judged(*rows: tuple[int, int, float | None, float | None, float | None]) -> Matches:
    """Rows of (i, j, score_1, score_2, ranking) by one judge."""
    return Matches.of([(Match(i, j), Verdict(a, b, r)) for i, j, a, b, r in rows])


def sizes(answer: list[int], reasoning: list[int] | None = None, style: list[float] | None = None) -> Sizes:
    n = len(answer)
    return Sizes(np.array(reasoning or [0] * n), np.array(answer), np.array(style or [0.0] * n))


TWO = judged((0, 1, 1, 5, 6), (1, 0, 4, 1, 1))

# --- schedules ----------------------------------------------------------------------------------------------------


def test_schedules_list_who_meets_whom() -> None:
    """Circular goes around, all pairs take i < j, both orders take both positions; judges repeat the list."""
    assert genrm.circular(3) == [(0, 1), (1, 2), (2, 0)]
    assert genrm.all_pairs(3) == [(0, 1), (0, 2), (1, 2)]
    assert sorted(genrm.both_orders(3)) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert genrm.schedule("circular", 2, 2) == [(0, 1, 0), (1, 0, 0), (0, 1, 1), (1, 0, 1)]
    assert [len(genrm.schedule(s, 16)) for s in genrm.STRATEGIES] == [16, 120, 240]


def test_a_group_of_one_cannot_be_compared() -> None:
    """N < 2 is an error, and so is an unknown strategy or no judge."""
    for strategy in genrm.STRATEGIES:
        with pytest.raises(UsageError, match="at least 2"):
            genrm.schedule(strategy, 1)
    with pytest.raises(UsageError, match="circular"):
        genrm.schedule("circle", 4)
    with pytest.raises(UsageError, match="num_judges"):
        genrm.schedule("circular", 4, 0)


def test_the_worked_case() -> None:
    """[1.0, 4.5] with its metrics."""
    got = genrm.simple_tiebreaker(TWO, 2)
    np.testing.assert_allclose(got.reward, [1.0, 4.5], **CLOSE)
    assert got.metrics["mean_individual_score"] == pytest.approx(2.75, abs=1e-9)
    assert got.metrics["std_individual_score"] == pytest.approx(1.7853571071357126, abs=1e-9)
    assert got.metrics["tiebreak_usage_rate"] == 0


def test_the_worked_case_with_a_length_weight() -> None:
    """[1.025, 4.475] when response 0 is the shorter and the coefficient 0.05; reasoning and style weigh alike."""
    for name, size in (
        ("group_answer_length_penalty_coeff", sizes([3, 9])),
        ("group_reasoning_length_penalty_coeff", sizes([5, 5], [3, 9])),
        ("group_style_penalty_coeff", sizes([5, 5], style=[0.0, 0.2])),
    ):
        for default in (None, 3.0):
            got = genrm.simple_tiebreaker(TWO, 2, Adjustments(**{name: 0.05}), size, default)
            np.testing.assert_allclose(got.reward, [1.025, 4.475], **CLOSE)


@pytest.mark.parametrize(("ranking", "rewards"), [(1, [5.5, 0.5]), (2, [4.5, 1.5]), (4, [2.5, 3.5]), (6, [0.5, 5.5])])
def test_the_tie_table(ranking: int, rewards: list[float]) -> None:
    """Equal scores are moved apart by the ranking."""
    np.testing.assert_allclose(genrm.simple_tiebreaker(judged((0, 1, 3, 3, ranking)), 2).reward, rewards, **CLOSE)


def test_circular_of_three() -> None:
    """{(4,2,1),(3,5,5),(3,4,4)} → [4.0, 2.5, 4.0]."""
    rows = judged((0, 1, 4, 2, 1), (1, 2, 3, 5, 5), (2, 0, 3, 4, 4))
    np.testing.assert_allclose(genrm.simple_tiebreaker(rows, 3).reward, [4.0, 2.5, 4.0], **CLOSE)


def test_bonuses_go_to_the_single_shortest_of_the_top() -> None:
    """The shortest with a length gets it, and only when its score reaches the top's threshold."""
    rows = judged((0, 1, 5, 4, 1), (2, 3, 2, 1, 1))
    adjust = Adjustments(reasoning_bonus=0.5, answer_bonus=0.25, top_percentile=0.5)
    got = genrm.simple_tiebreaker(rows, 4, adjust, sizes([7, 3, 9, 9], [0, 8, 4, 9]), 3.0)
    # Threshold = second best = 4. Shortest reasoning is response 2 (score 2: nothing); shortest answer response 1.
    np.testing.assert_allclose(got.reward, [5, 4.25, 2, 1], **CLOSE)
    lower = genrm.simple_tiebreaker(rows, 4, Adjustments(answer_bonus=1, top_percentile=0.2), sizes([7, 3, 9, 9]), 3.0)
    np.testing.assert_allclose(lower.bonus, [0, 0, 0, 0], **CLOSE)


def test_a_missing_comparison_is_left_out_and_counted() -> None:
    """A failure is excluded from the mean; a response with no valid comparison has no reward; published: the default."""
    rows = Matches.of([(Match(0, 1), Verdict(4, 2, 1)), (Match(1, 2), None), (Match(2, 0), None)])
    got = genrm.simple_tiebreaker(rows, 3)
    np.testing.assert_array_equal(got.reward, [4, 2, np.nan])
    assert got.judged.tolist() == [1, 1, 0]
    assert got.missing.tolist() == [1, 1, 2]
    np.testing.assert_array_equal(genrm.simple_tiebreaker(rows, 3, default_score=3.0).reward, [4, 2, 3])


def test_a_ranking_alone_counts_for_wins_but_not_for_means() -> None:
    """It serves win_rate and bradley_terry only."""
    rows = judged((0, 1, None, None, 1))
    assert np.isnan(genrm.simple_tiebreaker(rows, 2).reward).all()
    np.testing.assert_allclose(genrm.win_rate(rows, 2), [1, 0])
    assert genrm.bradley_terry(rows, np.zeros(2, np.int64))[0][0] > 0


def test_an_empty_answer_counts_as_the_longest() -> None:
    """Ours: silence is not rewarded for being short; as published it is."""
    adjust, size = Adjustments(group_answer_length_penalty_coeff=1.0), sizes([0, 4, 10])
    rows = judged((0, 1, 3, 3, 3.5), (1, 2, 3, 3, 3.5))
    ours = genrm.simple_tiebreaker(rows, 3, adjust, size).bonus
    np.testing.assert_allclose(ours, [-1 / 3, 2 / 3, -1 / 3], **CLOSE)
    published = genrm.simple_tiebreaker(rows, 3, adjust, size, 3.0).bonus
    assert published[0] == max(published)


def test_weights_use_scored_responses_only() -> None:
    """An unscored giant does not make the others short."""
    rows = judged((0, 1, 3, 3, 3.5))
    got = genrm.simple_tiebreaker(rows, 3, Adjustments(group_answer_length_penalty_coeff=1.0), sizes([4, 10, 10_000]))
    np.testing.assert_array_equal(got.bonus, [0.5, -0.5, 0])


def test_two_wins_to_none() -> None:
    """Bradley–Terry at λ = 1: θ = ±0.5213."""
    theta, error = genrm.bradley_terry(judged((0, 1, 5, 1, 1), (1, 0, 1, 5, 6)), np.zeros(2, np.int64))
    np.testing.assert_allclose(theta, [0.5213, -0.5213], atol=5e-5)
    root = 2 / (1 + np.exp(2 * theta[0]))
    assert theta[0] == pytest.approx(root, abs=1e-9)
    p = 1 / (1 + math.exp(-2 * theta[0]))
    curvature = np.eye(2) + 2 * p * (1 - p) * np.array([[1, -1], [-1, 1]])
    np.testing.assert_allclose(error, np.sqrt(np.diag(np.linalg.inv(curvature))), **CLOSE)


def test_contradicting_positions_are_half_a_win_each() -> None:
    """They keep both scores in the mean, count ½–½ for wins and strengths, and are a flip."""
    rows = judged((0, 1, 5, 3, 1), (1, 0, 4, 2, 1))
    np.testing.assert_allclose(genrm.simple_tiebreaker(rows, 2).reward, [3.5, 3.5])
    np.testing.assert_allclose(genrm.win_rate(rows, 2), [0.5, 0.5])
    np.testing.assert_allclose(genrm.bradley_terry(rows, np.zeros(2, np.int64))[0], [0, 0], atol=1e-12)
    report = genrm.bias_report(rows)
    assert report["position_inconsistency"]["rate"] == 1
    assert genrm.preferences(rows).flipped.tolist() == [True]


def test_unknown_aggregators_are_refused() -> None:
    """The error names the known ones."""
    with pytest.raises(UsageError, match="bradley_terry"):
        genrm.aggregate(TWO, 2, "elo")


# --- bias ---------------------------------------------------------------------------------------------------------


def test_the_bias_report_counts_what_it_says() -> None:
    """Rates with their counts and Wilson intervals."""
    rows = Matches.of(
        [
            (Match(0, 1, 0), Verdict(5, 1, 1)),
            (Match(1, 0, 0), Verdict(5, 1, 1)),
            (Match(0, 1, 1), Verdict(2, 2, 3.5)),
            (Match(1, 0, 1), None),
            (Match(1, 2, 0), Verdict(1, 4, 5)),
            (Match(2, 1, 0), Verdict(4, 1, 2)),
        ]
    )
    report = genrm.bias_report(rows, np.array([3, 5, 5]))
    flat = {name: (r["count"], r["n"]) for name, r in report.items()}
    positions = {"position_bias": (3, 4), "position_inconsistency": (1, 2)}
    assert flat == positions | {"ties": (1, 5), "failures": (1, 6), "judge_agreement": (0, 1), "longer_wins": (1, 2)}
    assert report["position_inconsistency"]["ci95"][0] == pytest.approx(0.0945, abs=1e-4)
    empty = genrm.bias_report(Matches.of([]))
    assert empty["ties"] == {"rate": None, "count": 0, "n": 0, "ci95": [None, None]}


def test_a_judge_is_held_against_rewards() -> None:
    """By the better one's position, ties apart; unknown rewards and failed comparisons count nowhere."""
    rows = judged((0, 1, 5, 1, 1), (1, 0, 5, 1, 1), (1, 2, 3, 3, 3.5), (2, 1, 1, 5, 6), (0, 3, 5, 1, 1))
    rewards = np.array([1.0, 0.0, 0.0, np.nan])
    report = genrm.against_rewards(rows, rewards)
    assert {name: (part["count"], part["n"]) for name, part in report.items()} == {
        "first_position": (1, 1),
        "second_position": (0, 1),
        "both_positions": (1, 2),
        "called_equal": (1, 2),
    }
    assert genrm.against_rewards(rows, np.full(4, np.nan))["both_positions"]["rate"] is None


def test_cycles_are_found() -> None:
    """a > b > c > a is one cycle in one group; a > b > c is none."""
    groups = np.array([0, 0, 0, 1, 1, 1])
    rows = judged((0, 1, 5, 1, 1), (1, 2, 5, 1, 1), (2, 0, 5, 1, 1), (3, 4, 5, 1, 1), (4, 5, 5, 1, 1), (3, 5, 5, 1, 1))
    assert genrm.preferences(rows).cycles(groups) == (1, 1)


# --- text ---------------------------------------------------------------------------------------------------------


def test_texts_of_responses() -> None:
    """Reasoning and answer come from their items; a blank answer is shown as None; style is counted outside code."""
    response = {
        "output": [
            {"type": "reasoning", "summary": [{"text": "because"}]},
            {"type": "message", "content": [{"type": "output_text", "text": "# A\n"}, {"type": "refusal"}]},
            {"type": "message", "content": "- **b** 🙂\n```\n# no\n```"},
        ]
    }
    assert genrm.response_texts(response) == ("because", "# A\n- **b** 🙂\n```\n# no\n```")
    assert genrm.shown(" \n") == "None"
    assert genrm.style_density("# A\n- **b** 🙂") == pytest.approx(4 / 13)
    assert genrm.style_density("漢字") == 0
    assert genrm.response_texts({"output": None}) == ("", "")


# --- properties ---------------------------------------------------------------------------------------------------

SCORES = st.one_of(st.integers(1, 5).map(float), st.floats(1, 5).map(lambda x: round(x, 3)))
VERDICTS = st.one_of(
    st.none(),
    st.builds(Verdict, SCORES, SCORES, st.one_of(st.none(), st.integers(1, 6).map(float))),
    st.builds(Verdict, st.none(), st.none(), st.integers(1, 6).map(float)),
)


@st.composite
def tournaments(draw: st.DrawFn) -> tuple[list[tuple[Match, Verdict | None]], np.ndarray]:
    """Comparisons within a few groups, each (i, j, judge) at most once, and the group of each response."""
    groups, rows, start = [], [], 0
    for number in range(draw(st.integers(1, 3))):
        n = draw(st.integers(2, 4))
        groups += [number] * n
        matches = draw(st.lists(st.sampled_from(genrm.schedule("both_orders", n, 2)), unique=True, max_size=12))
        rows += [(Match(start + m.response_i, start + m.response_j, m.judge_idx), draw(VERDICTS)) for m in matches]
        start += n
    return rows, np.array(groups)


ADJUST = Adjustments(0.3, 0.2, 0.5, 0.1, 0.2, 0.3)


def everything(matches: Matches, groups: np.ndarray) -> list[np.ndarray]:
    """Every figure that must not depend on positions or order."""
    n = len(groups)
    size = sizes([(7 * i) % 5 for i in range(n)], [(3 * i) % 4 for i in range(n)], [(i % 3) / 10 for i in range(n)])
    got = [genrm.aggregate(matches, groups, m, adjust=ADJUST, sizes=size) for m in genrm.AGGREGATORS]
    direct = genrm.preferences(matches)
    return [
        *(r.reward for r in got),
        got[0].judged,
        got[0].missing,
        got[2].error,
        direct.low,
        direct.winner,
        direct.flipped,
        direct.both_positions,
        np.array(direct.cycles(groups)),
    ]


@settings(deadline=None)
@given(tournaments(), st.randoms(use_true_random=False))
def test_neither_positions_nor_row_order_matter(case: tuple, random) -> None:
    """Exchanging the positions of every comparison, or shuffling the rows, changes no reward and no preference."""
    rows, groups = case
    matches = Matches.of(rows)
    expected = everything(matches, groups)
    shuffled = rows[:]
    random.shuffle(shuffled)
    again = everything(Matches.of(shuffled), groups)
    swapped = everything(matches.swap(), groups)
    for one, two, three in zip(expected, again, swapped, strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-9)
        np.testing.assert_allclose(one, three, rtol=0, atol=1e-9)
    np.testing.assert_array_equal(expected[0], again[0])
    np.testing.assert_array_equal(expected[0], swapped[0])


@settings(deadline=None)
@given(tournaments())
def test_groups_are_independent(case: tuple) -> None:
    """Many groups at once give what each gives alone."""
    rows, groups = case
    together = genrm.aggregate(Matches.of(rows), groups, "bradley_terry").reward
    means = genrm.aggregate(Matches.of(rows), groups).reward
    for number in np.unique(groups):
        members = np.flatnonzero(groups == number)
        mine = [(Match(m[0] - members[0], m[1] - members[0], m[2]), v) for m, v in rows if m[0] in members]
        alone = genrm.aggregate(Matches.of(mine), len(members), "bradley_terry").reward
        np.testing.assert_allclose(together[members], alone, rtol=0, atol=1e-9)
        np.testing.assert_array_equal(means[members], genrm.aggregate(Matches.of(mine), len(members)).reward)
