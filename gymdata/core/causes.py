"""Why a prompt does not extend what came before: re-tokenised, re-templated, rewritten, truncated, or not known.

What always holds: the decision is made from ids, from where the model's own generations lie in them, and from decoded
text that a ``Reading`` gives; without one only what ids alone prove is said. The first differing span decides, all are
given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gymdata.core import marks
from gymdata.core.call_spelling import same_turn
from gymdata.core.spans import Span, differing_spans
from gymdata.core.tokens import Ids, common_prefix

#: Tokens of agreement shown on both sides of a difference.
_AROUND = 12
_SEARCH = 4096
_SAME_TEXT_AROUND = 4

EXPLANATIONS = {
    "T200": "what the model wrote became another text, and no known cause fits",
    "T201": "the same text came back as other tokens: it was decoded and encoded again",
    "T202": "the assistant turn was rendered anew: equal after parsing tool calls and white space",
    "T203": "a message that came before was changed or removed",
    "T204": "the front of the conversation was dropped",
}
_REASONING = "earlier reasoning was stripped"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a tokenizer tells: ``decode`` gives text with special tokens written out; ``special`` are their ids."""

    decode: Callable[[Sequence[int]], str]
    special: frozenset[int]
    _border: dict[int, bool] = field(default_factory=dict)

    def is_border(self, token: int) -> bool:
        """Whether a token stands between messages."""
        if token not in self.special:
            return False
        if token not in self._border:
            self._border[token] = marks.is_border(self.decode([token]))
        return self._border[token]


#: Called when the first break is met, so that a tokenizer is loaded only then; None when there is none.
Reader = Callable[[], Reading | None]


@dataclass(frozen=True, slots=True)
class Cause:
    """The code of a break, every differing span, all predicates that hold, and a line for people."""

    code: str
    spans: list[Span]
    holds: tuple[str, ...]
    explanation: str

    @property
    def decidable(self) -> bool:
        """Exactly one predicate holds."""
        return len(self.holds) == 1


def cause_of_break(
    before: Ids,
    prompt: Ids,
    position: int,
    generations: Sequence[tuple[int, int]],
    reading: Reading | None,
) -> Cause:
    """Why ``prompt`` leaves ``before`` at ``position``. ``generations``: where sampled tokens lie in ``before``, as
    (start, end) in rising order."""
    spans = differing_spans(before, prompt, position)
    if reading is not None and spans[-1].end == len(before) and spans[-1].new_end == len(prompt):
        spans = [*spans[:-1], _to_border(spans[-1], prompt, reading)]
    case = _Case(before, prompt, spans, generations, reading)
    holds = case.predicates()
    code = holds[0] if holds else "T200"
    explanation = EXPLANATIONS[code] if reading is not None or holds else "give --tokenizer to learn the cause"
    if code == "T203" and case.lost_reasoning():
        explanation = _REASONING
    return Cause(code, spans, holds, explanation)


def _to_border(span: Span, prompt: Ids, reading: Reading) -> Span:
    """What came before was used up without an end token; what stands against it ends with its message."""
    for at in range(span.new_start, len(prompt)):
        if reading.is_border(int(prompt[at])):
            return Span(span.start, span.end, span.new_start, at)
    return span


