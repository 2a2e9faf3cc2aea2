"""Sessions in the formats of the Hugging Face hub's viewer of traces: its own, and pi's."""

from __future__ import annotations

from typing import Any

from gymdata.interop.blocks import text_of
from gymdata.interop.formats import FORMATS
from gymdata.interop.formats.agents.sessions import Session
from gymdata.interop.importing import BadItem, Importing, TableRow
from gymdata.interop.text_rows import conversation, rollout_row


@FORMATS.register("session-trace")
class SessionTrace(Session):
    """The hub's Session Trace Simple Format: a line ``session`` with its ``harness``, then a line per ``message``. There are
    no definitions of tools and no reward."""

    content = "a session trace"
    marks = (b'"session"',)

    def recognise(self, value: Any) -> bool:
        is_header = isinstance(value, dict) and value.get("type") == "session"
        return is_header and isinstance(value.get("harness"), str) and "version" not in value and "cwd" not in value

    def row(self, item: Any, importing: Importing) -> TableRow:
        raw_messages = [record["message"] for record in item["records"] if record.get("type") == "message"]
        messages = [
            {
                "role": message["role"],
                "content": message.get("content") or ("" if message["role"] == "tool" else None),
                "reasoning": message.get("reasoningContent"),
                "tool_calls": message.get("toolCalls"),
                "tool_call_id": message.get("toolCallId"),
            }
            for message in raw_messages
        ]
        written = conversation(messages, "message")
        task = {name: item["records"][0][name] for name in ("harness", "id", "name") if name in item["records"][0]}
        models = (message["model"] for message in raw_messages if message.get("model"))
        return rollout_row(task, [], written, importing, about=tuple(task), policy=next(models, None))


@FORMATS.register("pi")
class Pi(Session):
    """A session of pi: its ``message`` entries. Its system prompt and tools are not in the file, and there is no reward; a
    session that was compacted or has branches, commands that the user ran in it, and images are refused."""

    content = "a session of pi"
    marks = (b'"session"', b'"toolResult"')

    def recognise(self, value: Any) -> bool:
        return isinstance(value, dict) and value.get("type") == "session" and {"id", "timestamp", "cwd"} <= value.keys()

    def row(self, item: Any, importing: Importing) -> TableRow:
        records = item["records"][1:]
        parents = [record["parentId"] for record in records if "parentId" in record]
        if len(set(parents)) < len(parents):
            raise BadItem("S102", "the session went back to an earlier message")
        if kind := next((r["type"] for r in records if r.get("type") in ("compaction", "branch_summary")), None):
            raise BadItem("S102", f"got an entry {kind!r}: its messages are not those of its answers")
        messages: list[dict[str, Any]] = []
        models: list[Any] = []
        for n, record in enumerate(records):
            if record.get("type") != "message":
                continue
            message, where = record["message"], f"entry {n + 1}"
            role, content = message["role"], message.get("content")
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
            texts = [block for block in blocks if block["type"] not in ("thinking", "toolCall")]
            if role == "assistant":
                models.append(message.get("model"))
                reply: dict[str, Any] = {"role": role, "content": text_of(texts, where) if texts else None}
                if thoughts := "".join(block["thinking"] for block in blocks if block["type"] == "thinking"):
                    reply["reasoning"] = thoughts
                calls = [block for block in blocks if block["type"] == "toolCall"]
                if calls:
                    reply["tool_calls"] = [
                        {"id": c["id"], "function": {"name": c["name"], "arguments": c["arguments"]}} for c in calls
                    ]
                if len(reply) > 2 or texts:
                    messages.append(reply)
            elif role == "toolResult":
                text = text_of(texts, where)
                messages.append({"role": "tool", "tool_call_id": message["toolCallId"], "content": text})
            elif role == "user":
                messages.append({"role": role, "content": text_of(texts, where)})
            else:
                raise BadItem("S102", f"{where}: got a message of role {role!r}, which chat messages have no place for")
        written = conversation(messages, "message")
        task = {name: item["records"][0][name] for name in ("id", "cwd") if name in item["records"][0]}
        return rollout_row(task, [], written, importing, about=tuple(task), policy=next(iter(models), None))
