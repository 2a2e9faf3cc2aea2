"""The client's side of the three dialects: requests out of messages, and what a reply or a stream says.

Messages are chat messages whose calls are ``{"id", "name", "arguments"}`` with an object of arguments. ``as_parts`` sends
content as a list of parts, as many clients do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gymdata.rollouts.messages import JsonObject, Message, Tools

Calls = list[tuple[str, str, Any]]


@dataclass(slots=True)
class Reply:
    """What a client got. ``calls``: id, name and arguments of each; ``finish``: stop, length or calls."""

    content: str = ""
    reasoning: str = ""
    calls: Calls = field(default_factory=list)
    finish: str | None = None
    usage: tuple[int, int] | None = None
    body: JsonObject = field(default_factory=dict)

    def message(self) -> Message:
        """It as the client sends it back: without reasoning."""
        calls = [{"id": id_, "name": name, "arguments": arguments} for id_, name, arguments in self.calls]
        return {"role": "assistant", "content": self.content, **({"calls": calls} if calls else {})}


class Wire:
    """One dialect. ``finishes``: its words for stop, length and calls."""

    name: ClassVar[str]
    path: ClassVar[str]
    finishes: ClassVar[dict[str, str]] = {"stop": "stop", "length": "length", "tool_calls": "calls"}

    def body(self, messages: Sequence[Message], tools: Tools, *, as_parts: bool, more: JsonObject) -> JsonObject:
        """The body of a request."""
        raise NotImplementedError  # each dialect has its own

    def read(self, body: JsonObject) -> Reply:
        """The reply in the body of an answer."""
        raise NotImplementedError  # each dialect has its own

    def read_stream(self, events: Sequence[tuple[str | None, str]]) -> Reply:
        """The reply in the events of a stream. It ends as the dialect says."""
        raise NotImplementedError  # each dialect has its own

    def error_of(self, body: Any) -> str | None:
        """The message of an error in the dialect's form; None for another form."""
        error = body.get("error") if isinstance(body, dict) else None
        if not isinstance(error, dict) or not isinstance(error.get("type"), str):
            return None
        return error["message"] if isinstance(error.get("message"), str) else None


