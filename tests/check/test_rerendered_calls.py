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


@pytest.mark.parametrize("template", matrix.template_names())
def test_the_order_of_arguments_says_nothing(template: str) -> None:
    """Every shipped template that writes calls: reversed arguments are equal, other arguments are not."""
    one = written(template, ARGUMENTS)
    if one is None:
        pytest.skip("the template writes no calls")
    other = written(template, dict(reversed(ARGUMENTS.items())))
    changed = written(template, {**ARGUMENTS, "n": 4})
    assert other is not None
    assert changed is not None
    assert same_turn(one, other)
    assert not same_turn(one, changed)
