"""OpenAI's responses."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import pydantic

from gymdata.commands.record.body import Body
from gymdata.commands.record.dialects import dialect
from gymdata.commands.record.dialects._wire import (
    Completing,
    Limit,
    Object,
    Objects,
    OpenAI,
    arguments_text,
    frame,
    function_tool,
    logprob_items,
    one_text,
    openai_choice,
    own_tools,
    response_format,
    select,
    stored_messages,
)
from gymdata.commands.record.request import AgentCompletion, AgentRequest, RequestError
from gymdata.formats.conversion.importing import BadItem
from gymdata.formats.text.rows import text_of
from gymdata.rollouts.messages import JsonObject, Message, ResponseItem

#: Types of tools that OpenAI's servers run, or that a request names and no client answers.
_HOSTED = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search"),
    "programmatic_tool_calling",
)
_ID = "resp_"
_LOGPROBS = "message.output_text.logprobs"


class _Namespace(Body):
    """Codex's functions of one kind."""

    model_config = pydantic.ConfigDict(extra="ignore")

    name: str
    tools: Objects


class _Text(Body):
    without_effect: ClassVar[Sequence[str]] = ("verbosity",)

    format: Object


class _Body(Completing):
    without_effect: ClassVar[Sequence[str]] = (
        *("user", "service_tier", "safety_identifier", "client_metadata", "max_tool_calls", "stream_options"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    )
    unsupported: ClassVar[Sequence[str]] = (
        *("background", "conversation", "prompt", "context_management", "moderation", "logit_bias"),
    )

    input: Annotated[
        list[JsonObject],
        pydantic.BeforeValidator(
            lambda value: [{"role": "user", "content": value}] if isinstance(value, str) else value
        ),
        pydantic.Field(default_factory=list),
    ]
    instructions: str | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    max_output_tokens: Limit = None
    top_logprobs: Annotated[int, pydantic.Field(ge=0, le=20)] = 0
    include: Annotated[list[Any], pydantic.Field(default_factory=list)]
    text: Annotated[_Text, pydantic.Field(default_factory=lambda: _Text.of({}))]
    previous_response_id: str | None = None
    metadata: Object
    reasoning: Object
    store: bool = True
    truncation: Literal["disabled"] = "disabled"


@dialect("responses")
class Responses(OpenAI):
    """OpenAI's responses: text, reasoning and function calls, also of Codex's namespaces."""

    name = "responses"
    paths: Sequence[str] = ("/v1/responses",)
    count_paths: Sequence[str] = ("/v1/responses/input_tokens",)

    def read(self, body: JsonObject, headers: Mapping[str, str]) -> AgentRequest:
        fields = _Body.of(body)
        tools = _tools(fields.tools)
        format = fields.text.format
        top, previous = fields.top_logprobs, fields.previous_response_id
        return AgentRequest(
            model=fields.model,
            messages=stored_messages(lambda: _chat(fields.input, fields.instructions)),
            tools=tools or None,
            tool_choice=openai_choice(fields.tool_choice, "name", tools),
            parallel_tool_calls=fields.parallel_tool_calls,
            sampling=select(body, "temperature", "top_p"),
            max_tokens=fields.max_output_tokens,
            stream=fields.stream,
            response_format=response_format(format.get("type"), format.get("schema"), "text.format"),
            logprobs=top if top or _LOGPROBS in fields.include else None,
            conversation_hint=headers.get("x-openai-subagent"),
            previous_id=previous.removeprefix(_ID) if previous else None,
            echo={
                "instructions": fields.instructions,
                "max_output_tokens": fields.max_output_tokens,
                "metadata": fields.metadata,
                "parallel_tool_calls": fields.parallel_tool_calls,
                "previous_response_id": previous,
                "reasoning": fields.reasoning,
                "store": fields.store,
                "temperature": fields.temperature,
                "text": {"format": format or {"type": "text"}},
                "tool_choice": fields.tool_choice or "auto",
                # Others may have a client's keys.
                "tools": [tool for tool in fields.tools if not str(tool["type"]).startswith(_HOSTED)],
                "top_p": fields.top_p,
            },
        )

    def write(self, request: AgentRequest, completion: AgentCompletion) -> JsonObject:
        cut = completion.finish_reason == "length"
        n_prompt, n_generated = len(completion.prompt_token_ids), len(completion.token_ids)
        return _response(request, completion.id, completion.created, "incomplete" if cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": _output(request, completion),
            "usage": {
                "input_tokens": n_prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": n_generated,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": n_prompt + n_generated,
            },
        }

    def frames(self, request: AgentRequest, body: JsonObject) -> bytes:  # noqa: ARG002 - the port's signature
        begun = body | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        items = [event for index, item in enumerate(body["output"]) for event in _item_events(index, item)]
        return _numbered(
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
            *items,
            {"type": f"response.{body['status']}", "response": body},
        )

    def failed(self, request: AgentRequest, error: RequestError) -> bytes:
        body = self.error(error)["error"]
        begun = _response(request, secrets.token_hex(12), int(time.time()), "in_progress")
        return _numbered(
            {"type": "response.created", "response": begun},
            {"type": "error", **{name: body[name] for name in ("code", "message", "param")}},
            {
                "type": "response.failed",
                "response": begun | {"status": "failed", "error": select(body, "code", "message")},
            },
        )


def _response(request: AgentRequest, id_: str, created: int, status: str) -> JsonObject:
    return {
        "id": f"{_ID}{id_}",
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": request.model,
        "output": [],
        "truncation": "disabled",
        "usage": None,
        **request.echo,
    }


def _output(request: AgentRequest, completion: AgentCompletion) -> list[JsonObject]:
    """Reasoning, text and calls, each an item. The last text of an answer that was cut is incomplete."""
    output: list[JsonObject] = []
    if completion.reasoning:
        thought = {"type": "reasoning_text", "text": completion.reasoning}
        output.append({"type": "reasoning", "summary": [], "content": [thought]})
    if completion.content or not completion.tool_calls:
        logprobs = logprob_items(completion.logprobs or ())
        part = {"type": "output_text", "text": completion.content, "annotations": [], "logprobs": logprobs}
        output.append({"type": "message", "role": "assistant", "content": [part]})
    spaces = {
        tool["name"]: space["name"]
        for space in request.echo["tools"]
        if space["type"] == "namespace"
        for tool in space["tools"]
    }
    for call in completion.tool_calls:
        name = call["function"]["name"]
        item = {"type": "function_call", "call_id": call["id"], "name": name, "arguments": arguments_text(call)}
        output.append(item | ({"namespace": spaces[name]} if name in spaces else {}))
    prefixes = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
    for number, item in enumerate(output):
        item |= {"id": f"{prefixes[item['type']]}_{completion.id}_{number}", "status": "completed"}
    if completion.finish_reason == "length" and not completion.tool_calls:
        output[-1]["status"] = "incomplete"
    return output


def _item_events(index: int, item: JsonObject) -> list[JsonObject]:
    """The events that announce an item of the output."""
    where = {"item_id": item["id"], "output_index": index}
    begun = item | {"status": "in_progress"}
    events: list[JsonObject]
    if item["type"] == "function_call":
        begun["arguments"], text = "", item["arguments"]
        kind = "response.function_call_arguments"
        events = [
            {"type": f"{kind}.delta", **where, "delta": text},
            {"type": f"{kind}.done", **where, "name": item["name"], "arguments": text},
        ]
    else:
        (part,) = item["content"]
        begun["content"], text, kind = [], part["text"], f"response.{part['type']}"
        where["content_index"] = 0
        unsaid: JsonObject = {"logprobs": []} if "logprobs" in part else {}
        events = [
            {"type": "response.content_part.added", **where, "part": part | {"text": "", **unsaid}},
            *([{"type": f"{kind}.delta", **where, "delta": text, **unsaid}] if text else []),
            {"type": f"{kind}.done", **where, "text": text, **unsaid},
            {"type": "response.content_part.done", **where, "part": part},
        ]
    return [
        {"type": "response.output_item.added", "output_index": index, "item": begun},
        *events,
        {"type": "response.output_item.done", "output_index": index, "item": item},
    ]


def _numbered(*events: JsonObject) -> bytes:
    return b"".join(frame({**event, "sequence_number": n}, event["type"]) for n, event in enumerate(events))


def _chat(items: Sequence[ResponseItem], instructions: str | None) -> list[Message]:
    """Messages of items: reasoning, text and calls that follow each other are one message of the assistant. A custom tool's
    text is the argument ``input`` of its call. Raises BadItem for an item that chat messages have no place for."""
    chat: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    for n, item in enumerate(items):
        kind, where = item.get("type", "message"), f"input[{n}]"
        if kind in ("function_call_output", "custom_tool_call_output"):
            result = text_of(one_text(item["output"]), where)
            chat.append({"role": "tool", "tool_call_id": item["call_id"], "content": result})
            continue
        if kind == "message" and item["role"] != "assistant":
            chat.append({"role": item["role"], "content": text_of(one_text(item["content"]), where)})
            continue
        reply = chat[-1] if chat and chat[-1]["role"] == "assistant" else Message(role="assistant", content=None)
        if kind == "message" and reply["content"] is None and "tool_calls" not in reply:
            reply["content"] = text_of(item["content"], where)
        elif kind == "message":
            reply = Message(role="assistant", content=text_of(item["content"], where))
        elif kind == "reasoning":
            if thought := text_of(item.get("content") or item.get("summary"), where):
                reply["reasoning"] = reply.get("reasoning", "") + thought
        elif kind in ("function_call", "custom_tool_call"):
            arguments = item["arguments"] if kind == "function_call" else json.dumps({"input": item["input"]})
            call = {"id": item["call_id"], "function": {"name": item["name"], "arguments": arguments}}
            reply.setdefault("tool_calls", []).append(call)
        else:
            raise BadItem("S102", f"{where}: got type {kind!r:.80}, which chat messages have no place for")
        if not chat or chat[-1] is not reply:
            chat.append(reply)
    return [message for message in chat if len(message) > 2 or message["content"] is not None]


def _tools(client_tools: Sequence[JsonObject]) -> list[JsonObject]:
    tools = own_tools(client_tools, _HOSTED, "OpenAI", _functions)
    names = [tool["function"]["name"] for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError.field("tools", f"{twice!r} is there twice, in different namespaces", "unsupported")
    return tools


def _functions(tool: JsonObject, where: str) -> list[JsonObject]:
    """A function, or those of a namespace."""
    if tool.get("type") != "namespace":
        return [_function(tool, where)]
    tools = _Namespace.of(tool, where).tools
    return [_function(function, f"{where}.tools[{n}]") for n, function in enumerate(tools)]


def _function(tool: JsonObject, where: str) -> JsonObject:
    if tool.get("type") != "function":
        raise RequestError.field(f"{where}.type", f"{tool.get('type')!r:.80} is not supported", "unsupported")
    return function_tool(tool, where)
