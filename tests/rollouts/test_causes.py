"""Why a turn breaks: literal ids with a toy vocabulary, and the spans that differ."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymdata.checks import chat_text as marks
from gymdata.checks.breaks import Cause, Reading, Span, cause_of_break, differing_spans, evidence
from gymdata.rollouts.turns import common_prefix

_PIECES = [
    "<|im_start|>", "<|im_end|>", "\n", "system", "user", "assistant", "tool", "<think>", "</think>", "_Ski", "nny",
    "_Skinny", '{"a":', " 1", "1", "}", "be", " kind", " rude", "what", "?", "yes", " no", "so", " it", " is",
]  # fmt: skip
_ID = {piece: i for i, piece in enumerate(_PIECES)}
READING = Reading(lambda ids: "".join(_PIECES[i] for i in ids), frozenset({0, 1}))


def ids(*pieces: str) -> np.ndarray:
    return np.array([_ID[p] for p in pieces], np.int32)


def message(role: str, *pieces: str) -> list[str]:
    return ["<|im_start|>", role, "\n", *pieces, "<|im_end|>", "\n"]


SYSTEM, USER, OPEN = message("system", "be", " kind"), message("user", "what", "?"), ["<|im_start|>", "assistant", "\n"]
THOUGHT = ["<think>", "so", " it", " is", "</think>"]


def cause(said: list[str], came: list[str], head: list[str] | None = None, tail: list[str] | None = None) -> Cause:
    """What is said of a generation ``said`` that came back as ``came``, with a question and an answer around it."""
    head = [*SYSTEM, *USER, *OPEN] if head is None else head
    after = ["\n", *message("tool", "1"), *OPEN] if tail is None else tail
    before, prompt = ids(*head, *said), ids(*head, *came, *after)
    position = common_prefix(before, prompt)
    return cause_of_break(before, prompt, position, [(len(head), len(before))], READING)


@pytest.mark.parametrize(
    ("said", "came", "code"),
    [
        (["_Ski", "nny", "<|im_end|>"], ["_Skinny", "<|im_end|>"], "T201"),
        (["yes", "_Skinny", "<|im_end|>"], ["yes", "_Ski", "nny", "<|im_end|>"], "T201"),
        (["_Ski", "nny"], ["_Skinny", "<|im_end|>"], "T201"),
        (['{"a":', "1", "}", "<|im_end|>"], ['{"a":', " 1", "}", "<|im_end|>"], "T202"),
        (["yes", "\n", "\n", " no", "<|im_end|>"], ["yes", "\n", " no", "<|im_end|>"], "T202"),
        ([*THOUGHT, "yes", "<|im_end|>"], ["yes", "<|im_end|>"], "T203"),
        (["yes", " no", "<|im_end|>"], ["yes", " rude", "<|im_end|>"], "T200"),
        (["yes", "<|im_end|>"], [" no", "<|im_end|>"], "T200"),
    ],
)
def test_what_became_of_a_generation(said: list[str], came: list[str], code: str) -> None:
    """Merged, split, cut off, rendered anew, stripped of its reasoning, or another text."""
    assert cause(said, came).code == code


@pytest.mark.parametrize("thought", [["so", " it", " is"], ["so", " it", " is"] * 8])
@pytest.mark.parametrize("given", [False, True])
def test_reasoning_that_comes_back_as_a_message_of_its_own(thought: list[str], given: bool) -> None:
    """A reasoning block emptied, its text sent again after the tool results, is a rewritten history, long or short, and
    whether the model or the prompt opened the block."""
    head = [*SYSTEM, *USER, *OPEN, *(["<think>"] if given else [])]
    opening = [] if given else ["<think>"]
    tail = ["\n", *message("tool", "1"), *message("assistant", *thought), *OPEN]
    said, came = [[*opening, *part, "</think>", "yes", "<|im_end|>"] for part in (thought, ["\n", "\n"])]
    found = cause(said, came, head, tail)
    assert (found.code, len(found.holds), found.explanation) == ("T203", 1, "earlier reasoning was stripped")


@pytest.mark.parametrize(
    ("text", "opens", "closes"),
    [
        ("<think>\n", True, False), ("</think>\n\n", False, True), ("<think>a", False, False), ("a</think>", False, False),
        ("[THINK]", True, False), ("\n[/THINK]", False, True), ("<|begin_of_thought|>", True, False),
        ("<|END_THINKING|>", False, True), ("◁think▷", True, False), ("◁/think▷", False, True), ("", False, False),
    ],
)  # fmt: skip
def test_where_reasoning_opens_and_closes(text: str, opens: bool, closes: bool) -> None:
    """The marks of the known families, at the end and at the beginning of a text."""
    assert (marks.opens_reasoning(text), marks.closes_reasoning(text)) == (opens, closes)


def whole(*parts: list[str]) -> np.ndarray:
    return ids(*(piece for part in parts for piece in part))


@pytest.mark.parametrize(
    ("kept", "code"),
    [
        ([message("system", "be", " rude"), USER], "T203"),
        ([SYSTEM, message("user", "what", " is", "?")], "T203"),
        ([SYSTEM], "T204"),
        ([USER], "T204"),
        ([[]], "T204"),
    ],
)
def test_what_became_of_the_messages_before(kept: list[list[str]], code: str) -> None:
    """An edited message is T203; what is dropped from 0 or after the system message is T204."""
    answer = [*OPEN, "yes", " no", "so", " it", " is", "<|im_end|>"]
    before = whole(SYSTEM, USER, answer)
    prompt = whole(*kept, answer, ["\n", *message("user", "so", "?"), *OPEN])
    start = len(before) - 6
    found = cause_of_break(before, prompt, common_prefix(before, prompt), [(start, len(before))], READING)
    assert (found.code, len(found.holds)) == (code, 1)


def test_ids_alone_prove_little() -> None:
    """Without text only what is dropped from 0 has a known cause."""
    before, prompt = np.arange(100, 130, dtype=np.int32), np.arange(105, 140, dtype=np.int32)
    assert cause_of_break(before, prompt, 0, [], None).code == "T204"
    prompt = np.concatenate((before[:20], before[21:])).astype(np.int32)
    assert cause_of_break(before, prompt, 20, [], None).code == "T200"


def test_evidence_has_both_sides_of_every_span() -> None:
    """Ids, places and text of what was there and what came instead."""
    found = cause(["_Ski", "nny", "<|im_end|>"], ["_Skinny", "<|im_end|>"])
    head = [*SYSTEM, *USER, *OPEN]
    before = ids(*head, "_Ski", "nny", "<|im_end|>")
    told = evidence(before, ids(*head, "_Skinny", "<|im_end|>", "\n"), found, READING)
    (span,) = told["spans"]
    n = len(head)
    assert span["before"] == {"start": n, "end": n + 2, "ids": [_ID["_Ski"], _ID["nny"]], "text": "_Skinny"}
    assert span["prompt"] == {"start": n, "end": n + 1, "ids": [_ID["_Skinny"]], "text": "_Skinny"}
    assert told["right"] == ["<|im_end|>", "<|im_end|>\n"]


def test_every_span_is_listed() -> None:
    """Two places that differ, with enough agreement between them, are two spans."""
    before = np.arange(60, dtype=np.int32)
    prompt = np.concatenate((before[:10], [500], before[12:40], before[41:], [7, 7])).astype(np.int32)
    assert differing_spans(before, prompt, 10) == [Span(10, 12, 10, 11), Span(40, 41, 39, 39)]


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 3), max_size=60))
def test_outside_of_the_spans_both_agree(one: list[int], other: list[int]) -> None:
    """Whatever the lists, replacing every span by what came gives the beginning of the prompt."""
    before, prompt = np.array(one, np.int32), np.array(other, np.int32)
    position = common_prefix(before, prompt)
    made, at = list(before[:position]), position
    for span in differing_spans(before, prompt, position):
        made += [*before[at : span.start], *prompt[span.new_start : span.new_end]]
        at = span.end
    made += list(before[at:])
    assert made == list(prompt[: len(made)])


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("<|im_start|>system\nx<|im_end|>\n<|im_start|>user\n", ["system", "user"]),
        ("<|start_header_id|>assistant<|end_header_id|>\n\n", ["assistant"]),
        ("<start_of_turn>model\nx<end_of_turn>\n<start_of_turn>user\n", ["assistant", "user"]),
        ("<s>[SYSTEM_PROMPT]x[/SYSTEM_PROMPT][INST]y[/INST]", ["system", "user"]),
        ("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>x", ["user"]),
        ("<｜User｜>x<｜Assistant｜>", ["user", "assistant"]),
        ("<|system|>\nx<|end|>\n<|assistant|>", ["system", "assistant"]),
        ("<s><|im_start|> system\n x<|im_end|> \n<|im_start|> user\n", ["system", "user"]),
        ("<start_of_turn> model\n", ["assistant"]),
        ("<b>user</b> of a[1] <think>", []),
    ],
)
def test_marks_of_known_templates(text: str, roles: list[str]) -> None:
    """The families of templates open messages in their own ways."""
    assert marks.roles(text) == roles


@pytest.mark.parametrize(
    ("said", "came", "cut"),
    [
        (["yes", " no", "<|im_end|>"], ["yes", "<|im_end|>"], True),
        (["yes", " no", " it", "<|im_end|>"], ["yes", "\n"], True),
        (["yes", " no", "<|im_end|>"], ["yes", " rude", "<|im_end|>"], False),
    ],
)
def test_a_generation_that_lost_its_end_is_called_cut_off(said: list[str], came: list[str], cut: bool) -> None:
    """What is left is its beginning, and the message ends there; another text in its place is none of it."""
    tail = [*message("tool", "1"), *OPEN]
    found = cause(said, came, tail=["\n", *tail] if came[-1] == "<|im_end|>" else tail)
    assert found.code == "T200"
    assert ("cut off" in found.explanation) == cut
