"""Anthropic's messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from gymdata.commands.record.dialects import dialect
from gymdata.commands.record.dialects._wire import (
    Body,
    Fields,
    arguments_text,
    frame,
    function_tool,
    named_tool,
    one_text,
    reminder,
    response_format,
    retry_header,
    stored_messages,
)
from gymdata.commands.record.request import AgentCompletion, AgentRequest, CompletionDelta, ErrorKind, RequestError
from gymdata.formats.text.rows import text_of
from gymdata.rollouts.messages import JsonObject, Message, loads, object_of

#: ``context_management``: the answer says that no edit was applied.
_WITHOUT_EFFECT = (
    *("service_tier", "inference_geo", "cache_control", "thinking", "context_management", "diagnostics", "speed"),
    *("billing_policy", "user_profile_id", "workspace_id"),
)
_REFUSED = ("container", "mcp_servers", "compaction", "fallbacks", "fallback_credit_token", "thread")
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


@dialect("messages")
class Messages:
    """Anthropic's messages, and the count of their tokens."""

    name = "messages"
    paths: tuple[str, ...] = ("/v1/messages",)
    count_paths: tuple[str, ...] = ("/v1/messages/count_tokens",)

    def parse(self, body: Body, headers: Mapping[str, str]) -> AgentRequest:
        fields = Fields(body, without_effect=_WITHOUT_EFFECT, refused=_REFUSED)
        messages = fields.listed("messages")
        system = fields.take("system", (str, list), "text or blocks of text")
        tools = _tools(fields.listed("tools"))
        choice = fields.section("tool_choice")
        output = Fields(fields.section("output_config"), "output_config.", without_effect=["effort"])
        format = output.section("format") or fields.section("output_format")
        output.refuse_rest()
        read = stored_messages(lambda: _chat(messages, system))
        if read and read[-1]["role"] == "assistant":
            begun = "got a begun answer, expected a message of the user last"
            raise RequestError.field(f"messages[{len(messages) - 1}]", begun, "unsupported")
        # Claude Code's session: a header, or part of the user's id.
        user_id = object_of(loads(fields.section("metadata").get("user_id")))
        session = headers.get("x-claude-code-session-id") or user_id.get("session_id")
        request = AgentRequest(
            model=fields.text("model") or "",
            messages=read,
            tools=tools or None,
            tool_choice=_choice(choice, tools),
            parallel_tool_calls=not choice.get("disable_parallel_tool_use", False),
            sampling=fields.sampling("temperature", "top_p", "top_k"),
            max_tokens=fields.integer("max_tokens", 1),
            stop=fields.stop("stop_sequences"),
            stream=fields.flag("stream"),
            response_format=response_format(format.get("type"), format.get("schema"), "output_config.format"),
            session_key=session if isinstance(session, str) and session else None,
            conversation_hint="sub-agent" if headers.get("x-claude-code-agent-id") else None,
            body={"context_management": body.get("context_management") is not None},
        )
        fields.refuse_rest()
        return request

    def response(self, request: AgentRequest, completion: AgentCompletion) -> JsonObject:
        content: list[JsonObject] = []
        if completion.reasoning:
            content.append({"type": "thinking", "thinking": completion.reasoning, "signature": completion.id})
        if completion.content:
            content.append({"type": "text", "text": completion.content})
        content += [_call(call) | {"input": object_of(call["function"]["arguments"])} for call in completion.tool_calls]
        return _message(request, completion.id) | {
            "content": content,
            **_end(completion),
            "usage": _usage(completion.n_prompt_tokens, completion),
            **_edits(request),
        }

    async def events(self, request: AgentRequest, deltas: AsyncIterator[CompletionDelta]) -> AsyncIterator[bytes]:
        blocks: _Blocks | None = None
        try:
            async for delta in deltas:
                if blocks is None:
                    blocks = _Blocks()
                    start = _message(request, delta.id) | {"usage": _usage(delta.n_prompt_tokens)}
                    yield _frame("message_start", message=start)
                    yield _frame("ping")
                for event in blocks.of(delta):
                    yield event
                if (end := delta.end) is not None:
                    usage = _usage(end.n_prompt_tokens, end)
                    yield _frame("message_delta", delta=_end(end), usage=usage, **_edits(request))
                    yield _frame("message_stop")
        except RequestError as error:
            yield frame(self.error(error.status, error.kind, error.message)[2], "error")

    def counted(self, request: AgentRequest, n_tokens: int) -> JsonObject:
        original = {"context_management": {"original_input_tokens": n_tokens}}
        return {"input_tokens": n_tokens, **(original if request.body.get("context_management") else {})}

    def error(
        self,
        status: int,
        kind: ErrorKind,
        message: str,
        retry_after: float | None = None,
        where: str | None = None,  # noqa: ARG002 - the port's signature: the message names the place
    ) -> tuple[int, dict[str, str], JsonObject]:
        type_ = "overloaded_error" if status in (503, 529) else _ERRORS[kind]
        body = {"type": "error", "error": {"type": type_, "message": message}}
        return status, retry_header(retry_after), body


