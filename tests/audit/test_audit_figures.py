"""Figures of an audit against slow accounts of the same tokens, and what explanations may be named."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymdata.commands.audit import causes as diagnosis
from gymdata.commands.audit import compare as audit
from gymdata.commands.audit.causes import Explanation, Probe
from gymdata.commands.audit.compare import LogprobComparison
from gymdata.errors import RefusedError
from gymdata.models.scoring import ToScore
from gymdata.rollouts.logprobs import ROUNDING, Rounding
from gymdata.rollouts.ragged import Ragged
from gymdata.rollouts.sequences import stitch
from tests.rollout_files import BRANCH, BREAK, RETRY, SHAPES, column


def compared(turns: list[list[tuple[float, float]]], of: list[int]) -> LogprobComparison:
    """``turns``: (saved, recomputed) of each token; ``of``: the rollout of each turn."""
    sizes = [len(t) for t in turns]
    tokens = [pair for turn in turns for pair in turn]
    saved, recomputed = (np.array([pair[i] for pair in tokens], np.float32) for i in (0, 1))
    n = max(of) + 1
    lengths = [sum(s for s, r in zip(sizes, of, strict=True) if r == k) for k in range(n)]
    return LogprobComparison(
        [f"r{k}" for k in range(n)], np.arange(n) * 10, np.cumsum([0, *lengths]), saved, recomputed, np.cumsum(sizes),
        np.array(of), np.array([of[:i].count(r) for i, r in enumerate(of)]),
    )  # fmt: skip


#: A tolerance of 0.3, and figures that six tokens can show.
BY_HAND = Rounding(mean=0.1, token=0.3, far=0.05, outside=0.1, effective=0.99, ratio=0.001)
SMALL = compared([[(-1.0, -1.0), (-2.0, -2.5)], [(-0.5, -0.5)], [(-3.0, -1.0), (-1.0, -1.2), (-1.0, -1.0)]], [0, 0, 1])


def test_figures_are_those_of_the_loop():
    """Mean, largest, ratio, KL estimates and effective sample size of six tokens by hand."""
    facts = audit.summary(SMALL, BY_HAND)
    apart = [0, 0.5, 0, -2, 0.2, 0]
    ratios = [math.exp(-d) for d in apart]
    assert facts["max_abs_difference"] == pytest.approx(2)
    assert facts["mean_abs_difference"] == pytest.approx(sum(map(abs, apart)) / 6)
    assert facts["kl_k1"] == pytest.approx(sum(apart) / 6)
    assert facts["kl_k3"] == pytest.approx(sum(r - 1 + d for r, d in zip(ratios, apart, strict=True)) / 6)
    assert facts["ratio"]["mean"] == pytest.approx(sum(ratios) / 6)
    assert facts["share_outside"] == pytest.approx(3 / 6)
    assert facts["effective_sample_size"] == pytest.approx(sum(ratios) ** 2 / sum(r * r for r in ratios) / 6)
    assert facts["departures"] == []  # six tokens are too few, with two outliers among them
    assert (facts["tokens_beyond_tolerance"], facts["rollouts_beyond_tolerance"]) == (2, 2)
    assert facts["ratio"]["quantiles"]["0.5"] == pytest.approx(1)


def test_places_are_those_of_the_tokens():
    """Rows by position and by turn, and the worst first."""
    assert [(r["positions"], r["tokens"], round(r["max_abs"], 3)) for r in audit.by_position(SMALL)] == [
        ("0", 3, 2.0), ("1", 2, 0.5), ("2", 1, 0.0),
    ]  # fmt: skip
    assert [(r["turns"], r["tokens"]) for r in audit.by_turn(SMALL)] == [("0", 5), ("1", 1)]
    assert [SMALL.where(int(t)) for t in audit.worst(SMALL, 3)] == [(1, 0, 0), (0, 0, 1), (1, 0, 1)]


def test_a_turn_is_named_when_more_of_its_tokens_are_apart_than_rounding_leaves():
    """Ten of ten tokens are, one of ten is not; where no turn stands out, the figures over all tokens are one violation."""
    same, off = [(-1.0, -1.0)] * 10, [(-1.0, -2.0)] * 10
    found = audit.violations(compared([same, off, [*same[1:], off[0]]], [0, 1, 1]), ROUNDING["bfloat16"], ["mean"])
    assert [(v.rollout_id, v.row, v.turn, v.position) for v in found] == [("r1", 10, 0, 0)]
    (whole,) = audit.violations(compared([same], [0]), ROUNDING["bfloat16"], ["mean ratio 0.9", "mean |Δ|"])
    assert (whole.turn, whole.got, whole.detail) == (None, "mean ratio 0.9", "mean ratio 0.9; mean |Δ|")
    assert audit.violations(compared([same], [0]), ROUNDING["bfloat16"], []) == []


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6), split=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_batches_join_to_the_whole(sizes: list[int], split: int):
    """Comparing a file batch by batch gives the figures of comparing it at once; every token is in one line of a table."""
    rng = np.random.default_rng(sum(sizes))
    turns = [[tuple(pair) for pair in -rng.exponential(size=(n, 2))] for n in sizes]
    of = sorted(i % 3 for i in range(len(turns)))
    of = [sorted(set(of)).index(r) for r in of]
    whole: Any = compared(turns, of)
    cut = min(split, len(turns) - 1)
    cut = next((i for i in range(cut, len(of)) if of[i] != of[i - 1]), len(of)) if cut else len(of)
    parts = [compared(turns[:cut], of[:cut])]
    if cut < len(of):
        parts.append(compared(turns[cut:], [r - of[cut] for r in of[cut:]]))
    joined = LogprobComparison.joined(parts)
    for name in ("offsets", "saved", "recomputed", "turn_ends", "turn_rollout", "turn_number", "position"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name))
    assert sum(r["tokens"] for r in audit.by_position(whole)) == len(whole.saved)


@given(
    picked=st.lists(st.integers(0, len(SHAPES) - 1), min_size=1, max_size=8), budget=st.integers(1, 60)
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_every_token_is_scored_once(picked: list[int], budget: int):
    """Whatever the batches, each scored token comes up once; put in sampled order, scores stand where the saved do."""
    turns, ids = column([SHAPES[i] for i in picked])
    made = stitch(turns, ids)
    work = ToScore.of(made, np.full(len(picked), 0.0))
    assert (work.temperature == 1).all()
    seen = np.zeros(work.n_scored, np.int64)
    for rows in work.batches(budget):
        assert len(rows) == 1 or len(rows) * work.lengths[rows].max() <= budget
        seen[work.scores.take(rows).values] += 1
        some = work.take(rows)
        assert [some.token_ids[k].tolist() for k in range(len(some))] == [work.token_ids[int(r)].tolist() for r in rows]
    assert (seen == 1).all()
    np.testing.assert_array_equal(
        made.in_turn_order(made.logprobs.values[made.is_trained]), made.sampled.logprobs.values
    )
    expected = [t["generation_token_ids"] for r in turns.to_pylist() for t in r]
    ordered = made.in_turn_order(work.token_ids.values[work.mask.values])
    assert ordered.tolist() == [i for ids in expected for i in ids]
    numbers = [k for r in turns.to_pylist() for k in range(len(r))]
    assert made.sampled.turn_number.tolist() == numbers
    assert made.sampled.turn_sizes.tolist() == [len(ids) for ids in expected]


def test_what_nothing_predicts_is_refused():
    """Ids outside of the vocabulary, sequences that are too long, and generations without a prompt."""
    turns, ids = column([BRANCH, BREAK, RETRY])
    work = ToScore.of(stitch(turns, ids), np.ones(3))
    work.refuse_unscorable(22, None, "m")
    for vocabulary, longest, why in ((21, None, "T206"), (22, 3, "reads at most 3")):
        with pytest.raises(RefusedError, match=why):
            work.refuse_unscorable(vocabulary, longest, "m")
    bare = ToScore(Ragged.of_arrays([[1, 2]], np.int32), Ragged.of_arrays([[True, True]], np.bool_), np.ones(1))
    with pytest.raises(RefusedError, match="no prompt"):
        bare.refuse_unscorable(9, None, "m")


def probe(saved: Any, recomputed: Any, turn: Any = None, temperature: float = 1.0) -> Probe:
    saved, recomputed = np.asarray(saved, np.float32), np.asarray(recomputed, np.float32)
    turn = np.zeros(len(saved), np.int64) if turn is None else np.asarray(turn)
    return Probe(saved, recomputed, turn, np.arange(len(saved)), np.full(len(saved), temperature), turn)


def test_neighbours_count_within_their_turn_only():
    """A shift is tested without the tokens at a turn's border, where the neighbour is another turn's."""
    found = [-1.0, -2.0, -3.0, -9.0, -8.0, -7.0]
    saved = [-2.0, -3.0, -50.0, -8.0, -7.0, -60.0]
    shifted = diagnosis.shifted(probe(saved, found, [0, 0, 0, 1, 1, 1]))
    assert shifted is not None
    assert (shifted.after, "next token" in shifted.text) == (0.0, True)
    assert diagnosis.shifted(probe([-1.0], [-2.0])) is None


def at(logits: np.ndarray, tokens: np.ndarray, temperatures: Any) -> np.ndarray:
    rows = []
    for t in temperatures:
        scaled = logits / t
        rows.append(scaled[np.arange(len(tokens)), tokens] - np.log(np.exp(scaled).sum(axis=1)))
    return np.array(rows)


@given(true=st.floats(0.2, 3.0), seed=st.integers(0, 50))
@settings(max_examples=30, deadline=None)
def test_the_temperature_is_found(true: float, seed: int):
    """From the tokens' log-probs at temperatures of our choice, the one that made the saved numbers is found to 1 %; one
    within 3 % of the rows' is none."""
    rng = np.random.default_rng(seed)
    logits, tokens = rng.normal(0, 3, (200, 12)), rng.integers(0, 12, 200)
    saved, found = at(logits, tokens, [true, 1.0])
    named = diagnosis.temperature_mismatch(probe(saved, found), lambda t: at(logits, tokens, t), None)
    if named is None:
        assert abs(true - 1) < 0.035
        return
    assert abs(true - 1) > 0.025
    said = float(named.text.partition("are of ")[2].partition(",")[0]) if named.cause == "temperature" else 1.0
    assert said == pytest.approx(true, rel=0.01)


