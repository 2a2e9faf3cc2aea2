"""What a list shows of a rollout's text: the prompt, the last answer, and the reference of its task, each in a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from gymdata.rollouts.messages import Message, call_text, loads, object_of

#: The columns with the texts.
TEXTS = ("messages", "task")
#: Characters of a text that a list can show.
_WIDEST = 160
#: Fields of a task that hold its reference answer.
_REFERENCES = ("answer", "solution", "target", "reference", "expected")


@dataclass(frozen=True, slots=True)
class Line:
    """``answer``: the policy's last text, or its last tool call; ``reference``: None where the task names none."""

    prompt: str
    answer: str
    reference: str | None


def lines_of(rows: pa.Table, searched: str = "") -> list[Line]:
    """One for each row, cut to what a list can show: the beginning, or the place of what was ``searched``, in the last text
    or call that has it. ``rows``: the columns messages and task."""
    lines = []
    for messages, task in zip(rows["messages"].to_pylist(), rows["task"].to_pylist(), strict=True):
        line, answer = texts_of(messages or [], task), None
        if searched and searched not in line.answer and searched not in line.prompt:
            answer = next((text for text in _written(messages or []) if searched in text), None)
        reference = None if line.reference is None else _short(line.reference)
        lines.append(Line(_short(line.prompt, searched), _short(answer or line.answer, searched), reference))
    return lines


def texts_of(messages: Sequence[Message], task: str | None) -> Line:
    """The whole texts of one rollout. ``task``: its row as JSON."""
    first = next((n for n, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    prompt = next((message.get("content") for message in reversed(messages[:first]) if message["role"] == "user"), None)
    answer = next(_written(messages), "")
    fields = object_of(loads(task)) if task else {}
    reference = next((fields[name] for name in _REFERENCES if fields.get(name) not in (None, "")), None)
    if isinstance(reference, (dict, list)):
        reference = json.dumps(reference, ensure_ascii=False)
    return Line(prompt or "", answer, None if reference is None else str(reference))


def _written(messages: Sequence[Message]) -> Iterator[str]:
    """What the policy wrote, the last first: of each message its text, then its calls."""
    for message in reversed([m for m in messages if m["role"] == "assistant"]):
        # In a file they are JSON.
        calls: Any = loads(message.get("tool_calls"))
        called = "; ".join(f"→ {call_text(call)}" for call in calls) if isinstance(calls, list) else ""
        yield message.get("content") or called
        if message.get("content") and called:
            yield called


def _short(text: str, searched: str = "") -> str:
    if (index := text.find(searched)) > _WIDEST // 2:
        text = "…" + text[index - _WIDEST // 4 :]
    line = " ".join(text[: 4 * _WIDEST].split())
    return line if len(line) <= _WIDEST else line[: _WIDEST - 1] + "…"
