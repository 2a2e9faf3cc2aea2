"""Events of OpenHands: the output of its evaluations, and trajectories of conversations."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gymdata.interop.blocks import text_of
from gymdata.interop.formats import FORMATS, Format
from gymdata.interop.importing import BadItem, Importing, JsonObject, TableRow
from gymdata.interop.text_rows import conversation, rollout_row

if TYPE_CHECKING:
    from gymdata.store.paths import Source

#: Events that are no message of the conversation.
_NO_MESSAGE = {"null", "recall", "change_agent_state", "agent_state_changed", "loop_recovery", "condensation_request"}
_KINDS_WITHOUT = ("ConversationStateUpdateEvent", "PauseEvent", "TokenEvent", "LLMCompletionLogEvent", "InterruptEvent")


@FORMATS.register("openhands")
class OpenHands(Format):
    """OpenHands' ``output.jsonl`` (a rollout per ``history``) and files of events (a rollout per file), of its SDK and of
    the versions before. Answers are those of the model's responses: events that have none are refused, and so is a history
    that was condensed. What OpenHands adds to the output of commands, and to messages of the user, is not read. An
    evaluated output's ``resolved`` is the reward; tools of the SDK are not in the file."""

    content = "events of OpenHands"
    item = "a session of OpenHands"
    marks = (b'"history"', b'"action"', b'"observation"', b'"kind"')
    holds_text = holds_reward = True

    def recognise_row(self, row: JsonObject) -> bool:
        history = row.get("history")
        if "instance_id" in row and isinstance(history, list) and history:
            first = history[0][0] if isinstance(history[0], list) and history[0] else history[0]
            return _is_event(first)
        return _is_event(row)

    def documents(self, sources: Iterable[Source]) -> Iterator[tuple[Source, int, Any, bytes]]:
        """A file of events, a list or one per line, is one document."""
        for source in sources:
            lines = super().documents([source])
            first = next(lines, None)
            if first is None:
                continue
            if isinstance(first[2], list) and first[2] and _is_event(first[2][0]):
                yield source, 1, {"history": first[2]}, first[3]
            elif _is_event(first[2]):
                records = [first, *lines]
                bad = next((record for record in records if not isinstance(record[2], dict)), None)
                if bad is None:
                    yield source, 1, {"history": [record[2] for record in records]}, first[3]
                else:
                    yield source, bad[1], BadItem("S101", f"a session of which line {bad[1]} cannot be read"), bad[3]
            else:
                yield from itertools.chain([first], lines)

    def row(self, item: Any, importing: Importing) -> TableRow:
        events = [
            event for entry in item["history"] for event in (entry if isinstance(entry, list) else [entry]) if event
        ]
        tools: list[Any] = []
        models: list[Any] = []
        messages: list[dict[str, Any]] = []
        answered = set[Any]()
        for n, event in enumerate(events):
            where = f"history[{n}]"
            if not isinstance(event, dict):
                raise BadItem("S102", f"{where}: got {type(event).__name__}, expected an event")
            if "kind" in event:
                messages += _of_sdk(event, messages, answered, where)
                continue
            if event.get("action") == "system":
                tools = event["args"].get("tools") or []
            messages += _of_event(event, answered, models, where)
        test = item.get("test_result")
        report = test.get("report") if isinstance(test, dict) else None
        resolved = report.get("resolved") if isinstance(report, dict) else None
        about = [name for name in ("test_result", "error", "metrics", "attempt") if item.get(name) is not None]
        llm = (item.get("metadata") or {}).get("llm_config") or (item.get("metadata") or {}).get("llm") or {}
        return rollout_row(
            item | {"tools": tools},
            [],
            conversation(messages, "history"),
            importing,
            reward=float(resolved) if isinstance(resolved, bool) else None,
            texts=("history", "metadata", "runtime_runs"),
            about=about,
            group=str(item["instance_id"]) if item.get("instance_id") is not None else None,
            policy=next(iter(models), llm.get("model")),
        )


