"""Trajectories of SWE-agent and mini-swe-agent."""

from __future__ import annotations

from typing import Any

from gymdata.interop.blocks import of_responses, text_of
from gymdata.interop.formats import FORMATS, Format
from gymdata.interop.importing import Importing, JsonObject, TableRow
from gymdata.interop.text_rows import conversation, rollout_row


@FORMATS.register("swe-agent")
class SweAgent(Format):
    """SWE-agent's ``.traj``: the messages of ``history``; ``info`` (exit status, submission, costs), where it has one, is in
    ``extra``. It has no reward and no definitions of tools; ``trajectory`` and the steps that the history leaves out
    (retries) are not read; demonstrations are not trained."""

    content = "a trajectory of SWE-agent"
    item = "a trajectory of SWE-agent"
    marks = (b'"trajectory"', b'"history"')
    holds_text = True

    def recognise_row(self, row: JsonObject) -> bool:
        history = row.get("history")
        if not isinstance(history, list) or not history or not isinstance(history[0], dict):
            return False
        has_trajectory = isinstance(row.get("trajectory"), list) and isinstance(row.get("info"), dict)
        return has_trajectory or {"role", "content", "agent"} <= history[0].keys()

    def row(self, item: Any, importing: Importing) -> TableRow:
        messages = []
        for message in item["history"]:
            chat_message = message | {"content": message["content"] and text_of(message["content"], "history")}
            if ids := message.get("tool_call_ids"):
                chat_message["tool_call_id"] = ids[0] if len(ids) == 1 else None
            if message.get("is_demo"):
                chat_message["weight"] = 0
            if thoughts := message.get("thinking_blocks"):
                chat_message["reasoning"] = "".join(block.get("thinking", "") for block in thoughts) or None
            messages.append(chat_message)
        texts = ("history", "trajectory", "replay_config", "environment")
        return rollout_row(item, [], conversation(messages, "history"), importing, texts=texts, about=("info",))


@FORMATS.register("mini-swe-agent")
class MiniSweAgent(Format):
    """mini-swe-agent's ``.traj.json``: ``messages`` (also as items of the Responses interface), without the one of the role
    ``exit``; ``info`` is in ``extra``. It has no reward and no definitions of tools."""

    content = "a trajectory of mini-swe-agent"
    item = "a trajectory of mini-swe-agent"
    marks = (b'"info"', b'"trajectory_format"')
    holds_text = True

    def recognise_row(self, row: JsonObject) -> bool:
        return str(row.get("trajectory_format")).startswith("mini-swe-agent") and isinstance(row.get("messages"), list)

    def row(self, item: Any, importing: Importing) -> TableRow:
        messages = [message for message in item["messages"] if message.get("role") != "exit"]
        if any("role" not in message for message in messages):
            outputs = (m["output"] if m.get("object") == "response" else [m] for m in messages)
            messages = of_responses(entry for entries in outputs for entry in entries)
        model = item.get("info", {}).get("config", {}).get("model", {}).get("model_name")
        texts = ("trajectory_format", "segments")
        written = conversation(messages, "messages")
        return rollout_row(item, [], written, importing, texts=texts, about=("info",), policy=model)
