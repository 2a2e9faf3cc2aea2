"""The differing spans of a break: where two id lists that begin alike differ, and where they agree again.

Invariants: spans are in order, the first begins at the break, and outside of them both lists agree up to the end
of the first one; the cost grows as n·log n with the tokens after the break.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gymdata.checks import chat_text as marks
from gymdata.checks.chat_text import same_turn
from gymdata.rollouts import turns as tokens
from gymdata.rollouts.turns import Ids, Turn, common_prefix


class Relation(NamedTuple):
    """A turn that does not simply continue the one before: its code, position, and the ids there. Fields of a violation."""

    code: str
    turn: int
    position: int | None = None
    expected: str | None = None
    got: str | None = None
    detail: str | None = None
    #: Evidence of a break: ids and texts of the differing spans.
    evidence: dict[str, Any] | None = None


def relations(turns: Sequence[Turn], reader: Reader | None = None) -> list[Relation]:
    """T200 (or its cause), T208, T210 (prefix not the longest) and T211 of one rollout's turns.

    ``turns`` are expandable: parents come earlier and prefix lengths fit. ``reader`` is called for the tokenizer when
    there is a break.
    """
    prompts = tokens.expand_prompts(turns, check_digests=False)
    faults = []
    for index, kind in enumerate(tokens.kinds(turns, prompts)):
        # A turn without a prompt breaks nothing; that it has none is a fault of its own.
        if kind in ("first", "continues") or not len(prompts[index]):
            continue
        turn, prompt = turns[index], prompts[index]
        parent, shared = int(turn["parent"]), int(turn["prefix_length"])
        above = np.concatenate((prompts[parent], turns[parent]["generation_token_ids"]))
        # An earlier turn whose prompt begins with this turn's prompt ++ generation: it was sampled after this one.
        generation = np.asarray(turn["generation_token_ids"], np.int32)
        full, earlier = np.concatenate((prompt, generation)), range(index if len(generation) else 0)
        later = next((n for n in earlier if np.array_equal(prompts[n][: len(full)], full)), None)
        if shared < min(len(above), len(prompt)) and above[shared] == prompt[shared]:
            expected, got = (f"prefix_length {size}" for size in (common_prefix(above, prompt), shared))
            faults.append(Relation("T210", index, None, expected, got, "not longest"))
        elif later is not None:
            faults.append(Relation("T208", index, detail=f"turn {later} already holds this turn in its prompt"))
        elif kind == "break":
            reading = reader() if reader is not None else None
            cause = cause_of_break(above, prompt, shared, generations(turns, prompts, parent), reading)
            faults.append(
                Relation(
                    cause.code,
                    index,
                    shared,
                    window(above, shared),
                    window(prompt, shared),
                    f"differs from turn {parent}'s prompt and generation",
                    evidence(above, prompt, cause, reading),
                )
            )
        else:
            faults.append(Relation("T211", index, detail=f"{kind} of turn {parent}"))
    return faults


def generations(turns: Sequence[Turn], prompts: Sequence[tokens.Ids], turn: int) -> list[tuple[int, int]]:
    """Where sampled tokens are in the prompt ++ generation of ``turn``: (start, end) in rising order."""
    spans = []
    shared = len(prompts[turn]) + len(turns[turn]["generation_token_ids"])
    while turn >= 0:
        start = len(prompts[turn])
        end = min(start + len(turns[turn]["generation_token_ids"]), shared)
        if start < end:
            spans.append((start, end))
        shared = min(shared, int(turns[turn]["prefix_length"]))
        turn = int(turns[turn]["parent"])
    return spans[::-1]


def window(ids: tokens.Ids, position: int, width: int = 8) -> str:
    """The ids from ``position`` on, for people; "the end" when there are none."""
    part = ids[position : position + width].tolist()
    return " ".join(map(str, part)) + (" …" if len(ids) > position + width else "") if part else "the end"


#: Tokens of agreement shown on both sides of a difference.
_AROUND = 12
_SEARCH = 4096
_SAME_TEXT_AROUND = 4

EXPLANATIONS = {
    "T200": "what the model wrote became another text, and no known cause fits",
    "T201": "the same text came back as other tokens: it was decoded and encoded again",
    "T202": "the assistant turn was re-rendered: equal after parsing tool calls and white space",
    "T203": "a message that came before was changed or removed",
    "T204": "the front of the conversation was dropped",
}
_REASONING = "earlier reasoning was stripped"
_CUT_OFF = "the end of what the model wrote was cut off: the next prompt continues after the beginning of it"


@dataclass(frozen=True, slots=True)
class Reading:
    """A tokenizer's functions for breaks: ``decode`` gives text with special tokens written out; ``special`` are their
    ids."""

    decode: Callable[[Sequence[int]], str]
    special: frozenset[int]
    _border: dict[int, bool] = field(default_factory=dict)

    def is_border(self, token: int) -> bool:
        """Whether a token is a border between messages."""
        if token not in self.special:
            return False
        if token not in self._border:
            self._border[token] = marks.is_border(self.decode([token]))
        return self._border[token]


#: Called at the first break, so that a tokenizer is loaded only then; None without a tokenizer.
Reader = Callable[[], Reading | None]


@dataclass(frozen=True, slots=True)
class Cause:
    """The code of a break, every differing span, all predicates that hold, and a line for people."""

    code: str
    spans: list[Span]
    holds: tuple[str, ...]
    explanation: str


def cause_of_break(
    before: Ids,
    prompt: Ids,
    position: int,
    generations: Sequence[tuple[int, int]],
    reading: Reading | None,
) -> Cause:
    """Why ``prompt`` leaves ``before`` at ``position``. ``generations``: where sampled tokens are in ``before``, as
    (start, end) in rising order."""
    spans = differing_spans(before, prompt, position)
    if reading is not None and spans[-1].end == len(before) and spans[-1].new_end == len(prompt):
        # The earlier text ends without an end token; the new text in its place ends with its message.
        *earlier_spans, last = spans
        positions = range(last.new_start, last.new_end)
        border = next((i for i in positions if reading.is_border(int(prompt[i]))), last.new_end)
        spans = [*earlier_spans, replace(last, new_end=border)]
    case = _Case(before, prompt, spans, generations, reading)
    holds = case.predicates()
    code = holds[0] if holds else "T200"
    explanation = EXPLANATIONS[code] if reading is not None or holds else "a known tokenizer would tell the cause"
    if code == "T203" and case.lost_reasoning():
        explanation = _REASONING
    elif code == "T200" and case.cut_off():
        explanation = _CUT_OFF
    return Cause(code, spans, holds, explanation)


@dataclass(frozen=True, slots=True)
class _Case:
    """One break, and the questions about its first span."""

    before: Ids
    prompt: Ids
    spans: list[Span]
    generations: Sequence[tuple[int, int]]
    reading: Reading | None

    @property
    def span(self) -> Span:
        return self.spans[0]

    def predicates(self) -> tuple[str, ...]:
        """The predicates that hold, in order. Equal text is not re-templated, and a dropped front is not a rewrite."""
        if self.reading is None:
            return ("T204",) if self.dropped_front() else ()
        codes = []
        if self.same_text():
            codes.append("T201")
        turn = self.turn()
        if not codes and turn is not None and self.same_when_parsed(turn):
            codes.append("T202")
        if self.dropped_front():
            codes.append("T204")
        elif self.rewritten(turn) and "T201" not in codes:
            codes.append("T203")
        return tuple(codes)

    def text(self, ids: Ids) -> str:
        assert self.reading is not None
        return self.reading.decode(ids.tolist())

    def same_text(self) -> bool:
        """T201. Decoded with a few equal tokens around, because a character may cross the spans' edges."""
        s, around = self.span, _SAME_TEXT_AROUND
        left = self.before[max(0, s.start - around) : s.start]
        after = self.before[s.end : s.end + around]
        right = after[: common_prefix(after, self.prompt[s.new_end : s.new_end + around])]
        removed_text = np.concatenate((left, self.before[s.start : s.end], right))
        new_text = np.concatenate((left, self.prompt[s.new_start : s.new_end], right))
        return self.text(removed_text) == self.text(new_text)

    def turn(self) -> tuple[int, int] | None:
        """The assistant turn of ``before`` that holds the whole first span, if there is one that does on both sides."""
        s = self.span
        if self._has_border(self.prompt[s.new_start : s.new_end]):
            return None
        for start, end in self.generations:
            if start <= s.start and s.end <= end and (s.start < end or s.end == len(self.before)):
                return start, end
        return self._given_turn()

    def _given_turn(self) -> tuple[int, int] | None:
        """The same for a turn that the first prompt already held, found by the marks around it."""
        assert self.reading is not None
        s = self.span
        low = max(0, s.start - _SEARCH)
        start = next((i for i in range(s.start - 1, low - 1, -1) if self._is_border(i)), None)
        if start is None or marks.roles(self.text(self.before[start : start + 6]))[:1] != ["assistant"]:
            return None
        if any(start < b and a < s.end for a, b in self.generations):
            return None
        end = next((i for i in range(s.start, min(len(self.before), s.end + _SEARCH)) if self._is_border(i)), None)
        return (start, end) if end is not None and s.end <= end else None

    def same_when_parsed(self, turn: tuple[int, int]) -> bool:
        """T202: the turn as a whole, or with only this span replaced, means the same."""
        start, end = turn
        s = self.span
        before_text = self.text(self.before[start:end])
        new = self.prompt[s.new_start : s.new_end]
        alone = np.concatenate((self.before[start : s.start], new, self.before[s.end : end]))
        if same_turn(before_text, self.text(alone)):
            return True
        inside = [other for other in self.spans if other.start < end]
        last = inside[-1]
        if len(inside) == 1 or last.end > end:
            return False
        return same_turn(before_text, self.text(self.prompt[start : last.new_end + end - last.end]))

    def dropped_front(self) -> bool:
        """T204: nothing but a removal, that can be read as starting at 0 or right after the system message."""
        s = self.span
        if s.new_start != s.new_end or s.start == s.end:
            return False
        for start in self._same_removals():
            if start == 0:
                return True
            if self.reading is None or (s.start - start > 64 and not self._is_border(start)):
                continue
            if marks.opens_message(self.text(self.before[start : start + 8])):
                other_roles = set(marks.roles(self.text(self.before[:start]))) - {"system"}
                if not other_roles:
                    return True
        return False

    def _same_removals(self) -> list[int]:
        """Where the removed span can start: ``[3, 4] 3 → 3`` has lost ``3 4`` or ``4 3``."""
        s = self.span
        back = self.before[: s.start][::-1] == self.before[s.end - s.start : s.end][::-1]
        room = len(back) if back.all() else int(back.argmin())
        earlier = range(s.start - 1, s.start - room - 1, -1)
        return [s.start, *(start for start in earlier if start == 0 or self._is_border(start))]

    def rewritten(self, turn: tuple[int, int] | None) -> bool:
        """T203: a border or a reasoning block was removed, or the span is not inside an assistant's text."""
        s = self.span
        removed = self.before[s.start : s.end]
        if self._has_border(removed) or self.lost_reasoning():
            return True
        return turn is None and not self._inside_generation()

    def lost_reasoning(self) -> bool:
        """The marks of a reasoning block were removed, or everything between them."""
        s = self.span
        if self.reading is None:
            return False
        return bool(marks.REASONING.search(self.text(self.before[s.start : s.end]))) or self._emptied_reasoning()

    def _emptied_reasoning(self) -> bool:
        s = self.span
        low = max(0, s.start - _AROUND)
        if not marks.opens_reasoning(self.text(self.before[low : s.start])):
            return False
        came, was = (ids[i : i + _AROUND] for ids, i in ((self.prompt, s.new_start), (self.before, s.start)))
        return marks.closes_reasoning(self.text(came)) and not marks.closes_reasoning(self.text(was))

    def cut_off(self) -> bool:
        """The generation was cut in the first span, and its message ends there."""
        s = self.span
        if self.reading is None or not self._inside_generation():
            return False
        text = ""
        for token in self.prompt[s.new_start : s.new_start + _AROUND].tolist():
            if self.reading.is_border(token):
                return not text.strip()
            text += self.text(np.array([token]))
        return False

    def _inside_generation(self) -> bool:
        s = self.span
        return any(start <= s.start and s.end <= end and s.start < end for start, end in self.generations)

    def _is_border(self, position: int) -> bool:
        return self.reading is not None and self.reading.is_border(int(self.before[position]))

    def _has_border(self, ids: Ids) -> bool:
        assert self.reading is not None
        if any(self.reading.is_border(token) for token in set(ids.tolist()) & self.reading.special):
            return True
        return marks.OPENING.search(self.text(ids)) is not None


