"""Published data sets of tool calls, in shapes of their own."""

from __future__ import annotations

import json
import re
from typing import Any

from gymdata.interop.formats import FORMATS, Format
from gymdata.interop.importing import BadItem, Importing, JsonObject, TableRow
from gymdata.interop.text_rows import conversation, rollout_row

_SPEAKER = re.compile(r"(?:\A|\n\s*\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):")
_CALL = "<functioncall>"
_QUOTED = re.compile(r"""\{\s*"name":\s*"([^"]+)"\s*,\s*"arguments":\s*'(.*)'\s*\}""", re.DOTALL)


@FORMATS.register("glaive")
class Glaive(Format):
    """glaive-function-calling-v2: ``chat`` of USER, ASSISTANT and FUNCTION RESPONSE, tools in ``system``. The sentence that
    introduces the tools is left out, for a chat template writes its own; so are ids of calls, which it does not have."""

    content = "conversations of glaive-function-calling"
    item = "a conversation"
    marks = (b'"chat"',)
    holds_text = True

    def recognise_row(self, row: JsonObject) -> bool:
        chat = row.get("chat")
        return isinstance(row.get("system"), str) and isinstance(chat, str) and "USER:" in chat

    def row(self, item: Any, importing: Importing) -> TableRow:
        system, tools = _system(item["system"])
        before, *parts = _SPEAKER.split(item["chat"])
        if before.strip() or not parts:
            raise BadItem("S102", f"chat: got {item['chat'][:60]!r}, expected text that begins with USER:")
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for speaker, utterance in zip(parts[::2], parts[1::2], strict=True):
            text = utterance.replace("<|endoftext|>", "").strip()
            if speaker == "ASSISTANT" and _CALL in text:
                content, _, call = text.partition(_CALL)
                messages.append({"role": "assistant", "content": content.strip() or None, "tool_calls": [_call(call)]})
            else:
                role = {"USER": "user", "ASSISTANT": "assistant"}.get(speaker, "tool")
                messages.append({"role": role, "content": text})
        written = conversation(messages, "chat")
        return rollout_row(item | {"tools": tools}, [], written, importing, texts=("system", "chat"))


def _system(text: str) -> tuple[str, list[Any]]:
    """(the system message, the tools) of the text before a chat; the message is empty where the text introduces tools."""
    text = text.strip().removeprefix("SYSTEM:").strip()
    start = text.find("{")
    if start < 0:
        return text, []
    tools, decoder, rest = [], json.JSONDecoder(), text[start:]
    while rest:
        try:
            tool, end = decoder.raw_decode(rest)
        except ValueError:
            raise BadItem("S102", f"system: got {rest[:60]!r} among its tools, expected JSON") from None
        tools.append(tool)
        rest = rest[end:].lstrip(" \t\r\n,")
    return "", tools


def _call(text: str) -> dict[str, Any]:
    """A call of the assistant, whose arguments are JSON, or JSON in single quotes."""
    text = text.replace("</functioncall>", "").strip()
    if match := _QUOTED.fullmatch(text):
        return {"name": match[1], "arguments": match[2]}
    try:
        call = json.loads(text)
    except ValueError:
        call = None
    if not isinstance(call, dict):
        raise BadItem("S102", f"chat: got the call {text[:80]!r}, expected a name and arguments as JSON")
    return call


@FORMATS.register("xlam")
class Xlam(Format):
    """xlam-function-calling (APIGen): ``query``, and ``answers`` and ``tools`` as JSON text. Each answer is a call;
    parameters of tools stay as the file has them, which is no JSON schema."""

    content = "tool calls of xLAM"
    item = "a query with its calls"
    marks = (b'"answers"',)
    holds_text = True

    def recognise_row(self, row: JsonObject) -> bool:
        return all(isinstance(row.get(name), (str, list)) for name in ("query", "answers", "tools"))

    def row(self, item: Any, importing: Importing) -> TableRow:
        prompt = conversation(item["query"], "query")
        written = conversation([{"role": "assistant", "content": None, "tool_calls": item["answers"]}], "answers")
        return rollout_row(item, prompt, written, importing, texts=("query", "answers"))