class _Blocks:
    """The blocks of one stream: each is opened, filled and closed before the next one."""

    def __init__(self) -> None:
        self._index = -1
        #: The open block's type.
        self._open: str | None = None

    def of(self, delta: CompletionDelta) -> Iterator[bytes]:
        for kind, text in (("thinking", delta.reasoning), ("text", delta.content)):
            if text:
                if self._open != kind:
                    yield from self._close(delta.id)
                    empty = {"signature": ""} if kind == "thinking" else {}
                    yield from self._start({"type": kind, kind: "", **empty})
                yield self._delta({"type": f"{kind}_delta", kind: text})
        for call in delta.tool_calls:
            yield from self._close(delta.id)
            yield from self._start(_call(call) | {"input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": arguments_text(call)})
        if delta.end is not None:
            yield from self._close(delta.id)

    def _start(self, block: JsonObject) -> Iterator[bytes]:
        self._index, self._open = self._index + 1, block["type"]
        yield _frame("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: JsonObject) -> bytes:
        return _frame("content_block_delta", index=self._index, delta=delta)

    def _close(self, signature: str) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": signature})
        if self._open is not None:
            yield _frame("content_block_stop", index=self._index)
        self._open = None


def _frame(event: str, **fields: Any) -> bytes:
    return frame({"type": event, **fields}, event)


def _chat(messages: Sequence[JsonObject], system: Any) -> list[JsonObject]:
    if isinstance(system, list):
        system = [block for block in system if not str(block.get("text")).startswith(_BILLING)]
    turns: list[JsonObject] = []
    for message in messages:
        role, content = message["role"], message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if role == "system" and turns:
            role, blocks = "user", [{"type": "text", "text": reminder(text_of(content, "messages"))}]
        if turns and turns[-1]["role"] == role:
            # As the API has it: messages of one role that follow each other are one.
            turns[-1]["content"] = [*turns[-1]["content"], *blocks]
        else:
            turns.append({"role": role, "content": blocks})
    return _chat_messages([turn if turn["role"] == "assistant" else _lines(turn) for turn in turns], system)


def _chat_messages(messages: Sequence[JsonObject], system: Any) -> list[Message]:
    """Messages with blocks: results of tools become messages of their own, thinking is reasoning."""
    chat: list[Message] = [{"role": "system", "content": text_of(system, "system")}] if system else []
    for n, message in enumerate(messages):
        role, content, where = message["role"], message["content"], f"messages[{n}]"
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        texts, reply = list[Any](), Message(role=role)
        for block in blocks:
            kind = block["type"]
            if kind == "tool_result" and role == "user":
                result = text_of(block.get("content"), where)
                chat.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": result})
            elif kind == "tool_use" and role == "assistant":
                call = {"id": block["id"], "function": {"name": block["name"], "arguments": block["input"]}}
                reply.setdefault("tool_calls", []).append(call)
            elif kind == "thinking" and role == "assistant":
                reply["reasoning"] = reply.get("reasoning", "") + block["thinking"]
            elif kind != "redacted_thinking":
                texts.append(block)
        if texts or len(reply) > 1:
            chat.append(reply | {"content": text_of(texts, where) if texts else None})
    return chat


def _lines(message: JsonObject) -> JsonObject:
    """The message with its texts as one, a line each."""
    blocks = [
        block | {"content": one_text(block["content"])}
        if block.get("type") == "tool_result" and "content" in block
        else block
        for block in message["content"]
    ]
    return message | {"content": one_text(blocks)}


def _tools(client_tools: Sequence[Any]) -> list[JsonObject]:
    """The client's tools. Those of Anthropic's servers are left out beside others, for a model is free not to call them."""
    tools = []
    hosted = None
    for n, tool in enumerate(client_tools):
        where = f"tools[{n}]"
        if not isinstance(tool, dict):
            raise RequestError.field(where, f"got {tool!r:.80}, expected a tool")
        kind = str(tool.get("type") or "custom")
        if kind == "custom":
            tools.append(function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"), where))
        elif kind.startswith(_HOSTED) and not hosted:
            hosted = f"{where}.type: {kind!r}"
        elif not kind.startswith(_HOSTED):
            raise RequestError.field(f"{where}.type", f"{kind!r} is not supported", "unsupported")
    if hosted and not tools:
        raise RequestError("unsupported", f"{hosted} needs Anthropic's servers", where=hosted.partition(":")[0])
    return tools


def _choice(choice: Body, tools: Sequence[Body]) -> str | Mapping[str, str]:
    kind = str(choice.get("type", "auto" if tools else "none"))
    if kind == "tool":
        return named_tool(choice.get("name"), tools, "tool_choice.name")
    if kind == "any" and not tools:
        raise RequestError.field("tool_choice.type", "'any' needs tools")
    if kind not in _CHOICES:
        raise RequestError.field("tool_choice.type", f"got {kind!r}, expected one of tool, {', '.join(_CHOICES)}")
    return _CHOICES[kind]


def _message(request: AgentRequest, id_: str) -> JsonObject:
    return {
        "id": f"msg_{id_}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _end(completion: AgentCompletion) -> JsonObject:
    reason = "end_turn"
    if completion.finish_reason == "length":
        reason = "max_tokens"
    elif completion.finish_reason == "tool_calls" or completion.tool_calls:
        reason = "tool_use"
    elif completion.stop_sequence is not None:
        reason = "stop_sequence"
    return {
        "stop_reason": reason,
        "stop_sequence": completion.stop_sequence if reason == "stop_sequence" else None,
    }


def _usage(n_prompt_tokens: int, completion: AgentCompletion | None = None) -> JsonObject:
    return {
        "input_tokens": n_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": completion.n_generated_tokens if completion else 0,
    }


def _call(call: Body) -> JsonObject:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _edits(request: AgentRequest) -> JsonObject:
    return {"context_management": {"applied_edits": []}} if request.body.get("context_management") else {}
