"""A tool call that a template writes in another order, or with other white space, still says the same."""

from __future__ import annotations

import pytest

from gymdata.checks.chat_text import same_turn
from tests.check import matrix

pytestmark = [pytest.mark.torch, pytest.mark.skipif(not matrix.template_names(), reason="TRL is not installed")]

ARGUMENTS = {"word": "a tree", "n": 3, "deep": {"x": [1, 2.5, None], "y": True}}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "n": {"type": "integer"}, "deep": {"type": "object"}},
        },
    },
}


def written(template: str, arguments: dict[str, object]) -> str | None:
    """What the template writes for a call with these arguments."""
    chat = matrix.family_chat(template, "bytes", keep_reasoning=False)
    call = {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    ids = chat.written_by_template({"role": "assistant", "content": "", "tool_calls": [call]}, [TOOL])
    text = None if ids is None else chat.decode(ids)
    return text if text is not None and "look_up" in text and "tree" in text else None


def test_the_order_of_arguments_says_nothing() -> None:
    """Every shipped template that writes calls: reversed arguments are equal, other arguments are not."""
    templates = {name: text for name in matrix.template_names() if (text := written(name, ARGUMENTS)) is not None}
    assert len(templates) > 30
    reversed_ = {name: written(name, dict(reversed(ARGUMENTS.items()))) for name in templates}
    assert [name for name, text in templates.items() if not same_turn(text, reversed_[name] or "")] == []
    changed = {name: written(name, {**ARGUMENTS, "n": 4}) for name in templates}
    assert [name for name, text in templates.items() if same_turn(text, changed[name] or text)] == []
