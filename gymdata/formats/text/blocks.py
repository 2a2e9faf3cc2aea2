"""Messages of the interfaces of Anthropic and OpenAI (Responses) as chat messages, for ``text_rows.conversation``.

A block or an item that chat messages have no place for makes the row unusable, by its type.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from gymdata.errors import json_kind
from gymdata.formats.conversion.importing import BadItem
from gymdata.rollouts.messages import JsonObject, Message, ResponseItem

#: Types of parts whose ``text`` is what was said; others may have a field of that name, too.
_TEXTS = (None, "text", "input_text", "output_text", "summary_text", "reasoning_text")

#: Types of blocks of Anthropic's messages that parts of others do not have.
BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking")


def text_of(content: Any, where: str) -> str:
    """The text of content, which is text or parts of it; LLaMA-Factory's have it as ``value``. Raises BadItem."""
    if isinstance(content, str):
        return content
    if content is not None and not isinstance(content, list):
        raise BadItem("S102", f"{where}: got {json_kind(content)}, expected text")
    texts = []
    for part in content or ():
        kind, text = (part.get("type"), part.get("text", part.get("value"))) if isinstance(part, dict) else (part, None)
        if kind not in _TEXTS or not isinstance(text, str):
            raise BadItem(
                "S102", f"{where}: got a part of type {kind!r}, expected text (images and audio are not trained)"
            )
        texts.append(text)
    return "".join(texts)


def of_anthropic(messages: Iterable[JsonObject], system: Any = None) -> list[Message]:
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


def function_of(tool: JsonObject) -> JsonObject:
    """A tool of Anthropic's interface as a function."""
    return {"name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"]}


def of_responses(items: Iterable[ResponseItem]) -> list[Message]:
    """Items of the Responses interface: reasoning, text and calls that follow each other are one message of the assistant. A
    custom tool's text is the argument ``input`` of its call."""
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
