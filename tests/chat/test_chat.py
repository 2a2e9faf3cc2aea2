"""Chat templates: rendering, bridges that are proved, and reading what a model wrote."""

from __future__ import annotations

import re
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")


from gymdata.chat.template import TransformersChat
from gymdata.errors import DataError, RefusedError, UsageError
from gymdata.rollouts.next_prompt import next_prompt
from tests.chat.chats import (
    ANSWER,
    CALL,
    CALLED,
    POLICY,
    TOOL,
    USER,
    eos_of,
    known_chat,
    known_templates,
    with_template,
)

pytestmark = pytest.mark.torch


@cache
def loaded() -> TransformersChat:
    return TransformersChat.load(POLICY)


@pytest.fixture
def chat() -> TransformersChat:
    return loaded()


@pytest.mark.parametrize("template", known_templates(), ids=lambda p: p.stem)
def test_bridges_of_known_templates_are_what_the_template_writes(template):
    """For every template that TRL ships: held ids ++ bridge are the rendered conversation, or it is refused."""
    chat = with_template(template.read_text(), eos_of(template.stem))
    for said, new in (
        ({"role": "assistant", "content": "nine"}, {"role": "user", "content": "more"}),
        (CALLED, ANSWER),
    ):
        try:
            bridge = chat.bridge([USER, said], [new], [TOOL])
        except (DataError, RefusedError):
            continue
        prompt = chat.render([USER], [TOOL])
        whole = chat.render([USER, said, new], [TOOL])
        assert whole[-len(bridge) :] == bridge
        assert whole[-len(bridge) - 1] in chat.stop_token_ids
        assert new["content"] in chat.decode(bridge)
        assert said["content"] == "" or said["content"] not in chat.decode(bridge)
        held = next_prompt([*prompt, 50], bridge, chat.end_of_turn_ids)
        assert held == [*prompt, 50, chat.end_of_turn_ids[0], *bridge]


@pytest.mark.parametrize(
    ("name", "first", "parser"),
    [
        ("qwen2_5", "<|im_end|>", "trl:qwen3"),
        ("qwen3", "<|im_end|>", "trl:qwen3"),
        ("llama3_1", "<|eot_id|>", "trl:llama3"),
        ("gptoss", "<|end|>", "trl:gptoss"),
        ("glm4moe", "<|user|>", "trl:glm4moe"),
        ("phi3", "<|end|>", "none"),
        ("cohere2", "<|END_OF_TURN_TOKEN|>", "none"),
        ("gemma3", "<end_of_turn>", "none"),
    ],
)
def test_end_of_turn_and_parser_of_known_families(name, first, parser):
    """The token that closes a turn is the template's own, and calls are read by what reads them back."""
    chat = known_chat(name)
    assert chat.decode(chat.end_of_turn_ids[:1]) == first
    assert chat.facts()["tool_parser"] == parser


def test_a_template_that_strips_reasoning_is_replaced_or_refused():
    """Qwen3's template rewrites history: its prefix-preserving form is used, and the facts name both."""
    known = known_chat("qwen3")
    facts = known.facts()
    assert facts["chat_template_replaced"]
    assert facts["chat_template_hash"] != facts["served_chat_template_hash"]
    changed = with_template(known.served_template + "{# edited, so nobody knows it #}", eos_of("qwen3"))
    assert not changed.keeps_history()
    with pytest.raises(RefusedError, match="rewrites earlier messages"):
        changed.bridge([USER, {"role": "assistant", "content": "a"}], [{"role": "user", "content": "b"}], None)


def test_a_template_that_drops_tool_messages_is_refused():
    """New messages that a template leaves out would be lost in silence."""
    text = (
        "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = with_template(text, ["<|im_end|>"])
    with pytest.raises(RefusedError, match="leaves out a message"):
        chat.bridge([USER, CALLED], [ANSWER], [TOOL])


def test_messages_that_a_template_refuses_change_no_others():
    """A call whose arguments are no object is refused, before and after which a good one is written alike."""
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% for key, value in c.function.arguments | items %}{{ key }}={{ value }}{% endfor %}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = with_template(text, ["<|im_end|>"])
    written = chat.render([USER, CALLED], [TOOL])
    broken = {**CALLED, "tool_calls": [{**CALL, "function": {"name": "calc", "arguments": '{"expression": '}}]}
    with pytest.raises(DataError, match="arguments of a call are not a JSON object"):
        chat.render([USER, broken], [TOOL])
    assert chat.render([USER, CALLED], [TOOL]) == written


def test_a_template_that_recurses_without_end_is_an_error_of_the_template(policy):
    """Python's own limit ends it, and the error names the conversation."""
    chat = TransformersChat.load(policy)
    chat.tokenizer.chat_template = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"
    with pytest.raises(DataError, match=r"the chat template refuses a conversation of \(user\)"):
        chat.render([{"role": "user", "content": "q"}], None)


def test_the_bridge_does_not_depend_on_what_was_said(chat):
    """Whatever the model wrote, the environment's ids are the same, the first time and later."""
    first = chat.bridge([USER, CALLED], [ANSWER], [TOOL])
    other = {**CALLED, "content": "<|im_end|> odd <tool_call>", "reasoning": "because"}
    assert chat.bridge([USER, other], [ANSWER], [TOOL]) == first == chat.bridge([USER, CALLED], [ANSWER], [TOOL])


