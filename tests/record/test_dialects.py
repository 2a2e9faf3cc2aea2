"""Requests of real clients become one form, and answers and streams have the form of each API, without the clients."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymdata.commands.record.dialects import DIALECTS
from gymdata.commands.record.request import AgentCompletion, AgentRequest, Dialect, RequestError, TokenLogprob

FIXTURES = Path(__file__).parent / "fixtures"  # requests as clients sent them
BY_PATH = {path: entry.object() for entry in DIALECTS for path in entry.object().paths}
CHAT, RESPONSES, MESSAGES = (DIALECTS[name].object() for name in ("chat", "responses", "messages"))
USER = {"role": "user", "content": "2+40?"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}


@dataclass(frozen=True)
class Reply:
    """What the model writes: each call is the name of a tool and its arguments."""

    content: str = ""
    reasoning: str | None = None
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    cut: bool = False
    stop_sequence: str | None = None


CALL = Reply("I add.", "It is a sum.", [("add", {"a": 1})])
#: Whose request it is: its roles by first letters, tools, calls, session and conversation.
CLIENTS: dict[str, tuple[str, int, list[str], str | None, str | None]] = {
    "anthropic": ("uat", 1, ["add"], None, None),
    "claude-code": ("suat", 24, ["Bash"], "00000000-0000-4000-8000-000000000009", None),
    "claude-code-sub-agent": ("suatu", 21, ["Bash"], "00000000-0000-4000-8000-000000000010", "sub-agent"),
    "codex": ("suuat", 12, ["exec_command"], None, None),
    "codex-sub-agent": ("suu", 7, [], None, "collab_spawn"),
    "litellm-chat": ("uat", 1, ["add"], None, None),
    "litellm-messages": ("uat", 1, ["add"], None, None),
    "mini-swe-agent": ("suat", 1, ["bash"], None, None),
    "openai-agents-chat": ("suat", 1, ["add"], None, None),
    "openai-agents-responses": ("suat", 1, ["add"], None, None),
    "openai-chat": ("uat", 1, ["add"], None, None),
    "openai-responses": ("uat", 1, ["add"], None, None),
    "opencode": ("suat", 10, ["bash"], None, None),
    "opencode-sub-agent": ("suat", 9, ["bash"], None, "sub-agent"),
    "opencode-title": ("suu", 0, [], None, None),
    "pi": ("suat", 4, ["bash"], None, None),
    "qwen-code": ("suauat", 15, ["run_shell_command"], None, None),
}


def fixture(name: str) -> tuple[Dialect, Mapping[str, Any], dict[str, str]]:
    saved = json.loads((FIXTURES / f"{name}.json").read_text())
    return BY_PATH[saved["path"].partition("?")[0]], saved["body"], saved["headers"]


def completion(request: AgentRequest, reply: Reply) -> AgentCompletion:
    """The reply as the completion of the request, a token per word."""
    words = reply.content.split(" ")
    calls = [
        {"id": f"call{n}", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
        for n, (name, arguments) in enumerate(reply.calls)
    ]
    logprobs = [TokenLogprob(word, -0.5, [(word, -0.5), ("other", -1.5)]) for word in words]
    return AgentCompletion(
        id="abc",
        created=1_700_000_000,
        content=reply.content,
        reasoning=reply.reasoning,
        tool_calls=calls,
        finish_reason="length" if reply.cut else "tool_calls" if calls else "stop",
        logprobs=None if request.logprobs is None else logprobs,
        stop_sequence=reply.stop_sequence,
        prompt_token_ids=list(range(12)),
        token_ids=list(range(len(words))),
    )


def events_of(content: bytes) -> list[tuple[str | None, Any]]:
    """(name, data) of each event."""
    events = []
    for text in content.decode().removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in text.split("\n"))
        data = fields["data"]
        events.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
    return events


def stream(dialect: Dialect, request: AgentRequest, reply: Reply) -> list[tuple[str | None, Any]]:
    return events_of(dialect.frames(request, dialect.write(request, completion(request, reply))))


def refused(dialect: Dialect, body: Mapping[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        dialect.read(body, {})
    return caught.value


def test_each_recorded_client_has_its_expectation() -> None:
    """No recorded request is left untested."""
    assert {file.stem for file in FIXTURES.glob("*.json")} == set(CLIENTS)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_request_of_a_real_client_is_read(name: str) -> None:
    """Its messages, tools, calls and names arrive in the form that rollouts store."""
    roles, n_tools, calls, session, conversation = CLIENTS[name]
    dialect, body, headers = fixture(name)
    request = dialect.read(body, headers)
    assert "".join(message["role"][0] for message in request.messages) == roles
    assert len(request.tools or ()) == n_tools
    named = [call for message in request.messages for call in message.get("tool_calls", ())]
    assert [call["function"]["name"] for call in named] == calls
    assert all(isinstance(call["function"]["arguments"], dict) for call in named)
    assert all(isinstance(message["content"], str) for message in request.messages)
    results = [message["tool_call_id"] for message in request.messages if message["role"] == "tool"]
    assert results == [call["id"] for call in named]
    assert (request.session_key, request.conversation_hint) == (session, conversation)


@pytest.mark.parametrize("name", CLIENTS)
def test_keys_of_clients_are_not_in_the_request(name: str) -> None:
    """Neither headers nor a tool that a client's servers run bring a key along."""
    dialect, body, headers = fixture(name)
    headers |= {"authorization": "Bearer secret-1", "x-api-key": "secret-2", "cookie": "secret-3"}
    if dialect.name in ("responses", "messages") and body.get("tools"):
        body = {**body, "tools": [*body["tools"], {"type": "mcp", "authorization": "secret-4"}]}
        body["tools"][-1]["type"] = {"responses": "mcp", "messages": "mcp_toolset"}[dialect.name]
    assert "secret" not in repr(dialect.read(body, headers))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from(["", "text", "function", "user", "system", "tool"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "text", "name"]), inner),
    max_leaves=4,
)