class Chat(Wire):
    """OpenAI's chat completions."""

    name, path = "chat", "/v1/chat/completions"

    def body(self, messages: Sequence[Message], tools: Tools, *, as_parts: bool, more: JsonObject) -> JsonObject:
        sent = []
        for message in messages:
            content = message.get("content", "")
            out = {"role": message["role"], "content": [{"type": "text", "text": content}] if as_parts else content}
            if calls := message.get("calls"):
                functions = [(c["id"], {"name": c["name"], "arguments": _compact(c["arguments"])}) for c in calls]
                out["tool_calls"] = [{"id": i, "type": "function", "function": function} for i, function in functions]
                out["content"] = content or None
            sent.append(out | ({"tool_call_id": message["call_id"]} if "call_id" in message else {}))
        sent_tools = [{"type": "function", "function": tool} for tool in tools or ()]
        return {"model": "scripted", "messages": sent, **({"tools": sent_tools} if sent_tools else {}), **more}

    def read(self, body: JsonObject) -> Reply:
        choice, usage = body["choices"][0], body.get("usage") or {}
        message = choice["message"]
        calls = [
            (call["id"], call["function"]["name"], _arguments(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        ]
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        finish = self.finishes.get(choice["finish_reason"], choice["finish_reason"])
        counts = (usage["prompt_tokens"], usage["completion_tokens"]) if usage else None
        return Reply(message.get("content") or "", reasoning, calls, finish, counts, body)

    def read_stream(self, events: Sequence[tuple[str | None, str]]) -> Reply:
        reply, calls = Reply(), dict[int, list[str]]()
        for chunk in _chunks(events):
            for choice in chunk.get("choices") or ():
                delta = choice["delta"]
                reply.content += delta.get("content") or ""
                reply.reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
                for call in delta.get("tool_calls") or ():
                    part = calls.setdefault(call["index"], ["", "", ""])
                    function = call.get("function") or {}
                    pieces = (call.get("id"), function.get("name"), function.get("arguments"))
                    for k, piece in enumerate(pieces):
                        part[k] += piece or ""
                if choice.get("finish_reason"):
                    reply.finish = self.finishes.get(choice["finish_reason"], choice["finish_reason"])
        reply.calls = [(id_, name, _arguments(arguments)) for id_, name, arguments in calls.values()]
        return reply


class Responses(Wire):
    """OpenAI's responses."""

    name, path = "responses", "/v1/responses"
    finishes: ClassVar[dict[str, str]] = {"completed": "stop", "incomplete": "length"}

    def body(self, messages: Sequence[Message], tools: Tools, *, as_parts: bool, more: JsonObject) -> JsonObject:
        items: list[JsonObject] = []
        for message in messages:
            role, content = message["role"], message.get("content", "")
            if role == "tool":
                items.append({"type": "function_call_output", "call_id": message["call_id"], "output": content})
            elif role == "assistant":
                part = {"type": "output_text", "text": content, "annotations": []}
                items += [{"type": "message", "role": role, "content": [part]}] if content else []
                for call in message.get("calls", ()):
                    named = {"name": call["name"], "arguments": _compact(call["arguments"])}
                    items.append({"type": "function_call", "call_id": call["id"], **named})
            else:
                text = [{"type": "input_text", "text": content}] if as_parts else content
                items.append({"type": "message", "role": role, "content": text})
        sent_tools = [{"type": "function", **tool} for tool in tools or ()]
        more = {{"max_tokens": "max_output_tokens"}.get(name, name): value for name, value in more.items()}
        return {"model": "scripted", "input": items, **({"tools": sent_tools} if sent_tools else {}), **more}

    def read(self, body: JsonObject) -> Reply:
        reply, usage = Reply(body=body), body.get("usage") or {}
        for item in body["output"]:
            if item["type"] == "message":
                reply.content += "".join(part["text"] for part in item["content"])
            elif item["type"] == "reasoning":
                reply.reasoning += "".join(part["text"] for part in item.get("content") or item.get("summary") or ())
            elif item["type"] == "function_call":
                reply.calls.append((item["call_id"], item["name"], _arguments(item["arguments"])))
        finish = self.finishes.get(body["status"], body["status"])
        reply.finish = "calls" if reply.calls and finish == "stop" else finish
        reply.usage = (usage["input_tokens"], usage["output_tokens"]) if usage else None
        return reply

    def read_stream(self, events: Sequence[tuple[str | None, str]]) -> Reply:
        parsed = [json.loads(data) for _, data in events if data != "[DONE]"]
        last = parsed[-1] if parsed else {}
        assert last.get("type") in ("response.completed", "response.incomplete"), last
        text = "".join(event["delta"] for event in parsed if event["type"] == "response.output_text.delta")
        reply = self.read(last["response"])
        assert text == reply.content
        return reply


class Messages(Wire):
    """Anthropic's messages."""

    name, path = "messages", "/v1/messages"
    finishes: ClassVar[dict[str, str]] = {
        "end_turn": "stop",
        "stop_sequence": "stop",
        "max_tokens": "length",
        "tool_use": "calls",
    }

    def body(self, messages: Sequence[Message], tools: Tools, *, as_parts: bool, more: JsonObject) -> JsonObject:
        sent: list[JsonObject] = []
        for message in messages:
            role, content = message["role"], message.get("content", "")
            text = [{"type": "text", "text": content}]
            if role == "system":
                continue
            if role == "tool":
                block = {
                    "type": "tool_result",
                    "tool_use_id": message["call_id"],
                    "content": text if as_parts else content,
                }
                sent.append({"role": "user", "content": [block]})
            elif calls := message.get("calls"):
                uses = [{"type": "tool_use", "id": c["id"], "name": c["name"], "input": c["arguments"]} for c in calls]
                sent.append({"role": role, "content": [*(text if content else []), *uses]})
            else:
                sent.append({"role": role, "content": text if as_parts else content})
        system = [m["content"] for m in messages if m["role"] == "system"]
        sent_tools = [
            {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in tools or ()
        ]
        named = {"system": system[0]} if system else {}
        return {
            "model": "scripted",
            "max_tokens": 256,
            "messages": sent,
            **named,
            **({"tools": sent_tools} if sent_tools else {}),
            **more,
        }

    def read(self, body: JsonObject) -> Reply:
        reply, usage = Reply(body=body), body["usage"]
        for block in body["content"]:
            if block["type"] == "text":
                reply.content += block["text"]
            elif block["type"] == "thinking":
                reply.reasoning += block["thinking"]
            elif block["type"] == "tool_use":
                reply.calls.append((block["id"], block["name"], block["input"]))
        reply.finish = self.finishes.get(body["stop_reason"], body["stop_reason"])
        cached = (usage.get("cache_read_input_tokens") or 0) + (usage.get("cache_creation_input_tokens") or 0)
        reply.usage = (usage["input_tokens"] + cached, usage["output_tokens"])
        return reply

    def read_stream(self, events: Sequence[tuple[str | None, str]]) -> Reply:
        blocks: dict[int, JsonObject] = {}
        body: JsonObject = {"usage": {}, "stop_reason": None}
        kinds = []
        for _, data in events:
            event = json.loads(data)
            kinds.append(event["type"])
            if event["type"] == "message_start":
                body["usage"] |= event["message"]["usage"]
            elif event["type"] == "content_block_start":
                blocks[event["index"]] = {**event["content_block"], "json": ""}
            elif event["type"] == "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                for name, target in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                    block[target] = block.get(target, "") + delta.get(name, "")
            elif event["type"] == "message_delta":
                body["stop_reason"] = event["delta"]["stop_reason"]
                body["usage"] |= event.get("usage") or {}
        assert kinds[-1:] == ["message_stop"]
        for block in blocks.values():
            if block["type"] == "tool_use":
                block["input"] = _arguments(block["json"])
        return self.read({**body, "content": list(blocks.values())})

    def error_of(self, body: Any) -> str | None:
        return super().error_of(body) if isinstance(body, dict) and body.get("type") == "error" else None


WIRES: dict[str, Wire] = {wire.name: wire for wire in (Chat(), Responses(), Messages())}


def _chunks(events: Sequence[tuple[str | None, str]]) -> list[JsonObject]:
    assert events[-1][1] == "[DONE]", events
    return [json.loads(data) for _, data in events[:-1]]


def _arguments(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text


def _compact(arguments: Any) -> str:
    """JSON in another form than a model writes: without white space."""
    return json.dumps(arguments, separators=(",", ":"))
