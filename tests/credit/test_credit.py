"""Shaping, KL, placement, normalisation and weights against slow loops and hand-computed cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymdata import credit
from gymdata.errors import DataError, UsageError
from tests.formulas import INF, NAN, SLOW, slow_shape


@given(
    groups=st.lists(
        st.lists(st.one_of(st.sampled_from([0.0, 1.0, NAN, INF, -INF]), st.floats(-50, 50)), min_size=1, max_size=6),
        min_size=1,
        max_size=5,
    ),
    kind=st.sampled_from(SLOW),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_shaping_is_the_definition(groups: list[list[float]], kind: str, seed: int) -> None:
    """Ragged groups in any order of rows, with groups of one, equal, missing and infinite rewards."""
    rewards = np.array([r for group in groups for r in group])
    labels = np.array([f"g{i}" for i, group in enumerate(groups) for _ in group])
    expected = np.array([x for group in groups for x in slow_shape(group, kind)])
    order = np.random.default_rng(seed).permutation(len(rewards))
    found = credit.shape_rewards(rewards[order], kind, labels[order])
    np.testing.assert_allclose(found, expected[order], rtol=1e-7, atol=1e-7)


@given(
    rewards=st.lists(st.floats(-50, 50), min_size=1, max_size=8), beta=st.floats(0.01, 100.0), shift=st.floats(-9, 9)
)
@settings(max_examples=100, deadline=None)
def test_the_optimal_value_lies_between_mean_and_maximum(rewards: list[float], beta: float, shift: float) -> None:
    """β·log mean exp(R/β), which moves with the rewards; unknown rewards have no part, however small β is."""
    (found, *_) = values = credit.optimal_value([*rewards, NAN], beta)
    assert np.mean(rewards) - 1e-9 <= found <= max(rewards) + 1e-9
    assert (values == found).all()
    moved = credit.optimal_value([r + shift for r in rewards], beta)
    np.testing.assert_allclose(moved, found + shift, rtol=1e-9, atol=1e-9)


def test_the_optimal_value_by_hand() -> None:
    """Groups of (0, 1), of one, and of none known; β must be positive."""
    found = credit.optimal_value([0.0, 1.0, 3.0, NAN], 0.5, ["a", "a", "b", "c"])
    expected = 0.5 * math.log((1 + math.exp(2.0)) / 2)
    np.testing.assert_allclose(found, [expected, expected, 3.0, NAN], rtol=1e-12)
    with pytest.raises(UsageError, match="beta"):
        credit.optimal_value([1.0], 0.0)


def test_shaping_by_hand() -> None:
    """Rewards 1, 0, 0, 1 and a second row of equal ones."""
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    third = 2 / 3
    np.testing.assert_allclose(credit.rloo(rewards), [[third, -third, -third, third], [0] * 4])
    np.testing.assert_allclose(credit.reinforce_baseline(rewards), [[0.5, -0.5, -0.5, 0.5], [0] * 4])
    np.testing.assert_allclose(credit.dr_grpo(rewards), [[0.5, -0.5, -0.5, 0.5], [0] * 4])
    np.testing.assert_allclose(credit.cpgd(rewards)[0], np.array([1, -1, -1, 1]) * 0.5 / (0.5 + 1e-6))
    std = math.sqrt(1 / 3)
    np.testing.assert_allclose(credit.grpo(rewards)[0], np.array([1, -1, -1, 1]) * 0.5 / (std + 1e-9))
    np.testing.assert_array_equal(credit.reinforce(rewards), rewards)
    assert credit.grpo([0.7]).tolist() == [0.0]
    assert credit.grpo([1.0, NAN]).tolist()[0] == 0.0
    with pytest.raises(UsageError, match="did you mean 'grpo'"):
        credit.shape_rewards(rewards, "grop")


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_variance_is_judged_whatever_the_scale(scale: float) -> None:
    """Rewards that differ in their ninth digit are different; those that differ by rounding are not."""
    different, equal = scale * np.array([1.0, 1.0 + 1e-7]), scale * np.array([0.1 + 0.2, 0.3, 0.3])
    assert credit.degenerate_groups(different).tolist() == [False]
    assert credit.degenerate_groups(equal).tolist() == [True]
    assert credit.grpo(equal).tolist() == [0.0, 0.0, 0.0]
    assert credit.degenerate([1.0, 1.0, 0.0, 2.0], ["a", "a", "b", "b"]).tolist() == [True, True, False, False]


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce-baseline", "cpgd", "dr-grpo"])
def test_rewards_too_large_to_compare_are_refused(kind: str) -> None:
    """Where a spread would be infinite, every advantage would be 0: that is told, not trained on."""
    with pytest.raises(DataError, match="too large"):
        credit.ESTIMATORS[kind]([1e308, -1e308, 1e308], [0, 0, 0])


def test_kl_estimators() -> None:
    """k1, k2, k3 of d = logp − ref; masked positions are 0 even where a log-prob is infinite."""
    logp, ref = np.array([[-1.0, -2.0, -INF]]), np.array([[-1.5, -1.0, -1.0]])
    m = np.array([[1, 1, 0]])
    np.testing.assert_allclose(credit.kl(logp, ref, "k1", m), [[0.5, -1.0, 0.0]])
    np.testing.assert_allclose(credit.kl(logp, ref, "k2", m), [[0.125, 0.5, 0.0]])
    np.testing.assert_allclose(credit.kl(logp, ref, "k3", m), [[math.exp(-0.5) - 0.5, math.exp(1) - 2, 0.0]])
    near = credit.kl(np.array([1e-9]), np.array([0.0]), "k3")
    assert 0 <= near[0] < 1e-17
    with pytest.raises(UsageError, match="k1, k2, k3"):
        credit.kl(logp, ref, "k4")  # type: ignore[arg-type]  # wrong on purpose


def test_rewards_are_placed_on_the_last_valid_token() -> None:
    """Interior masks and padding do not move the place; a negative coefficient counts as 0; the clip is the reward's."""
    kl = np.array([[1.0, 5.0, 2.0, 7.0], [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    m = np.array([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    found = credit.token_rewards(np.array([10.0, -9.0, 4.0]), kl, 0.1, m, clip=5.0)
    np.testing.assert_allclose(found, [[-0.1, 0, 4.8, 0], [-0.1, -0.1, -0.1, -5.1], [0, 0, 0, 0]])
    np.testing.assert_allclose(credit.token_rewards(np.array([1.0]), np.ones((1, 2)), -3.0, np.ones((1, 2))), [[0, 1]])
    np.testing.assert_allclose(credit.token_rewards(np.array([1.0]), None, 1.0, [[1, 0]]), [[1, 0]])
    assert credit.last_valid(m).tolist() == [2, 3, -1]


def test_whitening_sees_valid_tokens_only() -> None:
    """Mean 0 and spread 1 over valid tokens; NaN under the mask changes nothing; one token gives 0."""
    values, m = np.array([[1.0, NAN, 3.0], [5.0, INF, NAN]]), np.array([[1, 0, 1], [1, 0, 0]])
    np.testing.assert_allclose(credit.whiten(values, m), [[-1, 0, 0], [1, 0, 0]], atol=1e-8)
    assert credit.whiten([[7.0]], [[1]]).tolist() == [[0.0]]
    assert credit.whiten([[7.0]], [[0]]).tolist() == [[0.0]]
    spread = math.sqrt(8 / 3)
    np.testing.assert_allclose(credit.normalize_cross_batch(values, m), [[-2 / spread, 0, 0], [2 / spread, 0, 0]])
    np.testing.assert_allclose(credit.normalize_cross_batch(values, m, mean_only=True), [[-2, 0, 0], [2, 0, 0]])
    assert credit.normalize_cross_batch([[2.0, 2.0]], [[1, 1]]).tolist() == [[0.0, 0.0]]
    assert credit.clip([[-3.0, 0.5]], 1.0).tolist() == [[-1.0, 0.5]]
    assert credit.clip([[-3.0]], None).tolist() == [[-3.0]]


def test_parts_whiten_as_the_whole() -> None:
    """Moments of parts add up, so a file whitened batch by batch is whitened as one."""
    values = np.random.default_rng(0).normal(3, 2, (4, 5))
    m = np.random.default_rng(1).random((4, 5)) < 0.6
    moments = credit.masked_moments(values[:1], m[:1]) + credit.masked_moments(values[1:], m[1:])
    parts = [credit.whiten(values[i : i + 1], m[i : i + 1], moments) for i in range(4)]
    np.testing.assert_allclose(np.concatenate(parts), credit.whiten(values, m))
    state = None
    for part in np.split(values.ravel(), 4):
        state = credit.running_moments(state, part)
    assert state is not None
    assert state.mean == pytest.approx(values.mean())
    assert (state.var, state.std) == (pytest.approx(values.var()), pytest.approx(values.std(ddof=1)))
    assert credit.running_moments(None, [NAN, INF]) == credit.Moments()


@given(st.lists(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=5), min_size=1, max_size=5))
def test_running_moments_are_the_published_ones(batches: list[list[float]]) -> None:
    """Before any number mean 0, variance 1, deviation 1; after each batch those of a parallel update from weight 1e-24."""
    mean, var, std, count = 0.0, 1.0, 1.0, 1e-24
    state = credit.Moments()
    assert (state.mean, state.var, state.std) == (mean, var, std)
    for batch in batches:
        n, apart = len(batch), float(np.mean(batch)) - mean
        total = count + n
        mean += apart * n / total
        var = (var * count + float(np.var(batch)) * n + apart**2 * count * n / total) / total
        std, count = math.sqrt(var * total / (total - 1)), total
        state = credit.running_moments(state, batch)
        assert (state.mean, state.var, state.std) == pytest.approx((mean, var, std), rel=1e-6, abs=1e-9)


def test_moments_of_numbers_too_large_are_refused() -> None:
    """A deviation beyond float64 would make every normalised number 0."""
    with pytest.raises(DataError, match=r"R502: .* too large .*up to 1e\+200") as refused:
        credit.running_moments(None, [0.0, 1e200])
    assert refused.value.exit_code == 1


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([[1, 1], [0, 1], [0, 1], [0, 1]], [1.0, 4 / 3, 4 / 3, 4 / 3]),
        ([[1, 1]] * 9 + [[0, 1]], [1.0] * 9 + [3.0]),
        ([[1, 1], [2, 2]], [1.0, 1.0]),
        ([[0, 1]], [1.0]),
    ],
)
def test_clip_filter_weights(rewards: list[list[float]], expected: list[float]) -> None:
    """Informative groups make up for those without variance, at most eps times; one weight for every reward."""
    weights = credit.clip_filter_weights(np.array(rewards, float))
    np.testing.assert_allclose(weights, np.repeat(np.array(expected)[:, None], len(rewards[0]), axis=1))
    half = credit.clip_filter_weights(np.array(rewards, float), lamda=0.5)
    flat = credit.degenerate_groups(np.array(rewards, float))
    assert (half[flat] == 0.5).all() or flat.all()
    labels = np.repeat(np.arange(len(rewards)), len(rewards[0]))
    np.testing.assert_array_equal(credit.clip_filter_weights(np.ravel(rewards), groups=labels), weights.ravel())


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (3072, 0.0), (3584, -0.5), (4096, -1.0), (5000, -1.0), (3073, -1 / 1024)]
)
def test_overlong_penalty(length: int, expected: float) -> None:
    """Nothing before the buffer, rising to the factor at the limit, never more."""
    assert credit.overlong_penalty(length, 4096) == pytest.approx(expected)
    assert credit.overlong_penalty([length], 4096, factor=2.0).tolist() == [pytest.approx(2 * expected)]