FIELD_NAMES = ["response_format", "text", "output_config", "tool_choice", "tools"]
FIELD_NAMES += ["metadata", "stream_options", "stop"]
FIELDS = st.dictionaries(
    st.sampled_from(FIELD_NAMES),
    st.dictionaries(st.sampled_from(["type", "format", "json_schema", "function", "name", "schema", "user_id"]), JSON)
    | st.lists(JSON, max_size=2),
    max_size=1,
)


@settings(max_examples=400)
@given(name=st.sampled_from(sorted(CLIENTS)), path=st.lists(st.integers(0, 40), max_size=8), value=JSON, more=FIELDS)
def test_a_body_with_anything_anywhere_is_read_or_refused(
    name: str, path: list[int], value: Any, more: dict[str, Any]
) -> None:
    """No other error than a request's leaves the reader, whatever JSON stands in the place of a part of a real request."""
    dialect, body, headers = fixture(name)
    body = {**body, **more}
    at: Any = body
    for step, index in enumerate(path):
        if not isinstance(at, (dict, list)) or not at:
            break
        key: Any = sorted(at)[index % len(at)] if isinstance(at, dict) else index % len(at)
        if step == len(path) - 1 or not isinstance(at[key], (dict, list)):
            at[key] = value
            break
        at = at[key]
    try:
        request = dialect.read(body, headers)
    except RequestError as error:
        assert error.message
    else:
        assert all(isinstance(message["content"], str) for message in request.messages)
        dialect.write(request, completion(request, Reply("x")))


def test_claude_codes_note_to_billing_is_no_prompt() -> None:
    """It may differ between requests of one conversation."""
    dialect, body, headers = fixture("claude-code")
    assert "billing" in body["system"][0]["text"]
    assert dialect.read(body, headers).messages[0]["content"].startswith("You are a Claude agent")