def test_an_explanation_must_explain():
    """Named is what leaves a fifth, or what rounding does and much less than before; a guess that changes little is not."""
    weak, good, better = (Explanation("template", t, 1.0, after) for t, after in (("a", 0.5), ("b", 0.1), ("c", 0.01)))
    assert diagnosis.best_of([weak, None], 0.001) is None
    assert diagnosis.best_of([weak, good, better], 0.001) is better
    assert diagnosis.best_of([weak], 0.6) is weak
    assert diagnosis.best_of([Explanation("temperature", "", 0.05, 0.04)], 0.045) is None
    assert diagnosis.best_of([Explanation("template", "", 0.0, 0.0)], 0.001) is None


@pytest.mark.parametrize(("settings", "certain"), [(["top_p 0.9"], True), ([], False)])
def test_a_cut_distribution_is_one_sided(settings: list[str], certain: bool):
    """Saved log-probs that are only too high are of a cut distribution, for certain where run.json says so."""
    cut = diagnosis.truncated(probe([-0.9, -1.8, -0.5], [-1.0, -1.9, -0.5]), settings, 0.25)
    assert cut is not None
    assert (cut.cause, cut.certain) == ("sampling", certain)
    assert diagnosis.truncated(probe([-0.9, -2.0, -0.5], [-1.0, -1.9, -0.5]), settings, 0.25) is None


@pytest.mark.parametrize(("same", "cause"), [(True, "template"), (False, "checkpoint"), (None, "checkpoint")])
def test_what_is_left_depends_on_whose_weights_they_are(same: bool | None, cause: str):
    """The weights that sampled leave only the prompt; others leave themselves. Neither is called certain."""
    left = diagnosis.unexplained(probe([-1.0] * 6, [-2.0] * 6), same, ["x"])
    assert (left.cause, left.certain) == (cause, False)
    first = diagnosis.unexplained(probe([-5.0] * 3 + [-1.0] * 6, [-1.0] * 3 + [-1.1] * 6), None, [])
    assert first.cause == "template"