def evidence(before: Ids, prompt: Ids, cause: Cause, reading: Reading | None) -> dict[str, object]:
    """A break for reports: ids and text of both sides of every span, and some equal tokens around the first."""

    def side(ids: Ids, start: int, end: int) -> dict[str, object]:
        part = ids[start:end].tolist()
        return {"start": start, "end": end, "ids": part, "text": reading.decode(part) if reading else None}

    first = cause.spans[0]
    left = before[max(0, first.start - _AROUND) : first.start].tolist()
    return {
        "explanation": cause.explanation,
        "spans": [
            {"before": side(before, s.start, s.end), "prompt": side(prompt, s.new_start, s.new_end)}
            for s in cause.spans
        ],
        "left": reading.decode(left) if reading else None,
        "right": [
            reading.decode(part.tolist()) if reading else None
            for part in (before[first.end : first.end + _AROUND], prompt[first.new_end : first.new_end + _AROUND])
        ],
    }


#: Tokens that must agree before two lists are taken to run together again.
WINDOW = 8
#: More places that differ than this are given as one span to the end.
MOST_SPANS = 500
_NEAR = 512
_MOST_CANDIDATES = 64
#: An agreement counts when it is longer than 1/N of what differs before it.
_CHANCE = 4
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Span:
    """``prompt[new_start:new_end]`` replaced ``before[start:end]``."""

    start: int
    end: int
    new_start: int
    new_end: int