def test_parts_of_text_are_lines_unless_the_model_wrote_them() -> None:
    """As vLLM joins them for templates that take text."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}, USER]
    for dialect in (CHAT, MESSAGES):
        request = dialect.read({"model": "m", "messages": messages}, {})
        assert [message["content"] for message in request.messages] == ["a\nb", "ab", "2+40?"]


def test_a_later_system_message_is_the_users() -> None:
    """Most templates refuse it elsewhere than first; those that come first are one. Messages of one role are one for
    Anthropic's API."""
    system, late = {"role": "system", "content": "Be brief."}, {"role": "system", "content": "Now."}
    said = "<system-reminder>\nNow.\n</system-reminder>"
    request = CHAT.read({"messages": [system, system, USER, late]}, {})
    assert [message["content"] for message in request.messages] == ["Be brief.\n\nBe brief.", "2+40?", said]
    assert [message["role"] for message in request.messages] == ["system", "user", "user"]
    request = MESSAGES.read({"system": "Be brief.", "messages": [USER, late]}, {})
    assert [message["content"] for message in request.messages] == ["Be brief.", f"2+40?\n{said}"]
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "42"}]}
    use = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
    turns = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}, late]
    request = MESSAGES.read({"messages": turns}, {})
    assert [(message["role"], message["content"]) for message in request.messages[2:]] == [
        ("tool", "42"),
        ("user", said),
    ]


def test_reasoning_of_each_dialect_is_the_messages_reasoning() -> None:
    """Clients send back what they got."""
    chat = CHAT.read({"messages": [USER, {"role": "assistant", "content": "x", "reasoning_content": "why"}, USER]}, {})
    thinking = [{"type": "thinking", "thinking": "why", "signature": "s"}, {"type": "text", "text": "x"}]
    messages = MESSAGES.read({"messages": [USER, {"role": "assistant", "content": thinking}, USER]}, {})
    text = [{"type": "output_text", "text": "x"}]
    items = [
        USER,
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]},
        {"type": "message", "role": "assistant", "content": text},
        USER,
    ]
    responses = RESPONSES.read({"input": items}, {})
    answer = {"role": "assistant", "content": "x", "reasoning": "why"}
    assert [request.messages[1] for request in (chat, messages, responses)] == [answer] * 3


def test_parameters_go_by_the_names_of_the_engine() -> None:
    """Only those that the client sent."""
    body = {"messages": [USER], "temperature": 0, "top_p": 0.9, "seed": 3, "stop": "x", "max_completion_tokens": 7}
    request = CHAT.read(body, {})
    assert (request.sampling, request.stop, request.max_tokens) == (
        {"temperature": 0, "top_p": 0.9, "seed": 3}, ("x",), 7,
    )  # fmt: skip
    request = MESSAGES.read({"messages": [USER], "top_k": 4, "max_tokens": 5, "stop_sequences": ["a", "b"]}, {})
    assert (request.sampling, request.stop, request.max_tokens) == ({"top_k": 4}, ("a", "b"), 5)
    request = RESPONSES.read({"input": "hi", "max_output_tokens": 6, "previous_response_id": "resp_abc"}, {})
    assert (request.sampling, request.max_tokens, request.previous_id) == ({}, 6, "abc")


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, "auto"), ("required", "required"), ({"type": "function", "function": {"name": "add"}}, {"name": "add"})],
)
def test_the_choice_of_a_tool_is_read(given: Any, expected: Any) -> None:
    """In the words of each API."""
    assert CHAT.read({"messages": [USER], "tools": [TOOL], "tool_choice": given}, {}).tool_choice == expected
    flat = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    words = {"type": "function", "name": "add"} if isinstance(given, dict) else given
    assert RESPONSES.read({"input": "hi", "tools": [flat], "tool_choice": words}, {}).tool_choice == expected
    theirs = {"name": "add", "input_schema": SCHEMA}
    kind = {None: "auto", "required": "any"}.get(given) if not isinstance(given, dict) else "tool"
    choice = {"type": kind, "name": "add", "disable_parallel_tool_use": True}
    request = MESSAGES.read({"messages": [USER], "tools": [theirs], "tool_choice": choice}, {})
    assert (request.tool_choice, request.parallel_tool_calls) == (expected, False)


