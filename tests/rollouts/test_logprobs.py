"""When saved log-probabilities are a model's own: by figures over all tokens, within what number formats can show."""

from __future__ import annotations

import numpy as np
import pytest

from gymdata.models.model_identity import sampler_formats
from gymdata.rollouts.logprobs import ROUNDING, Ratios, Rounding, more_than


def departures(apart: list[float] | np.ndarray, rounding: Rounding) -> list[str]:
    """Of tokens whose saved log-prob is −5 and whose recomputed one is so much higher."""
    ratios = Ratios(rounding)
    # In two parts, as batches come.
    for part in np.array_split(np.asarray(apart, np.float64), 2):
        ratios.add(-5 + part, np.full(len(part), -5.0))
    return ratios.departures()


@pytest.mark.parametrize(
    ("formats", "coarsest"),
    [
        (("float32", "float32"), "float32"),
        (("torch.float32", "torch.bfloat16"), "bfloat16"),
        (("float16", "float32"), "float16"),
        (("bfloat16", "float16"), "bfloat16"),
        (("float32", "fp8"), "bfloat16"),
        (("float32", None), "bfloat16"),
    ],
)
def test_the_coarser_format_decides(formats: tuple[str | None, ...], coarsest: str) -> None:
    """Limits are those of the coarsest of the formats; one that is not known counts as bfloat16."""
    assert Rounding.of(*formats) == ROUNDING[coarsest]


def test_the_sampler_is_asked_of_its_run() -> None:
    """The engine's number format where run.json says it, else the checkpoint's."""
    assert sampler_formats([{"engine": {"dtype": "bfloat16"}}, {"stage": "experiences"}], "float32") == ["bfloat16"]
    assert sampler_formats([{"engine": {"dtype": None}}, {}], "float32") == ["float32"]


def test_what_bfloat16_leaves_is_no_departure() -> None:
    """Differences as a real model has them between two computations in bfloat16: one token in twelve beyond a tenth, one in
    120 at 0.4, in both directions. In float32 the same are departures."""
    honest = np.tile([0.01, -0.01, 0.02, -0.02, 0.005, -0.005, 0.03, -0.03, 0.015, -0.015, 0.12, -0.12], 100)
    honest[::240], honest[1::240] = 0.4, -0.4
    assert departures(honest, ROUNDING["bfloat16"]) == []
    assert len(departures(honest, ROUNDING["float32"])) >= 3


@pytest.mark.parametrize("outlier", [-3.0, 0.85, 6.0])
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_no_single_token_decides(name: str, outlier: float) -> None:
    """One token that is any distance off, of 2,000 and of 50 that are equal."""
    for others in (1_999, 49):
        assert departures([outlier] + [0.0] * others, ROUNDING[name]) == []


@pytest.mark.parametrize(
    ("apart", "says"),
    [
        ([0.04, -0.04] * 1_000 + [0.6, -0.6] * 20, "1.96% of the tokens are more than 0.5 apart"),
        ([0.12, -0.12, 0.0, 0.0] * 500, "50.0% of the ratios"),
        ([0.06, -0.06] * 1_000, r"mean \|Δ log p\| 0.06"),
        ([-0.04] * 2_000, "mean ratio 0.9608"),
        ([0.2, -0.2, 0.0] * 700, "effective sample size 97.4%"),
    ],
)
def test_each_figure_shows_what_the_others_may_not(apart: list[float], says: str) -> None:
    """Shares of tokens, the mean, the mean ratio and the effective sample size each have a limit of their own."""
    import re

    found = departures(apart, ROUNDING["bfloat16"])
    assert any(re.search(says, why) for why in found), found


def test_a_tolerance_of_the_users_own_replaces_the_limits() -> None:
    """A tenth of it is allowed in the mean, and ratios do not matter."""
    limits = ROUNDING["float32"].tolerating(0.5)
    assert departures([0.04, -0.04, 0.3] * 100, limits) == ["mean |Δ log p| 0.127 (rounding: 0.05)"]
    assert departures([0.04, -0.04] * 100, limits) == []


def test_a_figure_in_which_tokens_are_capped_says_so() -> None:
    """Of a mean |Δ| of 0.26 it shows the 0.00044 that the limit is for, and the distance that a token counts as."""
    found = departures([0.6, -0.6] * 220 + [0.0] * 560, ROUNDING["float32"])
    assert "mean |Δ log p| 0.00044 with tokens counted as at most 0.001 apart (rounding: 0.0001)" in found


def test_a_share_is_exceeded_when_chance_does_not_explain_it() -> None:
    """1 of 1, 3 of 4 and 20 of 1,000 may be 2 %; 5 of 5, 10 of 20 and 60 of 1,000 are more; none of none is not."""
    assert more_than([1, 3, 20, 0], [1, 4, 1_000, 0], 0.02).tolist() == [False] * 4
    assert more_than([5, 10, 60], [5, 20, 1_000], 0.02).tolist() == [True] * 3
