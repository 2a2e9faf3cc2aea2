"""Anthropic's messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import pydantic

from gymdata.commands.record.body import Body
from gymdata.commands.record.dialects import dialect
from gymdata.commands.record.dialects._wire import (
    Completing,
    Limit,
    Object,
    Objects,
    Stop,
    arguments_text,
    frame,
    function_tool,
    named_tool,
    one_text,
    own_tools,
    reminder,
    response_format,
    select,
    stored_messages,
)
from gymdata.commands.record.request import AgentCompletion, AgentRequest, ErrorKind, RequestError
from gymdata.formats.text.rows import text_of
from gymdata.rollouts.messages import JsonObject, Message, json_text, loads, object_of

#: Types of tools that Anthropic's servers run; others of its own are run by the client, and have no schema.
_HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset", "advisor_")
#: Claude Code's note to Anthropic's billing, which differs between requests; vLLM leaves it out, too.
_BILLING = "x-anthropic-billing-header"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ERRORS: Mapping[ErrorKind, str] = {
    "invalid": "invalid_request_error",
    "unsupported": "invalid_request_error",
    "authentication": "authentication_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "context": "invalid_request_error",
    "budget": "permission_error",
    "busy": "rate_limit_error",
    "upstream": "api_error",
    "internal": "api_error",
}


class _OutputConfig(Body):
    without_effect: ClassVar[Sequence[str]] = ("effort",)

    format: Object


class _Body(Completing):
    #: ``context_management``: the answer says that no edit was applied.
    without_effect: ClassVar[Sequence[str]] = (
        *("service_tier", "inference_geo", "cache_control", "thinking", "context_management", "diagnostics", "speed"),
        *("billing_policy", "user_profile_id", "workspace_id"),
    )
    unsupported: ClassVar[Sequence[str]] = (
        *("container", "mcp_servers", "compaction", "fallbacks", "fallback_credit_token", "thread"),
    )

    messages: Objects
    system: Annotated[
        list[JsonObject],
        pydantic.BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value),
        pydantic.Field(default_factory=list),
    ]
    tool_choice: Object
    output_config: Annotated[_OutputConfig, pydantic.Field(default_factory=lambda: _OutputConfig.of({}))]
    output_format: Object
    metadata: Object
    max_tokens: Limit = None
    stop_sequences: Stop
    top_k: Annotated[int | None, pydantic.Field(ge=-1)] = None


@dialect("messages")
class Messages:
    """Anthropic's messages, and the count of their tokens."""

    name = "messages"
    paths: Sequence[str] = ("/v1/messages",)
    count_paths: Sequence[str] = ("/v1/messages/count_tokens",)

    def read(self, body: JsonObject, headers: Mapping[str, str]) -> AgentRequest:
        fields = _Body.of(body)
        tools = own_tools(fields.tools, _HOSTED, "Anthropic", _own_tool)
        format = fields.output_config.format or fields.output_format
        messages = stored_messages(lambda: _chat(fields.messages, fields.system))
        if messages and messages[-1]["role"] == "assistant":
            problem = "got a begun answer, expected a message of the user last"
            raise RequestError.field(f"messages[{len(fields.messages) - 1}]", problem, "unsupported")
        # Claude Code's session: a header, or part of the user's id.
        user_id = object_of(loads(fields.metadata.get("user_id")))
        session = headers.get("x-claude-code-session-id") or user_id.get("session_id")
        return AgentRequest(
            model=fields.model,
            messages=messages,
            tools=tools or None,
            tool_choice=_choice(fields.tool_choice, tools),
            parallel_tool_calls=not fields.tool_choice.get("disable_parallel_tool_use", False),
            sampling=select(body, "temperature", "top_p", "top_k"),
            max_tokens=fields.max_tokens,
            stop=tuple(fields.stop_sequences),
            stream=fields.stream,
            response_format=response_format(format.get("type"), format.get("schema"), "output_config.format"),
            session_key=session if isinstance(session, str) and session else None,
            conversation_hint="sub-agent" if headers.get("x-claude-code-agent-id") else None,
            echo={"edits": body.get("context_management") is not None},
        )

    def write(self, request: AgentRequest, completion: AgentCompletion) -> JsonObject:
        content: list[JsonObject] = []
        if completion.reasoning:
            content.append({"type": "thinking", "thinking": completion.reasoning, "signature": completion.id})
        if completion.content:
            content.append({"type": "text", "text": completion.content})
        for call in completion.tool_calls:
            name, arguments = call["function"]["name"], object_of(loads(arguments_text(call)))
            content.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
        reason = _stop_reason(completion)
        return {
            "id": f"msg_{completion.id}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": completion.stop_sequence if reason == "stop_sequence" else None,
            "usage": {
                "input_tokens": len(completion.prompt_token_ids),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": len(completion.token_ids),
            },
            **({"context_management": {"applied_edits": []}} if request.echo["edits"] else {}),
        }

    def frames(self, request: AgentRequest, body: JsonObject) -> bytes:  # noqa: ARG002 - the port's signature
        begun = {name: value for name, value in body.items() if name != "context_management"}
        begun |= {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": body["usage"] | {"output_tokens": 0},
        }
        blocks = [event for index, block in enumerate(body["content"]) for event in _block_events(index, block)]
        end = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
        events: list[JsonObject] = [
            {"type": "message_start", "message": begun},
            {"type": "ping"},
            *blocks,
            {"type": "message_delta", "delta": end, **select(body, "usage", "context_management")},
            {"type": "message_stop"},
        ]
        return b"".join(frame(event, event["type"]) for event in events)

    def counted(self, request: AgentRequest, n_tokens: int) -> JsonObject:
        original = {"context_management": {"original_input_tokens": n_tokens}}
        return {"input_tokens": n_tokens, **(original if request.echo["edits"] else {})}

    def error(self, error: RequestError) -> JsonObject:
        type_ = "overloaded_error" if error.status in (503, 529) else _ERRORS[error.kind]
        return {"type": "error", "error": {"type": type_, "message": error.message}}

    def failed(self, request: AgentRequest, error: RequestError) -> bytes:  # noqa: ARG002 - the port's signature
        return frame(self.error(error), "error")