def _is_event(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("source") not in ("agent", "user", "environment", "hook"):
        return False
    if isinstance(value.get("kind"), str) and "id" in value:
        return bool(value["kind"].endswith(("Event", "Condensation", "Observation")))
    return isinstance(value.get("action"), str) or isinstance(value.get("observation"), str)


def _of_event(event: Mapping[str, Any], answered: set[Any], models: list[Any], where: str) -> Iterator[dict[str, Any]]:
    """The messages of an event of the versions before the SDK."""
    kind = event.get("action") or event.get("observation")
    call = event.get("tool_call_metadata")
    if kind == "condensation":
        raise BadItem("S102", f"{where}: got a condensed history, whose messages are not those of its answers")
    if kind in _NO_MESSAGE:
        return
    if "observation" in event:
        if isinstance(call, dict):
            yield {"role": "tool", "tool_call_id": call["tool_call_id"], "content": event.get("content") or ""}
        elif kind in ("error", "user_rejected"):
            yield {"role": "user", "content": event["content"]}
        else:
            raise BadItem("S102", f"{where}: got the observation {kind!r} of no call of a tool")
        return
    arguments = event.get("args") or {}
    if kind == "system":
        yield {"role": "system", "content": arguments["content"]}
    elif kind == "message" and arguments.get("image_urls"):
        raise BadItem("S102", f"{where}: images, audio and video are not trained")
    elif isinstance(call, dict):
        response = call.get("model_response") or {}
        if (name := response.get("id") or call["tool_call_id"]) not in answered:
            answered.add(name)
            models.append(response.get("model"))
            yield response["choices"][0]["message"]
    elif kind == "message":
        yield {"role": "user" if event["source"] == "user" else "assistant", "content": arguments["content"]}
    elif kind == "finish":
        if text := arguments.get("thought") or arguments.get("final_thought"):
            yield {"role": "assistant", "content": text}
    else:
        raise BadItem("S102", f"{where}: got the action {kind!r} without the response of the model")


def _of_sdk(
    event: Mapping[str, Any], messages: list[dict[str, Any]], answered: set[Any], where: str
) -> Iterator[dict[str, Any]]:
    """The messages of an event of the SDK; calls of one response are one message, which is last in ``messages``."""
    kind = event["kind"]
    if kind == "SystemPromptEvent":
        parts = [event["system_prompt"], *([event["dynamic_context"]] if event.get("dynamic_context") else [])]
        yield {"role": "system", "content": text_of(parts, where)}
    elif kind == "MessageEvent":
        message = event["llm_message"]
        text = text_of([*(message.get("content") or ()), *(event.get("extended_content") or ())], where)
        yield {"role": message["role"], "content": text, "reasoning_content": message.get("reasoning_content")}
    elif kind == "ActionEvent":
        call = {"id": event["tool_call"]["id"], "function": {k: event["tool_call"][k] for k in ("name", "arguments")}}
        response = event["llm_response_id"]
        if response in answered:
            messages[-1].setdefault("tool_calls", []).append(call)
            return
        answered.add(response)
        reply = {"role": "assistant", "content": text_of(event.get("thought"), where) or None, "tool_calls": [call]}
        yield reply | {"reasoning_content": event.get("reasoning_content")}
    elif kind in ("ObservationEvent", "UserRejectObservation", "AgentErrorEvent"):
        if kind == "ObservationEvent":
            content = event["observation"].get("content") or event["observation"].get("output") or []
            text = text_of(content, where) + text_of(event.get("extended_content"), where)
        else:
            text = event["error"] if kind == "AgentErrorEvent" else f"Action rejected: {event['rejection_reason']}"
        yield {"role": "tool", "tool_call_id": event["tool_call_id"], "content": text}
    elif kind == "Condensation":
        raise BadItem("S102", f"{where}: got a condensed history, whose messages are not those of its answers")
    elif kind not in _KINDS_WITHOUT:
        raise BadItem("S102", f"{where}: got an event {kind!r}, which is not known")
