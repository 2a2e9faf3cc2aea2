"""OpenAI's responses."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from gymdata.commands.record.dialects import dialect
from gymdata.commands.record.dialects._wire import (
    Body,
    Fields,
    OpenAI,
    arguments_text,
    frame,
    function_tool,
    logprob_items,
    one_text,
    openai_choice,
    response_format,
    stored_messages,
)
from gymdata.commands.record.request import AgentCompletion, AgentRequest, CompletionDelta, RequestError
from gymdata.formats.conversion.importing import BadItem
from gymdata.formats.text.rows import text_of
from gymdata.rollouts.messages import JsonObject, Message, ResponseItem, object_of

_WITHOUT_EFFECT = (
    *("user", "service_tier", "safety_identifier", "client_metadata", "max_tool_calls", "stream_options"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
_REFUSED = ("background", "conversation", "prompt", "context_management", "moderation", "logit_bias")
#: Types of tools that OpenAI's servers run, or that a request names and no client answers.
_HOSTED = (
    *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search"),
    "programmatic_tool_calling",
)
_ID = "resp_"
_LOGPROBS = "message.output_text.logprobs"


@dialect("responses")
class Responses(OpenAI):
    """OpenAI's responses: text, reasoning and function calls, also of Codex's namespaces."""

    name = "responses"
    paths: tuple[str, ...] = ("/v1/responses",)
    count_paths: tuple[str, ...] = ("/v1/responses/input_tokens",)

    def parse(self, body: Body, headers: Mapping[str, str]) -> AgentRequest:
        fields = Fields(body, without_effect=_WITHOUT_EFFECT, refused=_REFUSED)
        fields.refuse("truncation", unless=("disabled",))
        items = fields.take("input", (str, list), "text or items")
        instructions = fields.text("instructions")
        listed_tools = fields.listed("tools")
        tools = _tools(listed_tools)
        top, include = fields.integer("top_logprobs", 0, 20), fields.listed("include")
        text = Fields(fields.section("text"), "text.", without_effect=["verbosity"])
        format = text.section("format")
        text.refuse_rest()
        previous = fields.text("previous_response_id")
        request = AgentRequest(
            model=fields.text("model") or "",
            messages=stored_messages(lambda: _chat(items, instructions)),
            tools=tools or None,
            tool_choice=openai_choice(fields.take("tool_choice", (str, dict), "text or an object"), "name", tools),
            parallel_tool_calls=fields.flag("parallel_tool_calls", True),
            sampling=fields.sampling("temperature", "top_p"),
            max_tokens=fields.integer("max_output_tokens", 1),
            stream=fields.flag("stream"),
            response_format=response_format(format.get("type"), format.get("schema"), "text.format"),
            logprobs=(top or 0) if top or _LOGPROBS in include else None,
            conversation_hint=headers.get("x-openai-subagent"),
            previous_id=previous.removeprefix(_ID) if previous else None,
            body={
                "instructions": instructions,
                "max_output_tokens": body.get("max_output_tokens"),
                "metadata": fields.section("metadata"),
                "previous_response_id": previous,
                "reasoning": fields.section("reasoning"),
                "store": fields.flag("store", True),
                "temperature": body.get("temperature"),
                "text": {"format": format or {"type": "text"}},
                "tool_choice": body.get("tool_choice") or "auto",
                "tools": [tool for tool in listed_tools if tool["type"] not in _HOSTED],
                "top_p": body.get("top_p"),
            },
        )
        fields.refuse_rest()
        return request

    def response(self, request: AgentRequest, completion: AgentCompletion) -> JsonObject:
        end = completion
        parts = (end.content, end.reasoning or "", end.tool_calls)
        delta = CompletionDelta(end.id, end.created, end.n_prompt_tokens, *parts, end)
        items = _Items(request)
        list(items.of(delta))
        return items.response(delta)

    async def events(self, request: AgentRequest, deltas: AsyncIterator[CompletionDelta]) -> AsyncIterator[bytes]:
        items, numbers, first = _Items(request), itertools.count(), None

        def framed(event: JsonObject) -> bytes:
            return frame({**event, "sequence_number": next(numbers)}, event["type"])

        try:
            async for delta in deltas:
                if first is None:
                    first = delta
                    for kind in ("response.created", "response.in_progress"):
                        yield framed({"type": kind, "response": items.response(delta)})
                for event in items.of(delta):
                    yield framed(event)
                if delta.end is not None:
                    response = items.response(delta)
                    yield framed({"type": f"response.{response['status']}", "response": response})
        except RequestError as error:
            body = self.error_of(error)["error"]
            yield framed({"type": "error", **{name: body[name] for name in ("code", "message", "param")}})
            if first is not None:
                failure = {"status": "failed", "error": {name: body[name] for name in ("code", "message")}}
                yield framed({"type": "response.failed", "response": items.response(first) | failure})


#: The event that an item's text has, and its part.
_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}


class _Items:
    """The output of one response, item by item, with the events that announce it."""

    def __init__(self, request: AgentRequest) -> None:
        self._request = request
        self._namespaces = {
            tool["name"]: space["name"]
            for space in request.body.get("tools", ())
            if space["type"] == "namespace"
            for tool in space["tools"]
        }
        self._output: list[JsonObject] = []
        #: The open item of text, which is the last of the output.
        self._open: JsonObject | None = None
        self._text = ""

    def of(self, delta: CompletionDelta) -> Iterator[JsonObject]:
        """The events of ``delta``, without their numbers."""
        for kind, text in (("reasoning", delta.reasoning), ("message", delta.content)):
            if text:
                yield from self._start(kind, delta.id)
                self._text += text
                yield self._event("delta", delta=text)
        for call in delta.tool_calls:
            yield from self._close("completed")
            yield from self._call(call, delta.id)
        if (end := delta.end) is not None:
            if not any(item["type"] in ("message", "function_call") for item in self._output):
                yield from self._start("message", delta.id)
            yield from self._close("incomplete" if end.finish_reason == "length" else "completed", end)

    def response(self, source: CompletionDelta) -> JsonObject:
        """The response as it is now; with its end it is complete."""
        end = source.end
        cut = end is not None and end.finish_reason == "length"
        usage = end and {
            "input_tokens": end.n_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": end.n_generated_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": end.n_prompt_tokens + end.n_generated_tokens,
        }
        return {
            "id": f"{_ID}{source.id}",
            "object": "response",
            "created_at": source.created,
            "status": "in_progress" if end is None else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self._request.model,
            "output": list(self._output) if end is not None else [],
            "parallel_tool_calls": self._request.parallel_tool_calls,
            "truncation": "disabled",
            "usage": usage,
            **self._request.body,
        }

    def _start(self, kind: str, response_id: str) -> Iterator[JsonObject]:
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._close("completed")
        more: JsonObject = {"role": "assistant"} if kind == "message" else {"summary": []}
        self._open = {
            "id": self._item_id(kind, response_id),
            "type": kind,
            "status": "in_progress",
            **more,
            "content": [],
        }
        self._output.append(self._open)
        yield self._item_event("added", self._open)
        yield self._part_event("added", "")

    def _close(self, status: str, end: AgentCompletion | None = None) -> Iterator[JsonObject]:
        if (item := self._open) is None:
            return
        yield self._event("done", text=self._text)
        done = self._part_event("done", self._text)
        if item["type"] == "message" and end is not None and self._request.logprobs is not None:
            done["part"]["logprobs"] = [logprob_items(token) for token in end.logprobs or ()]
        yield done
        item |= {"status": status, "content": [done["part"]]}
        yield self._item_event("done", item)
        self._open, self._text = None, ""

    def _call(self, call: Body, response_id: str) -> Iterator[JsonObject]:
        name, arguments = call["function"]["name"], arguments_text(call)
        space = {"namespace": self._namespaces[name]} if name in self._namespaces else {}
        id_ = self._item_id("function_call", response_id)
        item = {"id": id_, "type": "function_call", "call_id": call["id"], "name": name, **space}
        self._output.append(item)
        yield self._item_event("added", item | {"status": "in_progress", "arguments": ""})
        position = {"item_id": id_, "output_index": len(self._output) - 1}
        yield {"type": "response.function_call_arguments.delta", **position, "delta": arguments}
        yield {"type": "response.function_call_arguments.done", **position, "name": name, "arguments": arguments}
        item |= {"status": "completed", "arguments": arguments}
        yield self._item_event("done", item)

    def _item_id(self, kind: str, response_id: str) -> str:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        return f"{prefix}_{response_id}_{len(self._output)}"

    def _event(self, event: str, **fields: str) -> JsonObject:
        """An event of the open item's text."""
        assert self._open is not None
        kind = _PARTS[self._open["type"]]
        more: JsonObject = {"logprobs": []} if kind == "output_text" else {}
        position = {"item_id": self._open["id"], "output_index": len(self._output) - 1, "content_index": 0}
        return {"type": f"response.{kind}.{event}", **position, **fields, **more}

    def _part_event(self, event: str, text: str) -> JsonObject:
        position = self._event(event)
        kind = _PARTS["message" if "logprobs" in position else "reasoning"]
        more: JsonObject = {"annotations": [], "logprobs": position.pop("logprobs")} if "logprobs" in position else {}
        part = {"type": kind, "text": text, **more}
        return position | {"type": f"response.content_part.{event}", "part": part}

    def _item_event(self, event: str, item: JsonObject) -> JsonObject:
        return {"type": f"response.output_item.{event}", "output_index": len(self._output) - 1, "item": dict(item)}


