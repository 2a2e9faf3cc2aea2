"""Sessions that OpenCode exports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gymdata.interop.formats import FORMATS, Format
from gymdata.interop.importing import BadItem, Importing, JsonObject, TableRow
from gymdata.interop.text_rows import conversation, first_row, rollout_row

#: Parts of an answer that are no text of it.
_BESIDE = ("step-start", "step-finish", "snapshot", "patch", "agent", "retry")
#: Files that OpenCode writes out as text in parts of their own.
_AS_TEXT = ("text/plain", "application/x-directory")


@FORMATS.register("opencode")
class OpenCode(Format):
    """What `opencode export` writes: ``info`` and ``messages`` with their ``parts``. Each step of an answer is a message.
    Its system prompt and definitions of tools are not in the file, and there is no reward; a session that was compacted,
    went back, or ran subtasks is refused, and so are images."""

    content = "a session of OpenCode"
    item = "a session"
    marks = (b'"parts"',)
    holds_text = True

    def recognise_row(self, row: JsonObject) -> bool:
        message = first_row(row.get("messages"))
        about = message.get("info")
        return isinstance(row.get("info"), dict) and isinstance(about, dict) and isinstance(message.get("parts"), list)

    def row(self, item: Any, importing: Importing) -> TableRow:
        session, messages, models = item["info"], list[dict[str, Any]](), list[Any]()
        if session.get("revert"):
            raise BadItem("S102", "info.revert: the session went back to an earlier message")
        for n, message in enumerate(item["messages"]):
            about, parts, where = message["info"], message["parts"], f"messages[{n}]"
            kinds = {part["type"] for part in parts}
            if about.get("summary") is True or "compaction" in kinds or "subtask" in kinds:
                raise BadItem("S102", f"{where}: the session was compacted or ran a subtask")
            if about["role"] == "user":
                if text := "\n".join(_user_texts(parts, where)):
                    if about.get("system") and not messages:
                        messages.append({"role": "system", "content": about["system"]})
                    messages.append({"role": "user", "content": text})
                continue
            models.append(about.get("modelID"))
            aborted = (about.get("error") or {}).get("name") == "MessageAbortedError"
            if not about.get("error") or (aborted and kinds - {"step-start", "reasoning"}):
                messages += _steps(parts, where)
        task = {name: session[name] for name in ("id", "directory", "title", "version") if name in session}
        return rollout_row(
            task, [], conversation(messages, "messages"), importing, about=tuple(task), policy=next(iter(models), None)
        )


def _user_texts(parts: list[Mapping[str, Any]], where: str) -> Iterator[str]:
    for part in parts:
        if part["type"] == "text" and not part.get("ignored"):
            yield part["text"]
        elif part["type"] == "file" and part.get("mime") not in _AS_TEXT:
            raise BadItem("S102", f"{where}: got a file of type {part.get('mime')!r}: images and files are not trained")


def _steps(parts: list[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """A message for each step of an answer, and one for each result of its tools."""
    chat: list[dict[str, Any]] = []
    reply: dict[str, Any] = {"role": "assistant", "content": None}
    results: list[dict[str, Any]] = []
    for part in [*parts, {"type": "step-start"}]:
        kind = part["type"]
        if kind == "step-start":
            if len(reply) > 2 or reply["content"] is not None:
                chat += [reply, *results]
            reply, results = {"role": "assistant", "content": None}, []
        elif kind == "reasoning":
            reply["reasoning"] = reply.get("reasoning", "") + part["text"]
        elif kind == "text":
            reply["content"] = (reply["content"] or "") + part["text"]
        elif kind == "tool":
            state = part["state"]
            if state["status"] not in ("completed", "error"):
                raise BadItem("S103", f"{where}: the call {part['callID']!r} of {part['tool']} has no result")
            if state.get("attachments") or state["time"].get("compacted"):
                raise BadItem("S102", f"{where}: the result of {part['tool']} has files, or was cleared later")
            call = {"id": part["callID"], "function": {"name": part["tool"], "arguments": state["input"]}}
            reply.setdefault("tool_calls", []).append(call)
            text = state["output"] if state["status"] == "completed" else state["error"]
            results.append({"role": "tool", "tool_call_id": part["callID"], "content": text})
        elif kind not in _BESIDE:
            raise BadItem("S102", f"{where}: got a part of type {kind!r}, which chat messages have no place for")
    return chat
