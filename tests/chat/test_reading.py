"""A message that is read while its ids come has what all of its ids have, and says nothing too early."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from gymdata.chat.template import TransformersChat
from tests.chat.chats import CALLED, POLICY, TOOL, known_chat

pytestmark = pytest.mark.torch

PARTS = st.lists(
    st.sampled_from(
        [
            *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "functools["),
            *("[", "\n", " ", "é", "😀"),
            *('{"name": "calc", "arguments": ', '{"expression": 4}', "}", "I will", " call it."),
            *("a < b", "<", "f", "<|im"),
        ]
    ),
    max_size=14,
).map("".join)
SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=6)


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


def streamed(chat: TransformersChat, ids: list[int], sizes: list[int]) -> tuple[str, str]:
    """What a reading gives of ids that come in parts of these sizes."""
    reading, at, texts = chat.reading([TOOL]), 0, ["", ""]
    while at < len(ids):
        size = sizes[at % len(sizes)]
        for kind, text in enumerate(reading.feed(ids[at : at + size])):
            texts[kind] += text
        at += size
    return texts[0], texts[1]


@pytest.mark.parametrize("parser", ["auto", "none", "qwen3_5_think", *map(of_vllm, ("hermes", "llama3_json"))])
@given(text=PARTS, sizes=SIZES)
def test_what_is_read_early_begins_the_message(parser: str, text: str, sizes: list[int]) -> None:
    """However the ids are cut, reasoning and content that were given are the beginning of the message's."""
    chat = chat_of(parser)
    ids = chat.encode(text)
    message = chat.parse(ids, [TOOL])
    reasoning, content = streamed(chat, ids, sizes)
    assert str(message.get("reasoning") or "").startswith(reasoning)
    assert str(message["content"]).startswith(content)
    assert str(chat.parse(ids, [TOOL], calls=False)["content"]).startswith(content)


@pytest.mark.parametrize("parser", ["auto", of_vllm("hermes")])
def test_text_before_a_call_is_read_at_once_and_the_call_never(parser: str) -> None:
    """What comes before a call is there before the call is, and nothing of the call is text."""
    chat = chat_of(parser)
    call = chat.decode(chat.written_by_template({**CALLED, "content": ""}, [TOOL]) or [])
    reading = chat.reading([TOOL])
    assert reading.feed(chat.encode("<think>I need to add.</think>\n\n"))[0] == "I need to add."
    assert reading.feed(chat.encode("I will call"))[1] == "I will call"
    assert reading.feed(chat.encode(" it.\n"))[1] == " it."
    assert "".join(reading.feed([token])[1] for token in chat.encode(call)) == ""


def test_a_call_that_does_not_parse_leaves_the_reasoning_alone() -> None:
    """The text of a call that does not parse is content, after the content before it; reasoning stays reasoning."""
    chat = chat_of("auto")
    ids = chat.encode('<think>Hm.</think>\n\nI try.\n<tool_call>{"name": broken</tool_call>')
    message = chat.parse(ids, [TOOL])
    content = 'I try.\n<tool_call>{"name": broken</tool_call>'
    assert message == {"role": "assistant", "reasoning": "Hm.", "content": content}


def test_text_without_calls_is_read_as_it_comes() -> None:
    """A sign that could begin a call waits only until the next letter."""
    reading = chat_of("auto").reading(None)
    encode = chat_of("auto").encode
    assert [reading.feed(encode(text))[1] for text in ("1 <", " 2,", " é")] == ["1", " < 2,", " é"]