def test_special_tokens_in_a_tool_answer_stay_in_the_bridge(chat):
    """An end-of-turn mark inside a tool's answer does not move the cut."""
    odd = {**ANSWER, "content": "x<|im_end|>y"}
    bridge = chat.bridge([USER, CALLED], [odd], [TOOL])
    assert chat.decode(bridge).lstrip("\n").startswith("<|im_start|>tool")


def test_a_call_is_read_from_ids(chat):
    """What the template writes for a call reads back as that call, with an id that repeats."""
    ids = chat.written_by_template(CALLED, [TOOL])
    message = chat.parse(ids, [TOOL])
    (call,) = message["tool_calls"]
    assert call["function"] == CALL["function"]
    assert re.fullmatch(r"[a-z0-9]{9}", call["id"])
    assert chat.parse(ids, [TOOL]) == message == chat.parse(ids[:-1], [TOOL])


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_5_think", "llama3_1", "glm4moe", "gptoss", "lfm2_2_5", "gemma4"])
def test_calls_of_known_families_are_read_back(name):
    """Each family's calls are read from what its template writes."""
    chat = known_chat(name)
    ids = chat.written_by_template(CALLED, [TOOL])
    assert [c["function"] for c in chat.parse(ids, [TOOL])["tool_calls"]] == [CALL["function"]]


@pytest.mark.parametrize("rest", ['{"a": 4}', '"{\\"a\\": 4}"', '{"a": 4}, "arguments": null'])
def test_parameters_are_arguments(chat, rest: str) -> None:
    """A call as Llama 3 writes it keeps what it was called with."""
    message = chat.parse(chat.encode(f'<tool_call>\n{{"name": "calc", "parameters": {rest}}}\n</tool_call>'), [TOOL])
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "calc", "arguments": {"a": 4}}]


@pytest.mark.engine
def test_vllm_parsers_are_known_by_name():
    """--tool-parser NAME uses vLLM's parser, and a wrong name says which there are."""
    pytest.importorskip("vllm")
    hermes = TransformersChat.load(POLICY, tool_parser="hermes")
    assert [c["function"] for c in hermes.parse(hermes.written_by_template(CALLED, [TOOL]), [TOOL])["tool_calls"]] == [
        CALL["function"]
    ]
    with pytest.raises(UsageError, match="hermes"):
        TransformersChat.load(POLICY, tool_parser="hermess")


ODD = st.one_of(
    st.text(max_size=40),
    st.lists(
        st.sampled_from(
            [
                *("<tool_call>", "</tool_call>", "<think>", "</think>"),
                *('{"name": "calc", "arguments": ', '{"expression": 4}', "}"),
            ]
        ),
        max_size=12,
    ).map("".join),
)


@given(ODD)
def test_no_text_makes_parsing_raise(text):
    """A model may write anything: there is always a message, and it holds no special token."""
    chat = loaded()
    message = chat.parse(chat.encode(text), [TOOL])
    assert message["role"] == "assistant"
    assert isinstance(message["content"], str)
    assert "<|im_end|>" not in message["content"]


@pytest.mark.parametrize(
    "arguments", ['{"a": 99999999999999999999999}', '{"a": "\\ud800"}', '{"a": ' + "[" * 260 + "]" * 260 + "}"]
)
def test_a_call_that_no_file_could_hold_is_text(chat, arguments: str) -> None:
    """Numbers beyond 64 bits, lone surrogates and endless nesting: the message keeps what was written, and has no call."""
    text = f'<tool_call>\n{{"name": "calc", "arguments": {arguments}}}\n</tool_call>'
    message = chat.parse(chat.encode(text), [TOOL])
    assert "tool_calls" not in message
    assert message["content"] == text


@given(st.lists(st.integers(0, 150), max_size=40))
def test_no_ids_make_parsing_raise(ids):
    """Any ids at all give a message."""
    assert loaded().parse(ids, None)["role"] == "assistant"


def test_another_template_is_named_in_the_facts(tmp_path):
    """--chat-template takes a file or text; the facts keep the hash of the model's own beside it."""
    file = tmp_path / "t.jinja"
    text = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    file.write_text(text)
    one, two = (TransformersChat.load(POLICY, chat_template=t).facts() for t in (str(file), text))
    own = TransformersChat.load(POLICY).facts()
    assert one == two
    assert one["served_chat_template_hash"] == own["chat_template_hash"] != one["chat_template_hash"]
    with pytest.raises(DataError, match="no such file"):
        TransformersChat.load(POLICY, chat_template=str(tmp_path / "missing.jinja"))


def test_what_is_missing_is_named(tmp_path):
    """A folder without a tokenizer, and a conversation that the template refuses, are errors that say so."""
    with pytest.raises(DataError, match="no tokenizer"):
        TransformersChat.load(str(tmp_path))
    with pytest.raises(UsageError, match="has none"):
        loaded().bridge([USER], [USER], None)
    with pytest.raises(DataError, match=r"refuses a conversation of \(user\)"):
        with_template("{% if messages|length < 2 %}{{ 1 + 'a' }}{% endif %}", ["<|im_end|>"]).render([USER], None)
