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
        (f"I think {{so}}.\n```json\n{GOOD}\n```\nlater, nothing {{else}}", (4, 2, 2)),
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
    """The only object, fenced or not, or the last without a fence; overall is descended into, numeric text is a number."""
    wanted = None if expected is None else Verdict(*map(float, expected))
    assert genrm.parse_last(text) == wanted
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
    assert genrm.parse_last(text) is None
    found = genrm.parse_published(text)
    if published is not None:
        assert found == Verdict(*map(float, published))


def test_nan_is_unparsed() -> None:
    """A judge that answers NaN has not judged."""
    assert genrm.parse_last('{"score_1": NaN, "score_2": 2, "ranking": 1}') is None


def test_a_ranking_alone_and_scores_alone_are_verdicts() -> None:
    """A ranking alone is kept; two scores need no ranking; published fills in the rest."""
    assert genrm.parse_last('{"ranking": 2}') == Verdict(None, None, 2.0)
    assert genrm.parse_last('{"score_1": 2, "score_2": 3}') == Verdict(2.0, 3.0, None)
    assert genrm.parse_published('{"ranking": 2}') == Verdict(3.0, 3.0, 2.0)


DRAFT = '{"score_1": 1, "score_2": 5, "ranking": 6}'
FENCED = f"```json\n{DRAFT}\n```"


@pytest.mark.parametrize("final", [GOOD, f"```json\n{GOOD}\n```", f"```\n{GOOD}\n```", f'{{"overall": {GOOD}}}'])
@pytest.mark.parametrize("draft", [DRAFT, FENCED, f"{FENCED}\n{FENCED}"])
def test_the_last_object_counts_and_a_draft_does_not(draft: str, final: str) -> None:
    """Fenced or not, what comes last is the verdict; the published order takes a fenced draft."""
    text = f"At first {draft}. On reflection: {final} That is all {{of it}}."
    assert genrm.parse_last(text) == Verdict(4.0, 2.0, 2.0)
    if final == GOOD and "```" in draft:
        assert genrm.parse_published(text) == Verdict(1.0, 5.0, 6.0)


@pytest.mark.parametrize("withdrawn", ["null", '"?"', "true", "9", "[4]"])
def test_a_last_object_without_usable_numbers_does_not_make_the_draft_count(withdrawn: str) -> None:
    """The judge's last word had no number, so there is no verdict."""
    assert genrm.parse_last(f'{DRAFT} no: {{"score_1": {withdrawn}, "score_2": 2, "ranking": 2}}') is None


@pytest.mark.parametrize(
    "wrapped",
    [f'{{"verdict": {GOOD}}}', f'{{"verdicts": [{GOOD}]}}', f'{{"result": {{"overall": {GOOD}, "rubric": [{DRAFT}]}}}}',
     f"\\boxed{{{GOOD}}}", f"\\boxed{{\\text{{ {GOOD} }}}}", f'{{"draft": "none", "final": {{"judge": {{"b": {GOOD}}}}}}}'],
)  # fmt: skip
def test_a_last_verdict_inside_another_object_counts(wrapped: str) -> None:
    """At any depth, in a list, or in the braces of LaTeX; what follows without a key in braces changes nothing."""
    for after in ("", " That is all {of it}.", " The ranking: 2, and score_1: 4."):
        assert genrm.parse_last(f"Draft: {DRAFT}. Final: {wrapped}{after}") == Verdict(4.0, 2.0, 2.0)


@pytest.mark.parametrize("depth", ["%s", '{"verdict": %s}', "\\boxed{%s}", "```json\n%s\n```"])
@pytest.mark.parametrize(
    "malformed",
    ['{"score_1": 4, "score_2": 2, "ranking": 2,}', "{'score_1': 4, 'score_2': 2, 'ranking': 2}",
     "{score_1: 4, score_2: 2, ranking: 2}", '{"score_1": 4, // better\n"score_2": 2, "ranking": 2}',
     '{"why": "a\nb", "score_1": 4, "score_2": 2, "ranking": 2}', '{"why": "x", "score_1": 4, "sco', '{"ranking" 2}',
     '{"Score_1": 4, "Score_2": 2, "Ranking": 2}', '{"why": {"a": 1}, "score_1": 4, "score_2": 2,}',
     f'{{"draft": {DRAFT}, "score_1": 4, "score_2": 2,}}', f'{{"score_1": 4, "score_2": 2, "draft": {DRAFT},}}',
     "[{'score_1': 4, 'score_2': 2}]", f'{{"a": {DRAFT}, "b": {GOOD}}}', f'{{"score_1": 1, "score_2": 1, "b": {GOOD}}}',
     '{"answer": "{\\"score_1\\": 4}"}', f'{{"overall": {GOOD}, "score_1": 1, "score_2": 5}}'],
)  # fmt: skip
def test_a_last_verdict_that_cannot_be_read_leaves_none(malformed: str, depth: str) -> None:
    """Malformed, cut, or two in one object: the answer is unparsed, and the draft before it does not count."""
    assert genrm.parse_last(f"Draft: {DRAFT}. Final: {depth % malformed}") is None
    assert genrm.parse_last(f"Draft: {DRAFT} <think>hm</think> {depth % malformed}") is None


@pytest.mark.parametrize("cut", ["{", '{\n  "s', "```json\n{", "<think>hm</think>{"])
def test_an_answer_that_ends_in_an_object_has_no_verdict(cut: str) -> None:
    """Also from a server that names no finish reason."""
    assert genrm.parse_last(f"Draft: {DRAFT} Final: {cut}") is None


MARKS = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ("<|channel>thought\n", "<channel|>"),
]


@pytest.mark.parametrize(("opens", "closes"), MARKS, ids=[opens for opens, _ in MARKS])
def test_reasoning_holds_no_verdict(opens: str, closes: str) -> None:
    """A draft in reasoning never counts: before the answer, behind it, opened by the prompt, or never closed."""
    good = Verdict(4.0, 2.0, 2.0)
    assert genrm.parse_last(f"{opens}{FENCED}{closes}{GOOD}") == good
    assert genrm.parse_last(f"{FENCED}{closes}{GOOD}") == good
    assert genrm.parse_last(f"{opens}{FENCED}{closes}none") is None
    assert genrm.parse_last(f"{GOOD}{opens}{FENCED}") is None
    assert genrm.parse_last(f"{opens}{FENCED} but wait, the second") is None
    if "final" not in closes:
        assert genrm.parse_last(f"{GOOD}{opens}{FENCED}{closes}so it is") == good


@pytest.mark.parametrize("finish_reason", ["length", "max_tokens", "abort", "repetition", "a new word"])
def test_an_answer_that_was_cut_has_no_verdict(finish_reason: str) -> None:
    """What stands in it may be a draft, so only an answer that the judge ended counts."""
    assert genrm.parse_last(GOOD, finish_reason) is None
    assert genrm.parse_last(GOOD, "stop") == genrm.parse_last(GOOD, None) == Verdict(4.0, 2.0, 2.0)


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
    assert genrm.parse_last(HOSTILE[name]) is None
    genrm.parse_published(HOSTILE[name])


@given(st.text('{}"\\`jsonscore_12:4, \n', max_size=60))
def test_reading_never_raises(text: str) -> None:
    """Whatever a judge writes, reading it gives a verdict or None."""
    genrm.parse_published(text)
    verdict = genrm.parse_last(text)
    assert verdict is None or (verdict.score_1 is None) == (verdict.score_2 is None)


# --- aggregation --------------------------------------------------------------------------------------------------
