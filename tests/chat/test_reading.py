"""Reasoning, text and calls of a message are told apart, also where a call does not parse."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

pytest.importorskip("transformers")

from gymdata.chat.template import TransformersChat
from tests.chat.chats import CALLED, POLICY, TOOL, known_chat

pytestmark = pytest.mark.torch


def of_vllm(parser: str) -> Any:
    """A parser of vLLM, which takes seconds to import: where the engine is."""
    return pytest.param(parser, marks=pytest.mark.engine)


@cache
def chat_of(parser: str) -> TransformersChat:
    if parser == "qwen3_5_think":
        return known_chat(parser)
    if parser not in ("auto", "none"):
        pytest.importorskip("vllm")
    return TransformersChat.load(POLICY, tool_parser=parser)


@pytest.mark.parametrize("parser", ["auto", of_vllm("hermes")])
def test_text_before_a_call_is_content_and_the_call_is_none(parser: str) -> None:
    """With the reasoning before it."""
    chat = chat_of(parser)
    ids = chat.written_by_template({**CALLED, "content": "I will call it."}, [TOOL]) or []
    message = chat.parse([*chat.encode("<think>I need to add.</think>\n\n"), *ids], [TOOL])
    assert (message["reasoning"], message["content"].strip()) == ("I need to add.", "I will call it.")
    assert len(message["tool_calls"]) == 1


def test_a_call_that_does_not_parse_leaves_the_reasoning_alone() -> None:
    """The text of a call that does not parse is content, after the content before it; reasoning stays reasoning."""
    chat = chat_of("auto")
    ids = chat.encode('<think>Hm.</think>\n\nI try.\n<tool_call>{"name": broken</tool_call>')
    message = chat.parse(ids, [TOOL])
    content = 'I try.\n<tool_call>{"name": broken</tool_call>'
    assert message == {"role": "assistant", "reasoning": "Hm.", "content": content}
