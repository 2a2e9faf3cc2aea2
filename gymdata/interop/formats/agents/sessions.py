"""Sessions of coding agents: a file is one rollout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gymdata.interop.blocks import of_anthropic, of_responses
from gymdata.interop.formats import FORMATS, Format
from gymdata.interop.importing import BadItem, Importing, TableRow
from gymdata.interop.text_rows import conversation, rollout_row
from gymdata.rollouts.messages import JsonObject

if TYPE_CHECKING:
    from gymdata.store.paths import Source


class Session(Format):
    item = "a session"
    holds_text = True

    def documents(self, sources: Iterable[Source]) -> Iterator[tuple[Source, int, Any, bytes]]:
        """One per file, which has a line per record or a list of them; a line that is no JSON costs its session."""
        for source in sources:
            lines = [
                (source, line, record, text)
                for _, line, value, text in super().documents([source])
                for record in (value if isinstance(value, list) else [value])
            ]
            records = [value for _, _, value, _ in lines]
            bad = next((line for line in lines if not isinstance(line[2], dict)), None)
            if bad is not None:
                why = bad[2].reason if isinstance(bad[2], BadItem) else "got no object"
                yield source, bad[1], BadItem("S101", f"a session of which line {bad[1]} cannot be read: {why}"), bad[3]
            elif lines:
                yield source, 1, {"records": records}, lines[0][3]


@FORMATS.register("claude-code")
class ClaudeCode(Session):
    """A session of Claude Code (``.jsonl``): what follows its last compaction, without side chains and errors of the API.
    Its system prompt and tools are not in the file, and there is no reward; a session that went back to an earlier
    message is refused."""

    content = "a session of Claude Code"
    marks = (b'"sessionId"',)

    def recognise(self, value: Any) -> bool:
        message = value.get("message") if isinstance(value, dict) else None
        is_record = isinstance(message, dict) and value.get("type") in ("user", "assistant")
        return is_record and {"sessionId", "parentUuid", "uuid"} <= value.keys()

    def row(self, item: Any, importing: Importing) -> TableRow:
        records = [r for r in item["records"] if r.get("type") in ("user", "assistant") and "message" in r]
        records = [r for r in records if not r.get("isSidechain") and not r.get("isApiErrorMessage")]
        starts = [n for n, record in enumerate(records) if record.get("isCompactSummary")]
        messages, parents, last = list[dict[str, Any]](), set[tuple[str, str | None]](), None
        ended = set[str | None]()
        for record in records[starts[-1] if starts else 0 :]:
            message, content = record["message"], record["message"]["content"]
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            if not record.get("isMeta"):
                if (record["type"], record["parentUuid"]) in parents:
                    raise BadItem("S102", f"uuid {record['uuid']}: the session went back to an earlier message")
                parents.add((record["type"], record["parentUuid"]))
            name = message.get("id") if record["type"] == "assistant" else None
            if name is not None and name == last:
                messages[-1]["content"] = [*messages[-1]["content"], *blocks]  # a message has a line per block
            elif name is not None and name in ended:
                raise BadItem("S102", f"uuid {record['uuid']}: its message goes on after a message of the user")
            else:
                messages.append({"role": record["type"], "content": blocks})
            last = name
            ended.add(name)
        written = conversation(of_anthropic(messages), "messages")
        first = records[0] if records else {}
        task = {name: first[name] for name in ("sessionId", "cwd", "gitBranch", "version") if name in first}
        models = (r["message"].get("model") for r in records if r["type"] == "assistant")
        return rollout_row(task, [], written, importing, about=tuple(task), policy=next(models, None))


@FORMATS.register("codex")
class Codex(Session):
    """A session of Codex (``rollout-*.jsonl``): its ``response_item`` lines, after the instructions of ``session_meta``. The
    text of a custom tool is the argument ``input``; encrypted reasoning and definitions of tools are lost, there is no
    reward, and a session that was compacted or rolled back is refused."""

    content = "a session of Codex"
    marks = (b'"session_meta"', b'"response_item"')

    def recognise(self, value: Any) -> bool:
        kind = value.get("type") if isinstance(value, dict) else None
        return kind in ("session_meta", "response_item") and isinstance(value.get("payload"), dict)

    def row(self, item: Any, importing: Importing) -> TableRow:
        records = item["records"]
        events = (record["payload"].get("type") for record in records if record.get("type") == "event_msg")
        if any(record.get("type") == "compacted" for record in records) or "thread_rolled_back" in events:
            raise BadItem(
                "S102", "got a session that was compacted or rolled back, whose messages are not those of its answers"
            )
        meta: JsonObject = next((record["payload"] for record in records if record.get("type") == "session_meta"), {})
        base = meta.get("base_instructions") or meta.get("instructions")
        base = base.get("text") if isinstance(base, dict) else base
        items = [record["payload"] for record in records if record.get("type") == "response_item"]
        system = [{"role": "system", "content": base}] if base else []
        written = conversation([*system, *of_responses(items)], "response_item")
        task: dict[str, Any] = {name: meta[name] for name in ("id", "cwd", "git", "cli_version") if name in meta}
        models = (record["payload"].get("model") for record in records if record.get("type") == "turn_context")
        return rollout_row(task, [], written, importing, about=tuple(task), policy=next(models, None))
