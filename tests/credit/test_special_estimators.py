"""Estimators for kinds of rewards, turns, places and agents: by hand, against slow loops, and what must not change them."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymdata import credit
from gymdata.errors import DataError, UsageError

BINARY = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=7)


def test_maxrl_by_hand() -> None:
    """One success of four weighs 3, one of two 1; no success and only successes give 0, a negative reward is refused."""
    found = credit.maxrl([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    np.testing.assert_allclose(found, [[3, -1, -1, -1], [1, 1, -1, -1], [0] * 4, [0] * 4], atol=2e-5)
    assert credit.maxrl([5.0]).tolist() == [0.0]
    with pytest.raises(DataError, match=r"got a reward of -0\.5, expected 0 or more"):
        credit.maxrl([1.0, -0.5])


@given(BINARY)
@settings(max_examples=60, deadline=None)
def test_maxrl_is_the_mean_score_of_successes(group: list[float]) -> None:
    """The mean of A·s over a group is that of s over its successes less that over all, whatever s is, up to the 1e-6 that is
    added to the mean reward."""
    n, k = len(group), sum(group)
    s = np.arange(n) ** 2 + 1.0
    found = (credit.maxrl(group) * s).mean()
    expected = 0.0 if k in (0, n) else ((s * group).sum() / k - s.mean()) * (k / n) / (k / n + 1e-6)
    assert found == pytest.approx(expected, abs=1e-9)


def best_of_subsets(group: list[float], i: int, k: int) -> tuple[float, float, float]:
    """Over all choices of k rollouts: (mean and population std of their best reward, its mean over those with rollout i)."""
    every = [max(group[j] for j in some) for some in itertools.combinations(range(len(group)), k)]
    mine = [max(group[j] for j in some) for some in itertools.combinations(range(len(group)), k) if i in some]
    return statistics.mean(every), statistics.pstdev(every), statistics.mean(mine)


@given(group=BINARY, k=st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_pass_at_k_is_that_of_all_subsets(group: list[float], k: int) -> None:
    """The advantage of a rollout is the mean, over all k-subsets that it is in, of the subset's standardized best reward."""
    found = credit.pass_at_k(group, k=k)
    for i, value in enumerate(found.tolist()):
        if len(group) < max(k, 2) or len(set(group)) == 1:
            assert value == 0
            continue
        mean, std, mine = best_of_subsets(group, i, k)
        assert value == pytest.approx((mine - mean) / (std + 1e-6), abs=1e-9)


def test_pass_at_k_by_hand() -> None:
    """One success of four at k = 2: ρ = 1/2, so 1 for the success and −1/3 for a failure; other rewards are refused."""
    np.testing.assert_allclose(credit.pass_at_k([1, 0, 0, 0], k=2), [1, -1 / 3, -1 / 3, -1 / 3], atol=1e-5)
    np.testing.assert_allclose(credit.shape_rewards([1, 0, 0, 0], "pass_at_k", pass_k=2)[0], 1, atol=1e-5)
    with pytest.raises(DataError, match=r"got a reward of 0\.5, expected 0 or 1"):
        credit.pass_at_k([1.0, 0.5])
    with pytest.raises(UsageError, match="k of pass@k"):
        credit.pass_at_k([1.0, 0.0], k=0)


def test_gdpo_standardizes_each_part() -> None:
    """Each part is standardized on its own, so that the scale of one does not drown the other; a missing part gives NaN."""
    easy, hard = np.array([0.0, 1.0, 0.0]), np.array([0.0, 10.0, 10.0])
    z = (1 - 1 / 3) / (math.sqrt(1 / 3) + 1e-6), -(1 / 3) / (math.sqrt(1 / 3) + 1e-6)
    w = statistics.stdev(hard.tolist()) + 1e-6
    expected = [z[1] + (0 - 20 / 3) / w, z[0] + (10 - 20 / 3) / w, z[1] + (10 - 20 / 3) / w]
    np.testing.assert_allclose(credit.gdpo({"easy": easy, "hard": hard}), expected)
    np.testing.assert_allclose(credit.gdpo({"easy": easy, "hard": hard * 1000}), expected, atol=1e-5)
    holed = credit.gdpo({"a": [1.0, 0.0, math.nan], "b": [1.0, 1.0, 5.0]})
    assert math.isnan(holed[2])
    np.testing.assert_allclose(holed[:2], np.array([1, -1]) * 0.5 / (math.sqrt(0.5) + 1e-6))


def test_gigpo_by_hand() -> None:
    """Two rollouts of two turns meet in one state: each turn there is compared with the other, alone states add nothing."""
    z = 0.5 / (math.sqrt(0.5) + 1e-6)
    found = credit.gigpo(
        episodes=[1.0, 0.0], returns=[0.9, 1.0, 0.0, 0.0], owner=[0, 0, 1, 1], states=["s", "a", "s", "b"],
        groups=["t", "t"],
    )  # fmt: skip
    y = 0.45 / (math.sqrt(0.405) + 1e-6)
    np.testing.assert_allclose(found, [z + y, z, -z - y, -z])
    apart = credit.gigpo([1.0, 0.0], [0.9, 0.0], [0, 1], ["s", "s"], ["t", "u"])
    assert apart.tolist() == [0.0, 0.0], "equal states of different tasks are different"
    np.testing.assert_allclose(credit.gigpo([1.0, 0.0], [0.9, 0.0], [0, 1], ["s", "s"], ["t", "t"], 0.0), [z, -z])