def _block_events(index: int, block: JsonObject) -> list[JsonObject]:
    """The events of one block: it is opened, filled and closed."""
    kind = block["type"]
    if kind == "tool_use":
        empty, deltas = block | {"input": {}}, [{"type": "input_json_delta", "partial_json": json_text(block["input"])}]
    else:
        empty, deltas = block | {kind: ""}, [{"type": f"{kind}_delta", kind: block[kind]}]
    if kind == "thinking":
        empty["signature"] = ""
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
    return [
        {"type": "content_block_start", "index": index, "content_block": empty},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def _chat(messages: Sequence[JsonObject], system: Sequence[JsonObject]) -> list[Message]:
    """Messages with blocks as chat messages. As the API has it, messages of one role that follow each other are one."""
    own = [block for block in system if not str(block.get("text")).startswith(_BILLING)]
    chat: list[Message] = [{"role": "system", "content": text_of(own, "system")}] if own else []
    turns = list[tuple[str, str, list[JsonObject]]]()
    for n, message in enumerate(messages):
        role, content, where = message["role"], message["content"], f"messages[{n}]"
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if role == "system" and turns:
            role, blocks = "user", [{"type": "text", "text": reminder(text_of(content, where))}]
        if turns and turns[-1][0] == role:
            turns[-1][2].extend(blocks)
        else:
            turns.append((role, where, list(blocks)))
    for role, where, blocks in turns:
        chat += _reply(blocks, where) if role == "assistant" else _given(role, blocks, where)
    return chat


def _reply(blocks: Sequence[JsonObject], where: str) -> list[Message]:
    """What the model wrote; nothing where all of it is hidden."""
    reply, texts = Message(role="assistant"), list[JsonObject]()
    for block in blocks:
        kind = block["type"]
        if kind == "tool_use":
            call = {"id": block["id"], "function": {"name": block["name"], "arguments": block["input"]}}
            reply.setdefault("tool_calls", []).append(call)
        elif kind == "thinking":
            reply["reasoning"] = reply.get("reasoning", "") + block["thinking"]
        elif kind != "redacted_thinking":
            texts.append(block)
    if not texts and len(reply) == 1:
        return []
    return [reply | {"content": text_of(texts, where) if texts else None}]


def _given(role: str, blocks: Sequence[JsonObject], where: str) -> list[Message]:
    """Results of tools, which are messages of their own, and then the text."""
    results = [block for block in blocks if block["type"] == "tool_result"]
    texts = [block for block in blocks if block["type"] != "tool_result"]
    chat: list[Message] = [
        {
            "role": "tool",
            "tool_call_id": result["tool_use_id"],
            "content": text_of(one_text(result.get("content")), where),
        }
        for result in results
    ]
    return [*chat, {"role": role, "content": text_of(one_text(texts), where)}] if texts else chat


def _own_tool(tool: JsonObject, where: str) -> list[JsonObject]:
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise RequestError.field(f"{where}.type", f"{kind!r:.80} is not supported", "unsupported")
    return [function_tool(tool, where, "input_schema")]


def _choice(choice: JsonObject, tools: Sequence[JsonObject]) -> str | Mapping[str, str]:
    kind = str(choice.get("type", "auto" if tools else "none"))
    if kind == "tool":
        return named_tool(choice.get("name"), tools, "tool_choice.name")
    if kind == "any" and not tools:
        raise RequestError.field("tool_choice.type", "'any' needs tools")
    if kind not in _CHOICES:
        raise RequestError.field("tool_choice.type", f"got {kind!r:.80}, expected one of tool, {', '.join(_CHOICES)}")
    return _CHOICES[kind]


def _stop_reason(completion: AgentCompletion) -> str:
    if completion.finish_reason == "length":
        return "max_tokens"
    if completion.tool_calls:
        return "tool_use"
    return "end_turn" if completion.stop_sequence is None else "stop_sequence"
