"""GAE and returns against loops written token by token, with the compiled form and without it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymdata import credit
from gymdata.credit import recursions
from gymdata.errors import DataError, UsageError


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs with numba's loops and with numpy alone."""
    if request.param == "numpy":
        monkeypatch.setattr(recursions, "kernels", lambda: None)
    else:
        pytest.importorskip("numba")
    return request.param


def slow_gae(r: Any, v: Any, m: Any, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """The definition, one token at a time, over the valid tokens of a row."""
    advantages, returns = np.zeros(np.shape(r)), np.zeros(np.shape(r))
    for row in range(len(r)):
        valid = [t for t in range(len(r[row])) if m[row][t]]
        following, advantage = 0.0, 0.0
        for t in reversed(valid):
            delta = float(r[row][t]) + gamma * following - float(v[row][t])
            advantage = delta + gamma * lam * advantage
            following = float(v[row][t])
            advantages[row, t], returns[row, t] = advantage, advantage + following
    return advantages, returns


def slow_returns(r: Any, m: Any, gamma: float) -> np.ndarray:
    result = np.zeros(np.shape(r))
    for row in range(len(r)):
        total = 0.0
        for t in reversed(range(len(r[row]))):
            if m[row][t]:
                total = float(r[row][t]) + gamma * total
                result[row, t] = total
    return result


def ragged_input(seed: int, rows: int = 7, width: int = 23) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards, values and a mask with interior zeros, padding, and rows that are empty or full; NaN where masked."""
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, width)) < rng.choice([0.0, 0.2, 0.7, 1.0], (rows, 1))
    mask &= np.arange(width) < rng.integers(0, width + 1, (rows, 1))
    r, v = np.where(mask, rng.normal(size=mask.shape), np.nan), np.where(mask, rng.normal(size=mask.shape), np.inf)
    return r, v, mask


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.5, 0.0), (0.0, 1.0)])
def test_gae_is_the_loop(seed: int, gamma: float, lam: float) -> None:
    """Equal to the loop on ragged rows with interior masks; masked positions hold 0 whatever stood there."""
    r, v, m = ragged_input(seed)
    advantages, returns = credit.gae(r, v, m, gamma, lam)
    expected = slow_gae(r, v, m, gamma, lam)
    np.testing.assert_allclose(advantages, expected[0], atol=1e-12)
    np.testing.assert_allclose(returns, expected[1], atol=1e-12)
    np.testing.assert_allclose(credit.cumulative_returns(r, m, gamma), slow_returns(r, m, gamma), atol=1e-12)


def test_hand_computed_steps_over_a_tool_token() -> None:
    """r = 1 on the last token, V = (0.5, –, 0.25), γ = 0.5, λ = 0.5: the tool token between them does not discount."""
    advantages, returns = credit.gae([[0.0, 9.0, 1.0]], [[0.5, 9.0, 0.25]], [[1, 0, 1]], 0.5, 0.5)
    # δ_2 = 1 − 0.25; δ_0 = 0.5·0.25 − 0.5 = −0.375; A_0 = −0.375 + 0.25·0.75
    np.testing.assert_allclose(advantages, [[-0.1875, 0.0, 0.75]])
    np.testing.assert_allclose(returns, [[0.3125, 0.0, 1.0]])
    np.testing.assert_allclose(credit.cumulative_returns([[2.0, 9.0, 1.0]], [[1, 0, 1]], 0.5), [[2.5, 0.0, 1.0]])


@given(seed=st.integers(0, 10_000), gamma=st.floats(0, 1), lam=st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_padded_and_ragged_agree(seed: int, gamma: float, lam: float) -> None:
    """The flat valid tokens give what the padded arrays give."""
    r, v, m = ragged_input(seed, rows=5, width=11)
    offsets = np.concatenate(([0], np.cumsum(m.sum(axis=1))))
    padded = credit.gae(r, v, m, gamma, lam)
    flat = credit.gae_ragged(r[m], v[m], offsets, gamma, lam)
    for a, b in zip(padded, flat, strict=True):
        np.testing.assert_allclose(a[m], b, atol=1e-12)
    np.testing.assert_allclose(
        credit.cumulative_returns(r, m, gamma)[m], credit.cumulative_returns_ragged(r[m], offsets, gamma), atol=1e-12
    )


def test_a_discount_a_token() -> None:
    """With γ only where a turn ends, tokens of one turn are worth the same as its last."""
    rewards, offsets = np.array([0.0, 1.0, 0.0, 0.0, 4.0, 3.0]), np.array([0, 5, 6])
    step = np.array([1.0, 0.5, 1.0, 1.0, 0.5, 0.5])  # turns: (0, 1), (2, 3, 4); a row's last step is never used
    found = credit.cumulative_returns_ragged(rewards, offsets, step)
    np.testing.assert_allclose(found, [3.0, 3.0, 4.0, 4.0, 4.0, 3.0])


def test_bootstrap_is_the_value_after_the_last_token() -> None:
    """A truncated row goes on with the value given; one with 0 is terminal."""
    advantages, _ = credit.gae_ragged([0.0, 0.0], [1.0, 1.0], [0, 1, 2], 0.5, 1.0, bootstrap=[4.0, 0.0])
    np.testing.assert_allclose(advantages, [1.0, -1.0])


def test_many_rows_of_every_length() -> None:
    """Blocks of rows of unequal length: more rows than a block holds, empty ones among them."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 40, 3_000)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    values = rng.normal(size=offsets[-1])
    found = credit.discounted_sums(values, offsets, 0.9)
    for row in range(0, 3_000, 97):
        part = values[offsets[row] : offsets[row + 1]]
        expected = [sum(0.9 ** (s - t) * part[s] for s in range(t, len(part))) for t in range(len(part))]
        np.testing.assert_allclose(found[offsets[row] : offsets[row + 1]], expected, atol=1e-9)


def test_precision_is_the_callers() -> None:
    """float32 in, float32 out, but the sum is carried in float64."""
    ones = np.full((1, 100_000), 0.1, np.float32)
    found = credit.cumulative_returns(ones, np.ones_like(ones), 1.0)
    assert found.dtype == np.float32
    assert found[0, 0] == np.float32(np.float64(np.float32(0.1)) * 100_000)
    assert credit.cumulative_returns([[1]], [[1]], 1.0).dtype == np.float64


def test_shapes_and_discounts_are_checked() -> None:
    """Arrays of other shapes, offsets that do not fit and discounts outside 0 to 1 are refused."""
    with pytest.raises(DataError, match=r"got shape \(1, 2\)"):
        credit.gae([[1.0]], [[1.0]], [[1, 1]], 1, 1)
    with pytest.raises(DataError, match="expected the same shape"):
        credit.gae([[1.0]], [[1.0, 2.0]], [[1]], 1, 1)
    with pytest.raises(DataError, match="rise from 0 to 3"):
        credit.cumulative_returns_ragged([1.0, 2.0, 3.0], [0, 2], 1.0)
    with pytest.raises(UsageError, match="gamma"):
        credit.cumulative_returns([[1.0]], [[1]], 1.5)
    assert credit.gae(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros((0, 3)), 1, 1)[0].shape == (0, 3)
