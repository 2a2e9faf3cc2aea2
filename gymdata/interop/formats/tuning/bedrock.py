"""Rows of Amazon Bedrock, in the messages of its Converse API."""

from __future__ import annotations

from typing import Any

from gymdata.interop.blocks import named_block, of_anthropic
from gymdata.interop.formats import FORMATS, Format
from gymdata.interop.importing import Importing, JsonObject, TableRow
from gymdata.interop.text_rows import conversation, ends_with_answer, rollout_row

_BLOCKS = {"text", "toolUse", "toolResult", "reasoningContent"}


@FORMATS.register("bedrock")
class Bedrock(Format):
    """Amazon Bedrock's rows for fine-tuning and distillation (``schemaVersion`` bedrock-conversation-2024) and others in the
    messages of its Converse API: ``messages`` and ``system`` with blocks of ``text``, ``toolConfig``; calls and their
    results are messages. A message with an image or a document is refused."""

    content = "conversations of Bedrock"
    item = "a conversation"
    marks = (b'"messages"',)
    holds_text = True

    def recognise_row(self, row: JsonObject) -> bool:
        if not ends_with_answer(row.get("messages")):
            return False
        content = row["messages"][-1].get("content")
        first = content[0] if isinstance(content, list) and content else None
        is_block = isinstance(first, dict) and "type" not in first and not _BLOCKS.isdisjoint(first)
        return is_block or str(row.get("schemaVersion")).startswith("bedrock-conversation")

    def row(self, item: Any, importing: Importing) -> TableRow:
        messages = [message | {"content": [*map(named_block, message["content"])]} for message in item["messages"]]
        specs = [tool["toolSpec"] for tool in (item.get("toolConfig") or {}).get("tools") or ()]
        tools = [
            {"name": spec["name"], "description": spec.get("description"), "parameters": spec["inputSchema"]["json"]}
            for spec in specs
        ]
        written = conversation(of_anthropic(messages, item.get("system")), "messages")
        return rollout_row(item | {"tools": tools}, [], written, importing, texts=("system", "toolConfig"))