def test_a_running_baseline_by_hand() -> None:
    """Each agent has its own baseline, taken before it is updated; a missing reward moves nothing."""
    found = credit.running_baseline([1.0, -1.0, 1.0, math.nan, 1.0], ["a", "b", "a", "a", "a"], 0.5)
    np.testing.assert_array_equal(found, [1.0, -1.0, 0.5, math.nan, 0.25])
    with pytest.raises(UsageError, match="decay of the baseline"):
        credit.running_baseline([1.0], ["a"], 1.0)


def slow_otb(returns: list[list[float]], energy: list[list[float]], groups: list[int]) -> list[list[float]]:
    """G_t − Σ G_t·W_t / Σ W_t over the rollouts of the group that reach t, one token at a time."""
    result = []
    for own, label in zip(returns, groups, strict=True):
        mates = [i for i, other in enumerate(groups) if other == label]
        row = []
        for t, g in enumerate(own):
            reach = [i for i in mates if len(returns[i]) > t]
            w = {i: math.fsum(energy[i][: t + 1]) for i in reach}
            total = math.fsum(w.values())
            best = math.fsum(w[i] * returns[i][t] for i in reach) / total if total > 1e-8 else 0.0
            mean = math.fsum(returns[i][t] for i in reach) / len(reach)
            row.append(0.0 if len(reach) < 2 else g - (best if total > 1e-8 else mean))
        result.append(row)
    return result


@given(data=st.data(), seed=st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_the_token_baseline_is_the_slow_one(data: Any, seed: int) -> None:
    """Rollouts of any lengths, also none, in any order, in one go or added one at a time; a token reached alone gives 0."""
    number = st.floats(-3, 3)
    # Sums near the least weight that counts would fall on one side or the other by their order.
    weight = st.floats(0, 2).map(lambda value: round(value, 6))
    returns = data.draw(st.lists(st.lists(number, max_size=5), min_size=1, max_size=6))
    energy = [data.draw(st.lists(weight, min_size=len(r), max_size=len(r))) for r in returns]
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(returns), max_size=len(returns)))
    expected = slow_otb(returns, energy, groups)
    order = np.random.default_rng(seed).permutation(len(returns))
    flat = [np.array([x for i in order for x in rows[i]]) for rows in (returns, energy)]
    offsets = np.concatenate(([0], np.cumsum([len(returns[i]) for i in order]))).astype(int)
    labels = [groups[i] for i in order]
    found = credit.optimal_token_baseline(*flat, offsets, labels)
    np.testing.assert_allclose(found, [x for i in order for x in expected[i]], atol=1e-6)


def test_the_energy_of_a_token_is_the_gradient_of_its_logits() -> None:
    """‖∂ log softmax(z)_i / ∂z‖² at a distribution of three, and Σπ² taken as π² at least."""
    pi = np.array([0.5, 0.3, 0.2])
    for i in range(3):
        gradient = np.eye(3)[i] - pi
        np.testing.assert_allclose(credit.gradient_energy(np.log(pi[i]), (pi**2).sum()), (gradient**2).sum())
    np.testing.assert_allclose(credit.gradient_energy(np.log(0.5), 0.0), 0.25)


@given(rewards=BINARY, seed=st.integers(0, 99), kind=st.sampled_from(["maxrl", "pass-at-k", "gigpo", "otb"]))
@settings(max_examples=80, deadline=None)
def test_no_order_of_rollouts_matters(rewards: list[float], seed: int, kind: str) -> None:
    """A permuted group gives the permuted advantages, and a group of one gives 0."""
    n = len(rewards)

    def made(values: np.ndarray) -> np.ndarray:
        if kind == "gigpo":
            return credit.gigpo(values, values, np.arange(n), np.zeros(n), np.zeros(n))
        if kind == "otb":
            return credit.optimal_token_baseline(values, np.ones(n), np.arange(n + 1), np.zeros(n))
        return credit.shape_rewards(values, kind)

    order = np.random.default_rng(seed).permutation(n)
    np.testing.assert_allclose(made(np.array(rewards)[order]), made(np.array(rewards))[order], atol=1e-9)
    if n == 1 or len(set(rewards)) == 1:
        np.testing.assert_allclose(made(np.array(rewards)), 0, atol=1e-12)


@given(
    groups=st.lists(
        st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 50)), min_size=1, max_size=5), min_size=1, max_size=4
    )
)
@settings(max_examples=60, deadline=None)
def test_opo_weighs_its_baseline_by_length(groups: list[list[tuple[float, int]]]) -> None:
    """r − Σ n·r / Σ n over the group, one rollout at a time; groups of one, or of equal rewards, give 0."""
    labels = [i for i, group in enumerate(groups) for _ in group]
    rewards, lengths = zip(*(one for group in groups for one in group), strict=True)
    expected = []
    for group in groups:
        baseline = sum(n * r for r, n in group) / sum(n for _, n in group)
        flat = bool(credit.degenerate_groups([r for r, _ in group])[0])
        expected += [0.0 if flat else r - baseline for r, _ in group]
    found = credit.opo(rewards, labels, lengths)
    np.testing.assert_allclose(found, expected, atol=1e-9)
    np.testing.assert_array_equal(credit.shape_rewards(rewards, "opo", labels, lengths=lengths), found)