def _chat(items: Any, instructions: str | None) -> list[JsonObject]:
    listed = [{"role": "user", "content": items}] if isinstance(items, str) else [_lines(item) for item in items or ()]
    return [*([{"role": "system", "content": instructions}] if instructions else ()), *_chat_messages(listed)]


def _chat_messages(items: Sequence[ResponseItem]) -> list[Message]:
    """Messages of items: reasoning, text and calls that follow each other are one message of the assistant. A custom tool's
    text is the argument ``input`` of its call. Raises BadItem for an item that chat messages have no place for."""
    chat: list[Message] = []
    for n, item in enumerate(items):
        kind, where = item.get("type", "message"), f"item {n}"
        if kind in ("function_call_output", "custom_tool_call_output"):
            chat.append({"role": "tool", "tool_call_id": item["call_id"], "content": text_of(item["output"], where)})
            continue
        if kind == "message" and item["role"] != "assistant":
            chat.append({"role": item["role"], "content": text_of(item["content"], where)})
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
            raise BadItem("S102", f"{where}: got type {kind!r}, which chat messages have no place for")
        if not chat or chat[-1] is not reply:
            chat.append(reply)
    return [message for message in chat if len(message) > 2 or message["content"] is not None]


def _lines(item: JsonObject) -> JsonObject:
    """The item with its texts as one, unless the model wrote it."""
    name = "output" if item.get("type", "").endswith("_output") else "content"
    by_model = item.get("role") == "assistant" or item.get("type") == "reasoning"
    return item if by_model or name not in item else item | {name: one_text(item[name])}


def _tools(client_tools: Sequence[Any]) -> list[JsonObject]:
    """The client's functions, those of namespaces as well. Tools of OpenAI's servers are left out beside others, for a model
    is free not to call them."""
    tools: list[JsonObject] = []
    hosted = None
    for n, tool in enumerate(client_tools):
        where = f"tools[{n}]"
        kind = object_of(tool).get("type")
        if kind == "namespace":
            inner = Fields(tool, f"{where}.").listed("tools")
            tools += [_function(function, f"{where}.tools[{i}]") for i, function in enumerate(inner)]
        elif kind in _HOSTED:
            hosted = hosted or f"{where}.type: {kind!r}"
        else:
            tools.append(_function(tool, where))
    if hosted and not tools:
        raise RequestError("unsupported", f"{hosted} needs OpenAI's servers", where=hosted.partition(":")[0])
    names = [tool["function"]["name"] for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError.field("tools", f"{twice!r} is there twice, in different namespaces", "unsupported")
    return tools


def _function(tool: Any, where: str) -> JsonObject:
    if (kind := object_of(tool).get("type")) != "function":
        raise RequestError.field(f"{where}.type", f"{kind!r} is not supported", "unsupported")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"), where)