class _Case:
    """One break, and the questions about its first span."""

    def __init__(
        self,
        before: Ids,
        prompt: Ids,
        spans: list[Span],
        generations: Sequence[tuple[int, int]],
        reading: Reading | None,
    ) -> None:
        self.before, self.prompt, self.spans, self.span = before, prompt, spans, spans[0]
        self.generations, self.reading = generations, reading

    def predicates(self) -> tuple[str, ...]:
        """Those that hold, in order. Equal text is not re-templated, and a dropped front is no rewriting."""
        if self.reading is None:
            return ("T204",) if self.dropped_front() else ()
        found = []
        if self.same_text():
            found.append("T201")
        turn = self.turn()
        if not found and turn is not None and self.same_when_parsed(turn):
            found.append("T202")
        if self.dropped_front():
            found.append("T204")
        elif self.rewritten(turn) and "T201" not in found:
            found.append("T203")
        return tuple(found)

    def text(self, ids: Ids) -> str:
        assert self.reading is not None
        return self.reading.decode(ids.tolist())

    def same_text(self) -> bool:
        """T201. With a few tokens of agreement around, for a letter may lie across the spans' edges."""
        s, around = self.span, _SAME_TEXT_AROUND
        left = self.before[max(0, s.start - around) : s.start]
        after = self.before[s.end : s.end + around]
        right = after[: common_prefix(after, self.prompt[s.new_end : s.new_end + around])]
        one = np.concatenate((left, self.before[s.start : s.end], right))
        other = np.concatenate((left, self.prompt[s.new_start : s.new_end], right))
        return self.text(one) == self.text(other)

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
        """T202: the turn as a whole, or with this span alone replaced, says the same."""
        start, end = turn
        s = self.span
        mine = self.text(self.before[start:end])
        new = self.prompt[s.new_start : s.new_end]
        alone = np.concatenate((self.before[start : s.start], new, self.before[s.end : end]))
        if same_turn(mine, self.text(alone)):
            return True
        inside = [other for other in self.spans if other.start < end]
        last = inside[-1]
        if len(inside) == 1 or last.end > end:
            return False
        return same_turn(mine, self.text(self.prompt[start : last.new_end + end - last.end]))

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
                others = set(marks.roles(self.text(self.before[:start]))) - {"system"}
                if not others:
                    return True
        return False

    def _same_removals(self) -> list[int]:
        """Where the removed span can start: ``[3, 4] 3 → 3`` has lost ``3 4`` or ``4 3``."""
        s = self.span
        back = self.before[: s.start][::-1] == self.before[s.end - s.start : s.end][::-1]
        room = len(back) if back.all() else int(back.argmin())
        borders = [s.start]
        for start in range(s.start - 1, s.start - room - 1, -1):
            if start == 0 or self._is_border(start):
                borders.append(start)
        return borders

    def rewritten(self, turn: tuple[int, int] | None) -> bool:
        """T203: a border or a reasoning block was removed, or the span is not inside what an assistant said."""
        s = self.span
        removed = self.before[s.start : s.end]
        if self._has_border(removed) or self.lost_reasoning():
            return True
        return turn is None and not self._inside_generation()

    def lost_reasoning(self) -> bool:
        """The marks of a reasoning block were removed, or all that stood between them."""
        s = self.span
        if self.reading is None:
            return False
        return bool(marks.REASONING.search(self.text(self.before[s.start : s.end]))) or self._emptied_reasoning()

    def _emptied_reasoning(self) -> bool:
        s = self.span
        low = max(0, s.start - _AROUND)
        if not marks.opens_reasoning(self.text(self.before[low : s.start])):
            return False
        came, was = (ids[at : at + _AROUND] for ids, at in ((self.prompt, s.new_start), (self.before, s.start)))
        return marks.closes_reasoning(self.text(came)) and not marks.closes_reasoning(self.text(was))

    def _inside_generation(self) -> bool:
        s = self.span
        return any(start <= s.start and s.end <= end and s.start < end for start, end in self.generations)

    def _is_border(self, at: int) -> bool:
        return self.reading is not None and self.reading.is_border(int(self.before[at]))

    def _has_border(self, ids: Ids) -> bool:
        assert self.reading is not None
        if any(self.reading.is_border(token) for token in set(ids.tolist()) & self.reading.special):
            return True
        return marks.OPENING.search(self.text(ids)) is not None


def evidence(before: Ids, prompt: Ids, cause: Cause, reading: Reading | None) -> dict[str, Any]:
    """What a report tells of a break: ids and text of both sides of every span, and some agreement around the first."""

    def side(ids: Ids, start: int, end: int) -> dict[str, Any]:
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