def test_json_schemas_are_one_format() -> None:
    """Each API names the schema elsewhere."""
    expected = {"type": "json_schema", "schema": SCHEMA}
    named = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    chat = {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": named}}
    assert CHAT.read(chat, {}).response_format == expected
    assert RESPONSES.read({"input": "hi", "text": {"format": named}}, {}).response_format == expected
    messages = {"messages": [USER], "output_config": {"format": named, "effort": "low"}}
    del messages["output_config"]["format"]["name"]  # type: ignore[index]
    assert MESSAGES.read(messages, {}).response_format == expected
    assert CHAT.read({"messages": [USER], "response_format": {"type": "text"}}, {}).response_format is None


@pytest.mark.parametrize(
    ("dialect", "field", "value", "kind", "where"),
    [
        (CHAT, "logit_bias", {"5": 1}, "unsupported", "logit_bias"),
        (CHAT, "modalities", ["text", "audio"], "unsupported", "modalities[1]"),
        (CHAT, "functions", [{"name": "f"}], "unsupported", "functions"),
        (CHAT, "no_such_field", 1, "unsupported", "no_such_field"),
        (CHAT, "n", 2, "unsupported", "n"),
        (CHAT, "temperature", True, "invalid", "temperature"),
        (CHAT, "top_logprobs", 2, "invalid", "top_logprobs"),
        (CHAT, "tool_choice", {"type": "function", "function": {"name": "x"}}, "invalid", "tool_choice.function.name"),
        (CHAT, "tools", [{"type": "custom", "custom": {"name": "x"}}], "unsupported", "tools[0]"),
        (CHAT, "messages", [], "invalid", "messages"),
        (CHAT, "messages", [{"role": "user", "content": [{"type": "image_url"}]}], "invalid", "messages[0].content"),
        (CHAT, "messages", [{"role": "robot", "content": "hi"}], "invalid", "messages[0].role"),
        (CHAT, "stream_options", {"odd": 1}, "unsupported", "stream_options.odd"),
        (RESPONSES, "background", True, "unsupported", "background"),
        (RESPONSES, "truncation", "auto", "unsupported", "truncation"),
        (RESPONSES, "tools", [{"type": "custom", "name": "x"}], "unsupported", "tools[0].type"),
        (RESPONSES, "tools", [{"type": "web_search"}], "unsupported", "tools[0].type"),
        (RESPONSES, "input", [{"type": "item_reference", "id": "x"}], "invalid", "input[0]"),
        (MESSAGES, "mcp_servers", [{"url": "x"}], "unsupported", "mcp_servers"),
        (MESSAGES, "tools", [{"type": "bash_20250124", "name": "bash"}], "unsupported", "tools[0].type"),
        (MESSAGES, "tools", [{"type": "web_search_20250305", "name": "w"}], "unsupported", "tools[0].type"),
        (MESSAGES, "temperature", -1, "invalid", "temperature"),
        (MESSAGES, "messages", [USER, {"role": "assistant", "content": "2+"}], "unsupported", "messages[1]"),
        (MESSAGES, "messages", [{"role": "user", "content": [{"type": "image"}]}], "invalid", "messages[0]"),
        (MESSAGES, "messages", [{"role": "user"}], "invalid", "messages"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(
    dialect: Dialect, field: str, value: Any, kind: str, where: str
) -> None:
    """The error says which field it was."""
    usual = {"input": "hi"} if dialect is RESPONSES else {"messages": [USER]}
    error = refused(dialect, {"model": "m", **usual, field: value})
    assert (error.kind, error.where) == (kind, where)
    assert where in error.message


def test_a_tool_of_the_apis_servers_is_left_out_beside_others() -> None:
    """A model is free not to call it; the answer lists the tools that it had."""
    flat = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    request = RESPONSES.read({"input": "hi", "tools": [{"type": "web_search"}, flat]}, {})
    assert request.tools == [TOOL]
    answer = RESPONSES.write(request, completion(request, CALL))
    assert answer["tools"] == [flat]
    theirs = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
    body = {"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "w"}, theirs]}
    assert MESSAGES.read(body, {}).tools == [TOOL]


def test_a_function_of_a_namespace_is_called_in_it() -> None:
    """Codex finds it by both names."""
    dialect, body, headers = fixture("codex")
    request = dialect.read(body, headers)
    reply = Reply(calls=[("spawn_agent", {"message": "hi"})])
    (item,) = dialect.write(request, completion(request, reply))["output"]
    assert (item["namespace"], item["name"]) == ("multi_agent_v1", "spawn_agent")


def test_a_stream_of_chat_completions_is_one_of_chunks() -> None:
    """Role, reasoning, content, calls by index, the reason of the end, the usage, and [DONE]."""
    body = {"messages": [USER], "tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}, "n": 1}
    request = CHAT.read(body, {})
    *chunks, done = [data for _, data in stream(CHAT, request, replace(CALL, calls=[("add", {"a": 1})] * 2))]
    assert done == "[DONE]"
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-abc"}
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert [next(iter(choice["delta"]), None) for choice in choices] == [
        "role", "reasoning_content", "content", "tool_calls", "tool_calls", None,
    ]  # fmt: skip
    assert [c["delta"]["tool_calls"][0]["index"] for c in choices if "tool_calls" in c["delta"]] == [0, 1]
    assert [choice["finish_reason"] for choice in choices] == [None] * 5 + ["tool_calls"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 6
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 12 + 2


def test_a_chat_completion_has_what_was_asked_for() -> None:
    """Log-probabilities with their alternatives, and ids as vLLM gives them."""
    body = {"messages": [USER], "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    request = CHAT.read(body, {})
    answer = CHAT.write(request, completion(request, Reply("two words", cut=True)))
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "two words", "refusal": None}
    assert [token["token"] for token in choice["logprobs"]["content"]] == ["two", "words"]
    assert choice["logprobs"]["content"][0]["bytes"] == [116, 119, 111]
    assert (choice["finish_reason"], choice["token_ids"], answer["prompt_token_ids"]) == (
        "length",
        [0, 1],
        [*range(12)],
    )


def test_a_streamed_response_announces_each_item_of_its_output() -> None:
    """Numbers go up by one, indexes are those of the output, and the end is what an answer without a stream has."""
    flat = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    request = RESPONSES.read({"input": "hi", "tools": [flat], "stream": True}, {})
    events = stream(RESPONSES, request, CALL)
    assert [name for name, _ in events] == [data["type"] for _, data in events]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    kinds = [name.removeprefix("response.") for name, _ in events if name is not None]
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [data["output_index"] for name, data in events if name == "response.output_item.done"] == [0, 1, 2]
    whole = RESPONSES.write(request, completion(request, CALL))
    assert events[-1][1]["response"] == whole
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    assert [data["item"] for name, data in events if name == "response.output_item.done"] == whole["output"]
    assert whole["usage"]["total_tokens"] == 14


def test_a_response_that_a_limit_cut_is_incomplete() -> None:
    """So is its last item, and the reason is named."""
    request = RESPONSES.read({"input": "hi", "stream": True}, {})
    name, data = stream(RESPONSES, request, Reply("He", cut=True))[-1]
    assert name == "response.incomplete"
    assert data["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert data["response"]["output"][0]["status"] == "incomplete"


def test_a_streamed_message_opens_and_closes_each_block() -> None:
    """Thinking is signed, the arguments of a call are JSON text, and the usage of the end counts what was written."""
    theirs = {"name": "add", "input_schema": SCHEMA}
    request = MESSAGES.read({"messages": [USER], "tools": [theirs], "stream": True}, {})
    events = stream(MESSAGES, request, CALL)
    assert [name for name, _ in events] == [data["type"] for _, data in events]
    assert [name for name, _ in events] == [
        "message_start", "ping",
        "content_block_start", *["content_block_delta"] * 2, "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[0][1]["message"]["usage"]["input_tokens"] == 12
    assert [data["index"] for name, data in events if name == "content_block_stop"] == [0, 1, 2]
    types = [data["delta"]["type"] for name, data in events if name == "content_block_delta"]
    assert types == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    assert json.loads(events[-4][1]["delta"]["partial_json"]) == {"a": 1}
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == 2
    answer = MESSAGES.write(request, completion(request, CALL))
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
    assert answer["content"][2]["input"] == {"a": 1}


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Reply("x"), ("end_turn", None)),
        (Reply("x", cut=True), ("max_tokens", None)),
        (Reply("x", stop_sequence="END"), ("stop_sequence", "END")),
        (CALL, ("tool_use", None)),
    ],
)
def test_a_message_says_why_it_ended(reply: Reply, expected: tuple[str, str | None]) -> None:
    """In Anthropic's words."""
    request = MESSAGES.read({"messages": [USER]}, {})
    answer = MESSAGES.write(request, completion(request, reply))
    assert (answer["stop_reason"], answer["stop_sequence"]) == expected


def test_no_edit_of_the_context_is_claimed() -> None:
    """Claude Code asks for them, and is told that none was applied."""
    dialect, body, headers = fixture("claude-code")
    request = dialect.read(body, headers)
    answer = dialect.write(request, completion(request, CALL))
    assert answer["context_management"] == {"applied_edits": []}
    assert dialect.counted(request, 5) == {"input_tokens": 5, "context_management": {"original_input_tokens": 5}}


def test_an_error_within_a_stream_is_the_dialects_own() -> None:
    """It ends the stream, which claims no end of the answer."""
    error = RequestError("upstream", "engine: connection refused", retry_after=2.5)

    def failed(dialect: Dialect, **body: Any) -> list[tuple[str | None, Any]]:
        return events_of(dialect.failed(dialect.read({**body, "stream": True}, {}), error))

    (_, chat), (_, done) = failed(CHAT, messages=[USER])
    assert (chat["error"]["message"], done) == ("engine: connection refused", "[DONE]")
    ((name, data),) = failed(MESSAGES, messages=[USER])
    assert (name, data["error"]) == ("error", {"type": "api_error", "message": "engine: connection refused"})
    (begun, _), (kind, data), (name, last) = failed(RESPONSES, input="hi")
    assert (begun, kind, data["code"], name) == ("response.created", "error", "upstream_error", "response.failed")
    assert last["response"]["error"] == {"code": "upstream_error", "message": "engine: connection refused"}
    assert last["sequence_number"] == data["sequence_number"] + 1


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, MESSAGES], ids=lambda d: d.name)
def test_an_error_says_when_to_come_again(dialect: Dialect) -> None:
    """In whole seconds, none too early."""
    error = RequestError("busy", "too many sessions", retry_after=1.2)
    assert (error.status, error.headers) == (429, {"retry-after": "2"})
    body = dialect.error(error)
    assert body["error"]["message"] == "too many sessions"
    assert body["error"]["type"] == "rate_limit_error"


def test_a_prompt_beyond_the_context_is_named_as_clients_know_it() -> None:
    """By it agents compact their history: OpenAI's code, and the beginning of Anthropic's message."""
    error = RequestError("context", "prompt is too long: 9 tokens > 8 maximum")
    for dialect in (CHAT, RESPONSES):
        assert dialect.error(error)["error"]["code"] == "context_length_exceeded"
    assert MESSAGES.error(error)["error"] == {"type": "invalid_request_error", "message": error.message}
