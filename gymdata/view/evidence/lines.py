"""What a list shows of a rollout's text: the prompt, the last answer, and the reference of its task, each in a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from gymdata.rollouts.messages import Message, loads, object_of

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
    """One for each row, cut to what a list can show: the beginning, or the place of what was ``searched``. ``rows``: the
    columns messages and task."""
    texts = zip(rows["messages"].to_pylist(), rows["task"].to_pylist(), strict=True)
    return [
        Line(
            _short(one.prompt, searched),
            _short(one.answer, searched),
            None if one.reference is None else _short(one.reference),
        )
        for one in (texts_of(messages or [], task) for messages, task in texts)
    ]


def texts_of(messages: Sequence[Message], task: str | None) -> Line:
    """The whole texts of one rollout. ``task``: its row as JSON."""
    first = next((n for n, one in enumerate(messages) if one["role"] == "assistant"), len(messages))
    prompt = next((one.get("content") for one in reversed(messages[:first]) if one["role"] == "user"), None)
    written = [one for one in messages[first:] if one["role"] == "assistant"]
    answer = ""
    if written:
        # In a file they are JSON.
        called: Any = loads(written[-1].get("tool_calls"))
        calls = "; ".join(_call(one) for one in called) if isinstance(called, list) else ""
        answer = written[-1].get("content") or calls
    fields = object_of(loads(task)) if task else {}
    reference = next((fields[name] for name in _REFERENCES if fields.get(name) not in (None, "")), None)
    if isinstance(reference, (dict, list)):
        reference = json.dumps(reference, ensure_ascii=False)
    return Line(prompt or "", answer, None if reference is None else str(reference))


def _call(call: Any) -> str:
    function = object_of(object_of(call).get("function"))
    return f"→ {function.get('name')}({json.dumps(function.get('arguments'), ensure_ascii=False)})"


def _short(text: str, searched: str = "") -> str:
    if (at := text.find(searched)) > _WIDEST // 2:
        text = "…" + text[at - _WIDEST // 4 :]
    line = " ".join(text[: 4 * _WIDEST].split())
    return line if len(line) <= _WIDEST else line[: _WIDEST - 1] + "…"