def differing_spans(before: Ids, prompt: Ids, position: int) -> list[Span]:
    """Every differing span of ``prompt`` against ``before``, equal up to ``position``; tokens that follow after the end
    of ``before`` are new and no difference."""
    spans: list[Span] = []
    a = b = position
    while a < len(before):
        near = bool(spans)
        end, new_end = resync(before[a:], prompt[b:], near=near) if len(spans) < MOST_SPANS else (len(before) - a, -1)
        end, new_end = a + end, len(prompt) if new_end < 0 else b + new_end
        spans.append(Span(a, end, b, new_end))
        same = common_prefix(before[end:], prompt[new_end:])
        a, b = end + same, new_end + same
    return spans


def resync(before: Ids, prompt: Ids, *, near: bool = False) -> tuple[int, int]:
    """The smallest a, b with before[a:a + 8] = prompt[b:b + 8]; (len(before), -1) when they never run together.

    Templates repeat texts, so 8 tokens can agree by chance: of the stretches that agree the longest is taken, and an
    earlier one only when it is not short compared to what differs before it. Within the last tokens of ``before`` fewer
    than 8 are enough. ``near``: search nearby first.
    """
    if near and min(len(before), len(prompt)) > _NEAR:
        agreement = _by_windows(before[:_NEAR], prompt[:_NEAR])
        if agreement is not None:
            return agreement
    if (agreement := _by_windows(before, prompt)) is not None:
        return agreement
    data = np.ascontiguousarray(prompt).tobytes()
    for length in range(min(WINDOW - 1, len(before)), 0, -1):
        tail = np.ascontiguousarray(before[len(before) - length :]).tobytes()
        offset = data.find(tail)
        while offset >= 0 and offset % 4:
            offset = data.find(tail, offset + 1)
        if offset >= 0:
            return len(before) - length, offset // 4
    return len(before), -1