def test_overlong_buffer_above_the_limit_is_an_error() -> None:
    """A buffer that begins before the first token would punish every answer."""
    with pytest.raises(UsageError, match="overlong buffer"):
        credit.overlong_penalty(10, 100, buffer=101)


def test_adaptive_kl() -> None:
    """The step is at most 20 % a horizon, and 0 on target."""
    assert credit.adaptive_kl(0.1, kl=6.0, target=6.0, n=10, horizon=100) == 0.1
    assert credit.adaptive_kl(0.1, kl=60.0, target=6.0, n=50, horizon=100) == pytest.approx(0.11)
    assert credit.adaptive_kl(0.1, kl=0.0, target=6.0, n=100, horizon=100) == pytest.approx(0.08)


def test_high_entropy_mask() -> None:
    """int(n · ratio) valid tokens a row, at least one, the earlier of equals; masked ones never."""
    entropy = np.array([[0.1, 9.0, 0.5, 0.5, 0.2], [1, 2, 3, 4, 5], [1, 1, 1, 1, 1]])
    m = np.array([[1, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    assert credit.high_entropy_mask(entropy, m, 0.5).astype(int).tolist() == [
        [0, 0, 1, 1, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0],
    ]  # fmt: skip
    assert credit.high_entropy_mask(entropy, m, 0.25).sum(axis=1).tolist() == [1, 1, 0]
    hundred = np.arange(100.0)[None]
    assert [int(credit.high_entropy_mask(hundred, hundred >= 0, r).sum()) for r in (0.29, 2 / 3, 0.57)] == [29, 66, 57]
    assert credit.high_entropy_mask(hundred[:, :3], np.ones((1, 3)), 2 / 3).sum() == 2
    with pytest.raises(UsageError):
        credit.high_entropy_mask(entropy, m, 0.0)


@given(seed=st.integers(0, 999), ratio=st.floats(0.01, 1))
@settings(max_examples=40, deadline=None)
def test_high_entropy_mask_is_the_loop(seed: int, ratio: float) -> None:
    """Row by row, sorted by hand."""
    rng = np.random.default_rng(seed)
    entropy, m = rng.integers(0, 4, (4, 9)).astype(float), rng.random((4, 9)) < 0.6
    expected = np.zeros((4, 9), bool)
    for row in range(4):
        valid = sorted(np.flatnonzero(m[row]), key=lambda t: (-entropy[row, t], t))
        expected[row, valid[: max(1, int(len(valid) * ratio + 1e-9))]] = bool(valid)
    np.testing.assert_array_equal(credit.high_entropy_mask(entropy, m, ratio), expected)
