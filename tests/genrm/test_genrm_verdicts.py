"""Verdicts in a judge's text: both readings, and text that was made to break them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymdata import genrm
from gymdata.genrm.verdict import Verdict

GOOD = '{"score_1": 4, "score_2": 2, "ranking": 2}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD, (4, 2, 2)),
        (f"I think {{so}}.\n```json\n{GOOD}\n```\nlater {{\"score_1\": 1, \"score_2\": 1, \"ranking\": 6}}", (4, 2, 2)),
        ('{"score_1": 1, "score_2": 5, "ranking": 6} no, rather ' + GOOD, (4, 2, 2)),
        ('{"rubric": [{"score_1": 1}], "overall": {"score_1": "4", "score_2": "2.5", "ranking": "2"}}', (4, 2.5, 2)),
        ('He said "hm {' + GOOD + " and went", (4, 2, 2)),
        ('{"note": "unclosed ' + GOOD, (4, 2, 2)),
        ('{"text": "a } in a string", "score_1": 3, "score_2": 3, "ranking": 3}', (3, 3, 3)),
        ('{"score_1": "<1-5>", "score_2": "<1-5>", "ranking": "<1-6>"}', None),
        ('{"score_1": 4, "score_2": 2, "ran', None),
        ("prose only", None),
        ("", None),
        ("[1, 2, 3]", None),
        ('{"score_1": null, "score_2": 2, "ranking": 1}', None),
    ],
)  # fmt: skip
def test_both_readings_find_the_same_object(text: str, expected: tuple[float, ...] | None) -> None:
    """First in a json fence, else the last anywhere; overall is descended into; numeric strings are numbers."""
    wanted = None if expected is None else Verdict(*map(float, expected))
    assert genrm.parse_strict(text) == wanted
    assert genrm.parse_published(text) == wanted


@pytest.mark.parametrize(
    ("text", "published"),
    [
        ('{"score_1": 4}', (4, 3, 3.5)),
        ('{"score_1": 99, "score_2": 2, "ranking": 1}', (99, 2, 1)),
        ('{"score_1": true, "score_2": 2, "ranking": 1}', None),
        ('{"score_1": 4, "score_2": 2, "ranking": 7}', (4, 2, 7)),
        ('{"score_1": Infinity, "score_2": 2, "ranking": 1}', (math.inf, 2, 1)),
    ],
)
def test_strict_reading_never_invents_or_accepts_an_impossible_number(text: str, published: object) -> None:
    """One score, or a value off the scale, is unparsed; the published reading fills in and takes it."""
    assert genrm.parse_strict(text) is None
    found = genrm.parse_published(text)
    if published is not None:
        assert found == Verdict(*map(float, published))


def test_nan_is_unparsed() -> None:
    """A judge that answers NaN has not judged."""
    assert genrm.parse_strict('{"score_1": NaN, "score_2": 2, "ranking": 1}') is None


def test_a_ranking_alone_and_scores_alone_are_verdicts() -> None:
    """A ranking alone is kept; two scores need no ranking; published fills in the rest."""
    assert genrm.parse_strict('{"ranking": 2}') == Verdict(None, None, 2.0)
    assert genrm.parse_strict('{"score_1": 2, "score_2": 3}') == Verdict(2.0, 3.0, None)
    assert genrm.parse_published('{"ranking": 2}') == Verdict(3.0, 3.0, 2.0)


def test_reasoning_is_no_verdict() -> None:
    """A fenced draft before </think> does not count in strict reading."""
    draft = '<think>```json\n{"score_1": 1, "score_2": 1, "ranking": 1}\n```</think>' + GOOD
    assert genrm.parse_strict(draft) == Verdict(4.0, 2.0, 2.0)


#: A reader that goes back for every brace would need hours for these.
N = 320_000
HOSTILE = {
    "open braces": "{" * N,
    "open objects": '{"a":' * N,
    "deep": '{"score_1":' * N + "1" + "}" * N,
    "quotes": '{"' * N,
    "escapes": "{" + '"\\' * N,
    "quoted braces": '{"{\\"' * (N // 2),
    "fences": "```json" * (N // 4),
    "fences and braces": "```json{" * (N // 4),
    "a huge number": '{"score_1": ' + "9" * N + ', "score_2": 1, "ranking": 1}',
    "closed and open": '{"a":{}' * (N // 2),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_read_in_linear_time(name: str) -> None:
    """Text that nests or never closes is unparsed, and nothing in it is read more than a few times."""
    assert genrm.parse_strict(HOSTILE[name]) is None
    genrm.parse_published(HOSTILE[name])


@given(st.text('{}"\\`jsonscore_12:4, \n', max_size=60))
def test_reading_never_raises(text: str) -> None:
    """Whatever a judge writes, reading it gives a verdict or None."""
    genrm.parse_published(text)
    verdict = genrm.parse_strict(text)
    assert verdict is None or (verdict.score_1 is None) == (verdict.score_2 is None)


# --- aggregation --------------------------------------------------------------------------------------------------
