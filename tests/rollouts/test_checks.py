"""The batch checks on literal arrays, and that the fast digest is the one that was defined."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymdata.checks import violations as codes
from gymdata.checks.batches import check_batch
from gymdata.checks.breaks import relations
from gymdata.checks.repair import plan
from gymdata.checks.violations import Selection, ValidationReport, Violation
from gymdata.errors import UsageError
from gymdata.rollouts.logprobs import sampling_biases
from gymdata.rollouts.turn_columns import from_arrow
from gymdata.rollouts.turns import Call, encode_turns
from tests.rollout_files import rollout, rollouts_table, two_turns

_ids = st.lists(st.integers(0, 5), max_size=6)


@given(st.lists(st.tuples(_ids, _ids), min_size=1, max_size=5))
def test_batch_digests_are_those_of_the_encoder(calls: list[tuple[list[int], list[int]]]) -> None:
    """Over any calls, empty lists included, the digests of a whole batch equal the stored ones."""
    table = rollouts_table([rollout("t", 0, 1.0, calls), rollout("t", 1, 1.0, two_turns(1, 2))])
    evidence = from_arrow(table.to_batches()[0], 0)
    assert (evidence.turns.digests() == evidence.turns.digest).all()
    assert [v for v in check_batch(evidence) if v.code in ("T209", "T210")] == []


def test_slices_of_a_batch_give_the_same_arrays() -> None:
    """A batch whose offsets do not start at 0 is read like one that does."""
    rows = [rollout("t", i, 1.0, two_turns(i, i)) for i in range(4)]
    whole = rollouts_table(rows).combine_chunks().to_batches()[0]
    one, other = from_arrow(whole.slice(2, 1), 2), from_arrow(rollouts_table([rows[2]]).to_batches()[0], 2)
    assert np.array_equal(one.rows, other.rows)
    for name in ("offsets", "digest"):
        assert np.array_equal(getattr(one.turns, name), getattr(other.turns, name))
    for name in ("delta", "generation", "logprobs"):
        mine, theirs = getattr(one.turns, name), getattr(other.turns, name)
        assert np.array_equal(mine.offsets, theirs.offsets)
        assert np.array_equal(mine.values, theirs.values)
    assert not [v for v in check_batch(one) if v.code in ("S102", "T205")]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, None),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs_mode": "processed_logprobs"}, None),
        ({"temperature": 0.7, "logprobs_mode": "processed_logprobs"}, None),
        ({"temperature": 0.7, "logprobs_mode": "raw_logprobs"}, "raw"),
        ({"temperature": 1.0, "logprobs_mode": "raw_logprobs"}, None),
        ({"temperature": 0}, "greedy"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 50}, "top_k"),
        ({"top_k": -1}, None),
        ({"min_p": 0.1}, "min_p"),
        ({"penalties": {"repetition_penalty": 1.1}}, "repetition"),
        ({"presence_penalty": 0.5}, "presence"),
        ({"sampling": {"top_p": 0.5}}, "top_p 0.5"),
        ({"sampling": {"stop": ["."], "stop_token_ids": [3], "max_tokens": 8}}, None),
        ({"sampling": {"logit_bias": {"3": 1.0}, "stop": ["."]}}, "logit_bias {'3': 1.0}"),
        ({"sampling": {"xtc_probability": 0.1}}, "xtc_probability 0.1"),
        ({"logprobs_mode": "processed_logits"}, "logprobs_mode processed_logits"),
        ({"top_k": "many", "penalties": None}, None),
    ],
)
def test_sampling_that_biases_log_probs_is_named(settings: dict[str, object], words: str | None) -> None:
    """L304 is decided by the settings alone, and absent ones are neutral."""
    reasons = sampling_biases(settings)
    assert len(reasons) == (words is not None)
    assert words is None or words in reasons[0]


def test_relations_name_breaks_by_the_length_that_is_shared() -> None:
    """A rewritten generation, a dropped front and a rewind are told apart from a retry."""

    def turns(*calls: tuple[list[int], list[int]]) -> list[dict[str, object]]:
        return encode_turns(
            [Call(np.array(p, np.int32), np.array(g, np.int32), np.zeros(len(g), np.float32), "stop") for p, g in calls]
        )

    def found(*calls: tuple[list[int], list[int]]) -> list[tuple[str, int, int | None]]:
        return [(r.code, r.turn, r.position) for r in relations(turns(*calls))]

    assert found(([1], [2]), ([1, 2, 3], [4])) == []
    assert found(([1], [2, 3]), ([1, 2, 9], [4])) == [("T200", 1, 2)]
    assert found(([1, 5], [2]), ([5, 2, 6], [4])) == [("T204", 1, 0)]
    assert found(([1], [2]), ([1], [3])) == [("T211", 1, None)]


def test_every_code_is_complete_and_explained() -> None:
    """A code has a meaning, an explanation and a severity, and --explain prints them."""
    for code, entry in codes.CODES.items():
        assert entry.code == code
        assert entry.meaning
        assert entry.severity in ("error", "warning", "info")
        assert entry.explanation in str(codes.explain(code.lower()))
    with pytest.raises(UsageError, match="T299"):
        codes.explain("T299")


def test_prefixes_select_codes() -> None:
    """A prefix stands for all codes that begin with it; one that matches nothing is refused."""
    expanded = codes.expand_prefixes(["L30", "d701,D702"], "--select")
    assert expanded == {"L301", "L302", "L303", "L304", "L305", "L306", "D701", "D702"}
    with pytest.raises(UsageError, match="--select"):
        codes.expand_prefixes(["NONE"], "--select")


def test_a_report_counts_and_tabulates() -> None:
    """Counts are those of the list, strict turns warnings into errors, and the table has the schema's columns."""
    found = [Violation("T200", 0, "a", 1, 3, "1 2", "1 9"), Violation("R503", 0), Violation("T211", 2)]
    report = ValidationReport(violations=Selection.of().apply(found))
    assert (report.errors, report.warnings, report.infos, report.ok) == (1, 1, 1, False)
    assert report.by_code == {"R503": 1, "T200": 1, "T211": 1}
    assert "R503" in report.by_code
    assert Selection.of(strict=True).apply(found)[1].severity == "error"
    assert report.table().column("position").to_pylist() == [3, None, None]
    assert report.to_dict()["violations"][0]["got"] == "1 9"


def test_a_repair_keeps_what_is_whole() -> None:
    """Split follows chains, truncate keeps the head, drop nothing; other faults end what can be kept."""
    cut = [Violation("T200", 0, turn=2)]
    assert plan(4, [0, 0, 2, 2], cut, "split") == [[0, 1], [2, 3]]
    assert plan(4, [0, 0, 2, 0], cut, "split") == [[0, 1, 3], [2]]
    assert plan(4, [0, 0, 2, 2], cut, "truncate") == [[0, 1]]
    assert plan(4, [0, 0, 2, 2], cut, "drop") == []
    assert plan(4, [0, 0, 2, 2], [*cut, Violation("L302", 0, turn=3)], "split") == [[0, 1], [2]]
    assert plan(4, [0] * 4, [Violation("T209", 0, turn=0)], "split") == []
    assert plan(4, [0] * 4, [Violation("R502", 0)], "truncate") == []
    assert plan(4, [0], [Violation("T210", 0, turn=1)], "split") == [[0]]
