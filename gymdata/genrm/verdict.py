"""Parses a judge's text: two scores from 1 to 5 and a ranking from 1 (the first is much better) to 6.

Invariants: reading takes time proportional to the text, whatever the text is; ``parse_last`` never invents a number and
takes no draft. ``parse_published`` looks first for an object in a json fence, then for the last anywhere; ``parse_last`` for
the last outside of reasoning, at any depth. An ``overall`` object inside is descended into.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gymdata.checks.chat_text import outside_reasoning

DEFAULT_SCORE = 3.0
DEFAULT_RANKING = 3.5
SCORES = (1.0, 5.0)
RANKINGS = (1.0, 6.0)
_KEYS = ("score_1", "score_2", "ranking")
#: Finish reasons of an answer that its judge ended, as servers write them; some write none.
_ENDED = (None, "stop", "eos", "eos_token", "end_turn", "stop_sequence")

#: For engines with guided decoding.
VERDICT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "score_1": {"type": "integer", "minimum": 1, "maximum": 5},
        "score_2": {"type": "integer", "minimum": 1, "maximum": 5},
        "ranking": {"type": "integer", "minimum": 1, "maximum": 6},
    },
    "required": list(_KEYS),
    "additionalProperties": False,
}

_FENCE = re.compile(r"```(json)?", re.IGNORECASE)
#: Inside an object: a brace, or a string (to the end of the text when it is never closed).
_TOKEN = re.compile(r'[{}]|"(?:[^"\\]|\\.)*(?:"|\\?\Z)', re.DOTALL)
#: A key as a judge writes it, well or badly: behind a brace or a quote, or before a colon.
_KEY = r"(?:score\\?_[12]|ranking)\b"
_WRITTEN = re.compile(rf"""(?:\{{\s*|["'`“‘*]){_KEY}|\b{_KEY}\W?\s*[:=]""", re.IGNORECASE)
#: A quote that is never closed hides braces; the text is read again from the first one hidden, at most this many times.
_PASSES = 4
_Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judged comparison. A missing number is None; without both scores there is a ``ranking``."""

    score_1: float | None
    score_2: float | None
    ranking: float | None

    def swap(self) -> Verdict:
        """The same judgement with the positions exchanged."""
        return Verdict(self.score_2, self.score_1, None if self.ranking is None else 7.0 - self.ranking)


def parse_published(
    text: str, default_score: float = DEFAULT_SCORE, default_ranking: float = DEFAULT_RANKING
) -> Verdict | None:
    """The verdict as published: missing keys take the defaults, any number is taken. None when there is no object."""
    for values in itertools.chain(_fenced_objects(text), _from_last(text)):
        numbers = {key: _number(values[key]) for key in _KEYS if key in values}
        if numbers and None not in numbers.values():
            return Verdict(
                numbers.get("score_1", default_score),
                numbers.get("score_2", default_score),
                numbers.get("ranking", default_ranking),
            )
    return None


def parse_last(text: str, finish_reason: str | None = None) -> Verdict | None:
    """The last verdict outside of reasoning, or None when it cannot be relied on.

    An answer that was cut (``finish_reason`` length and the like), or whose reasoning or last object is never closed, has
    none. The last text in braces that names a key of a verdict decides alone: it holds one object with such keys, at any
    depth, or the answer is unparsed, whatever came before it. So it is for a value that is no finite number, is a boolean or
    is outside its scale, and for one score without the other. Two scores without a ranking are a verdict; so is a ranking
    alone.
    """
    for part in reversed((outside_reasoning(text) if finish_reason in _ENDED else None) or ()):
        objects = _objects(part)
        spans = [span for span in objects if _WRITTEN.search(part, *span)]
        start, end = spans[-1] if spans else (0, 0)
        later = part.find("{", end)
        if part.find("{", objects[-1][1] if objects else 0) >= 0 or (later >= 0 and _WRITTEN.search(part, later)):
            return None
        if spans:
            found = _verdicts(part[start:end])
            return _valid(found[0]) if len(found) == 1 else None
    return None


def _valid(candidate: dict[str, Any]) -> Verdict | None:
    numbers = {key: _number(candidate[key]) for key in _KEYS if key in candidate}
    for key, number in numbers.items():
        low, high = RANKINGS if key == "ranking" else SCORES
        if number is None or isinstance(candidate[key], bool) or not low <= number <= high:
            return None
    if ("score_1" in numbers) != ("score_2" in numbers):
        return None
    return Verdict(numbers.get("score_1"), numbers.get("score_2"), numbers.get("ranking"))


def _verdicts(text: str) -> list[dict[str, Any]]:
    """The objects with a verdict's keys in an object, or in braces around an object, as LaTeX has them."""
    for _ in range(_PASSES):
        try:
            left: list[Any] = [json.loads(text)]
            break
        except (ValueError, RecursionError):
            spans = [(start + 1, end + 1) for start, end in _objects(text[1:-1])]
            spans = [span for span in spans if _WRITTEN.search(text, *span)]
            if len(spans) != 1 or _WRITTEN.search(text, 0, spans[0][0]) or _WRITTEN.search(text, spans[0][1]):
                return []
            text = text[slice(*spans[0])]
    else:
        return []
    found = []
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            found += [value] if any(key in value for key in _KEYS) else []
            left += [value["overall"]] if isinstance(value.get("overall"), dict) else value.values()
    return found


def _number(value: Any) -> float | None:
    if not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _fenced_objects(text: str) -> Iterator[dict[str, Any]]:
    """Objects in json fences, from the first."""
    for inside in _fenced(text):
        for start, end in _objects(inside):
            if (candidate := _load(inside[start:end])) is not None:
                yield candidate


def _from_last(text: str) -> Iterator[dict[str, Any]]:
    """All objects, from the last."""
    for start, end in reversed(_objects(text)):
        if (candidate := _load(text[start:end])) is not None:
            yield candidate


def _load(text: str) -> dict[str, Any] | None:
    if not any(key in text for key in _KEYS):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and isinstance(value.get("overall"), dict):
        value = value["overall"]
    return value if isinstance(value, dict) else None


def _fenced(text: str) -> Iterator[str]:
    opened = None
    for fence in _FENCE.finditer(text):
        if opened is not None:
            yield text[opened : fence.start()]
            opened = None
        elif fence[1]:
            opened = fence.end()


def _objects(text: str) -> list[_Span]:
    """Outermost balanced ``{…}`` spans, by where they end. Braces in strings do not count."""
    objects: list[_Span] = []
    start = text.find("{")
    for _ in range(_PASSES):
        if start < 0:
            break
        spans, start = _scan(text, start)
        objects += spans
    return sorted(set(objects), key=lambda span: (span[1], -span[0]))


def _scan(text: str, start: int) -> tuple[list[_Span], int]:
    """Balanced spans from ``start`` on, and the first brace that a string of an object never closed had hidden (or −1)."""
    closed: list[_Span] = []
    while start >= 0:
        stack: list[int] = []
        first_hidden = -1
        since = len(closed)
        for token in _TOKEN.finditer(text, start):
            mark = token[0]
            if mark == "{":
                stack.append(token.start())
            elif mark == "}":
                begin = stack.pop()
                while len(closed) > since and closed[-1][0] > begin:
                    closed.pop()
                closed.append((begin, token.end()))
                if not stack:
                    break
            elif first_hidden < 0 and "{" in mark:
                first_hidden = text.find("{", token.start())
        if stack or not closed:
            return closed, first_hidden
        start = text.find("{", closed[-1][1])
    return closed, -1