def _by_windows(before: Ids, prompt: Ids) -> tuple[int, int] | None:
    stretch = _longest(before, prompt)
    while stretch is not None:
        a, b, _ = stretch
        earlier = _longest(before[:a], prompt[:b])
        if earlier is None or _CHANCE * earlier[2] < earlier[0] + earlier[1]:
            return a, b
        stretch = earlier
    return None


def _longest(before: Ids, prompt: Ids) -> tuple[int, int, int] | None:
    """The longest stretch of at least 8 tokens that both hold: where it begins in each, and its length."""
    own_hashes, prompt_hashes = _hashes(before), _hashes(prompt)
    if not len(own_hashes) or not len(prompt_hashes):
        return None
    distinct, first = np.unique(own_hashes, return_index=True)
    indices = np.minimum(np.searchsorted(distinct, prompt_hashes), len(distinct) - 1)
    shared = np.flatnonzero(distinct[indices] == prompt_hashes)
    if not len(shared):
        return None
    a = first[indices[shared]]
    # Pieces in which both sides step by one; a repeated window cuts them, so the longest are looked at in full.
    starts = np.concatenate(([0], np.flatnonzero((np.diff(shared) != 1) | (np.diff(a) != 1)) + 1))
    sizes = np.diff(np.concatenate((starts, [len(shared)])))
    best: tuple[int, int, int] | None = None
    for piece in starts[np.argsort(-sizes, kind="stable")[:_MOST_CANDIDATES]].tolist():
        x, y = int(a[piece]), int(shared[piece])
        back = common_prefix(before[:x][::-1], prompt[:y][::-1])
        x, y = x - back, y - back
        size = common_prefix(before[x:], prompt[y:])
        if size >= WINDOW and (best is None or (-size, x + y) < (-best[2], best[0] + best[1])):
            best = x, y, size
    return best


def _hashes(ids: Ids) -> npt.NDArray[np.uint64]:
    """A hash of each window of 8."""
    n = len(ids) - WINDOW + 1
    if n <= 0:
        return np.empty(0, np.uint64)
    values = ids.astype(np.uint64)
    total = np.zeros(n, np.uint64)
    for k in range(WINDOW):
        total = total * _BASE + values[k : k + n]
    return total
