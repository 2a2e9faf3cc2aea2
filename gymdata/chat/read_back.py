"""Whether a text says what an assistant message states: its content, its reasoning and its calls.

Texts are compared without white space at their ends, and as the tokenizer's normaliser has them; arguments as JSON values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gymdata.chat._parsers import split_reasoning
from gymdata.rollouts.messages import Message, call_arguments, object_of

Normal = Callable[[str], str]
_OPEN, _CLOSED = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Stated:
    """What a message states. ``calls``: (name, arguments as JSON) of each, in order."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, message: Message) -> Stated:
        """Raises DataError for arguments that are no JSON object."""
        functions = [object_of(object_of(call).get("function")) for call in message.get("tool_calls") or ()]
        calls = tuple((str(f.get("name")), _json(call_arguments(f))) for f in functions)
        return cls((message.get("content") or "").strip(), (message.get("reasoning") or "").strip(), calls)

    def forms(self) -> Iterator[Stated]:
        """The message, and the same with the reasoning that is in its text apart, as templates of reasoning models have
        it."""
        yield self
        before, closed, after = self.content.partition(_CLOSED)
        if closed and not self.reasoning:
            yield Stated(after.strip(), before.strip().removeprefix(_OPEN).strip(), self.calls)

    def equals(self, other: Stated, normal: Normal) -> bool:
        """Whether both state the same, in any of their forms."""
        forms = {form.normalised(normal) for form in self.forms()}
        return any(form.normalised(normal) in forms for form in other.forms())

    def normalised(self, normal: Normal) -> tuple[Any, ...]:
        """What is compared."""
        calls = tuple((normal(name), normal(arguments)) for name, arguments in self.calls)
        return normal(self.content), normal(self.reasoning), calls


def what_is_missing(stated: Stated, text: str, normal: Normal, *, opened: bool) -> str | None:
    """The part of ``stated`` that ``text``, a turn without its end token, does not say; None when it says all and no more.
    ``opened``: the prompt has opened the reasoning."""
    reasoning, rest = split_reasoning(text, opened)
    read = Stated(rest.strip(), (reasoning or "").strip())
    if not stated.calls:
        if read.equals(stated, normal):
            return None
        form = next((f for f in stated.forms() if f.reasoning), None)
        if form is not None and normal(form.reasoning) not in normal(text.strip()):
            return "reasoning"
        return "content"
    for form in stated.forms():
        content, words = form.content, read.content
        if not words.startswith(content):
            content, words = normal(content), normal(words)
        calls = tuple(_calls_in(words[len(content) :])) if words.startswith(content) else ()
        if Stated(form.content, read.reasoning, calls).normalised(normal) == form.normalised(normal):
            return None
    if tuple(_calls_in(rest)) != stated.calls:
        return "tool calls"
    return "reasoning" if stated.reasoning and normal(stated.reasoning) not in normal(text.strip()) else "content"


def _calls_in(text: str) -> Iterator[tuple[str, str]]:
    """The calls that stand in ``text`` as JSON, alone or in lists."""
    decoder, position = json.JSONDecoder(), 0
    while (begin := min((n for n in (text.find("{", position), text.find("[", position)) if n >= 0), default=-1)) >= 0:
        try:
            value, position = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            position = begin + 1
            continue
        for call in value if isinstance(value, list) else [value]:
            function = object_of(object_of(call).get("function")) or object_of(call)
            arguments = function.get("arguments", function.get("parameters"))
            if isinstance(function.get("name"), str) and isinstance(arguments, dict):
                yield function["name"], _json(arguments)


def _json(arguments: Any) -> str:
    return json.dumps(arguments, sort_keys=True, ensure_ascii=False)
