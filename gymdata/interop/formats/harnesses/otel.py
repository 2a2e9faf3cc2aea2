"""Spans of OpenTelemetry with its conventions for generative AI."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gymdata.interop.formats import FORMATS, Format, Place
from gymdata.interop.importing import BadItem, Importing, TableRow
from gymdata.interop.text_rows import conversation, rollout_row

_INPUT, _OUTPUT = "gen_ai.input.messages", "gen_ai.output.messages"


@FORMATS.register("otel-genai")
class OtelGenAI(Format):
    """Spans of model calls (``gen_ai.input.messages``, ``gen_ai.output.messages``), as the SDK's exporters write them or in
    ``resourceSpans``: a rollout per call. Spans of anything else are passed over; there is no reward."""

    content = "OpenTelemetry spans of model calls"
    item = "a span of a model call"
    marks = (b"gen_ai.output.messages",)
    holds_text = True

    def recognise(self, value: Any) -> bool:
        return any(True for document in (value if isinstance(value, list) else [value]) for _ in _spans(document))

    def items(self, value: Any) -> Iterator[tuple[Place, Any]]:
        for number, document in enumerate(value if isinstance(value, list) else [value]):
            for k, span in enumerate(_spans(document)):
                yield (k, number), span

    def row(self, item: Any, importing: Importing) -> TableRow:
        inputs, answers = _value(item.get(_INPUT)) or [], _value(item[_OUTPUT])
        if not isinstance(answers, list) or len(answers) != 1:
            raise BadItem("S102", f"{_OUTPUT}: got {str(answers)[:60]!r}, expected one message")
        instructions = _value(item.get("gen_ai.system_instructions"))
        system = [{"role": "system", "parts": instructions}] if instructions else []
        prompt = [chat for n, m in enumerate([*system, *inputs]) for chat in _messages(m, f"{_INPUT}[{n}]")]
        written = conversation(list(_messages(answers[0], _OUTPUT)), _OUTPUT)
        tools = _value(item.get("gen_ai.tool.definitions")) or []
        model = item.get("gen_ai.response.model") or item.get("gen_ai.request.model")
        about = [name for name in item if name.startswith("gen_ai.") and name not in (_INPUT, _OUTPUT)]
        about = [name for name in about if name not in ("gen_ai.system_instructions", "gen_ai.tool.definitions")]
        cut = answers[0].get("finish_reason") == "length"
        row = {name: item[name] for name in about} | {"tools": tools}
        return rollout_row(
            row, conversation(prompt, _INPUT), written, importing, about=about, policy=model, truncated=cut
        )


def _spans(document: Any) -> Iterator[dict[str, Any]]:
    """The attributes of each span of a model call in a document, which is a span or OTLP's JSON."""
    if not isinstance(document, dict):
        return
    if "resourceSpans" in document:
        for resource in document["resourceSpans"]:
            for scope in resource.get("scopeSpans", ()):
                for span in scope.get("spans", ()):
                    yield from _spans(span)
        return
    attributes = document.get("attributes")
    if isinstance(attributes, list):
        attributes = {entry["key"]: _plain(entry.get("value") or {}) for entry in attributes if isinstance(entry, dict)}
    if isinstance(attributes, dict) and _OUTPUT in attributes:
        yield attributes


def _plain(value: Mapping[str, Any]) -> Any:
    """A value of OTLP's JSON, which names its type."""
    if "arrayValue" in value:
        return [_plain(element) for element in value["arrayValue"].get("values", ())]
    if "kvlistValue" in value:
        return {entry["key"]: _plain(entry.get("value") or {}) for entry in value["kvlistValue"].get("values", ())}
    return next(iter(value.values()), None)


def _value(value: Any) -> Any:
    """An attribute, which is a value or its JSON text."""
    return json.loads(value) if isinstance(value, str) else value


def _messages(message: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """The chat messages of a message with parts: results of tools are messages of their own."""
    texts, chat = list[str](), dict[str, Any](role=message["role"])
    for part in message["parts"]:
        kind = part.get("type")
        if kind == "text":
            texts.append(part["content"])
        elif kind == "reasoning":
            chat["reasoning"] = chat.get("reasoning", "") + part["content"]
        elif kind == "tool_call":
            call = {"id": part.get("id"), "function": {"name": part["name"], "arguments": part.get("arguments") or {}}}
            chat.setdefault("tool_calls", []).append(call)
        elif kind == "tool_call_response":
            result = part.get("response", part.get("result"))
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
            yield {"role": "tool", "tool_call_id": part.get("id"), "content": text}
        else:
            raise BadItem(
                "S102", f"{where}: got a part of type {kind!r}, expected text (images and files are not trained)"
            )
    if texts or len(chat) > 1:
        yield chat | {"content": "".join(texts) if texts else None}
