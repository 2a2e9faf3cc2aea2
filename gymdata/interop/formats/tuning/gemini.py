"""Gemini's tuning files: conversations and preferences."""

from __future__ import annotations

import math
from typing import Any

from gymdata.interop.blocks import named_block, of_anthropic
from gymdata.interop.formats import FORMATS, Format
from gymdata.interop.formats.published._compared import Compared, finite
from gymdata.interop.importing import BadItem, Importing, TableRow
from gymdata.interop.text_rows import conversation, rollout_row
from gymdata.rollouts.messages import JsonObject, Message

_ROLES = {"model": "assistant", "function": "user"}
_SYSTEM = ("systemInstruction", "system_instruction")


@FORMATS.register("gemini")
class Gemini(Format):
    """Gemini's rows for supervised tuning: ``contents`` (roles user and model, ``parts``), ``systemInstruction`` and
    ``tools``, in either spelling; calls and their results are messages. Schemas of tools stay as the file has them, which
    are no JSON schemas. A message with a file or an image is refused."""

    content = "tuning rows of Gemini"
    item = "a conversation"
    marks = (b'"contents"',)
    holds_text = True

    def recognise_row(self, row: JsonObject) -> bool:
        contents = row.get("contents")
        last = contents[-1] if isinstance(contents, list) and contents else {}
        return last.get("role") == "model" and isinstance(last.get("parts"), list) and "completions" not in row

    def row(self, item: Any, importing: Importing) -> TableRow:
        messages = conversation(_messages(item["contents"], item), "contents")
        return rollout_row(item | _tools(item), [], messages, importing, texts=("contents", *_SYSTEM))


@FORMATS.register("gemini-preference")
class GeminiPreference(Compared):
    """Gemini's rows for preference tuning: ``contents`` up to the user's last message, and two ``completions``, of which the
    one with the ``score`` 1 is preferred to the one with 0."""

    content = "preference rows of Gemini"
    marks = (b'"completions"',)
    keys = ({"contents", "completions"},)

    def compared(self, item: JsonObject) -> tuple[Any, tuple[Any, Any], float, float]:
        if len(item["completions"]) != 2:
            raise BadItem("S102", f"completions: got {len(item['completions'])}, expected 2")
        first, second = item["completions"]
        answers = _messages([first["completion"]], {}), _messages([second["completion"]], {})
        return _messages(item["contents"], item), answers, finite(second, "score") - finite(first, "score"), math.nan

    def row(self, item: Any, importing: Importing) -> TableRow:
        return super().row(item | _tools(item), importing)


def _tools(item: JsonObject) -> JsonObject:
    """The declarations of functions as ``text_rows.tools_of`` reads them."""
    names = ("functionDeclarations", "function_declarations")
    return {"tools": [d for tool in item.get("tools") or () for name in names for d in tool.get(name) or ()]}


def _messages(contents: list[JsonObject], item: JsonObject) -> list[Message]:
    """Contents, and the system's instruction of ``item``, as chat messages."""
    system = next((item[name] for name in _SYSTEM if item.get(name)), None)
    messages = [
        {"role": _ROLES.get(content["role"], content["role"]), "content": [*map(named_block, content["parts"])]}
        for content in contents
    ]
    return of_anthropic(messages, system["parts"] if isinstance(system, dict) else system)
