"""The Responses shape of resource servers and agents: the body that a rollout is verified with, and a rollout in an
answer.

Invariants: the task's own row is sent whole, with ``responses_create_params`` made from its messages and tools where
the row has none; every call has an id and every tool message names the call that it answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gymdata.rollouts.messages import (
    JsonObject,
    Message,
    ResponseItem,
    Task,
    holds_ids,
    items_of,
    loads,
    messages_of,
    response_tools,
    walk,
    with_call_ids,
    written_by_model,
)

#: Limits that cut the last generation itself; with the others it is complete.
_CUT = ("max_tokens", "max_context", "repetition")


def task_body(task: Task) -> JsonObject:
    """The task's row with ``responses_create_params``."""
    params = task.row.get("responses_create_params")
    if isinstance(params, Mapping) and params.get("input") is not None:
        return dict(task.row)
    params = {
        **(params if isinstance(params, Mapping) else {}),
        "input": [item for _, item in items_of(with_call_ids(task.messages))],
        "tools": _tools(task),
    }
    return {**task.row, "responses_create_params": params}


def verify_body(task: Task, messages: Sequence[Message], stop_reason: str | None, model: str) -> JsonObject:
    """``task_body`` with the ``response``: everything after the task's own messages, as items."""
    first = len(task.messages)
    output = [item for _, item in items_of(with_call_ids(messages)[first:], first)]
    cut = stop_reason in _CUT
    response = {
        "id": f"resp_{task.task_id}",
        "object": "response",
        "created_at": 0.0,
        "model": model,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": _tools(task),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
    }
    return {**task_body(task), "response": response}


def conversation_of(answer: JsonObject) -> tuple[list[Message], dict[int, ResponseItem], str | None] | None:
    """The rollout in an answer that has ``response.output``: chat messages (``turn``: the model call), for each model call
    the item that holds its token lists, and why it is incomplete. None when the answer has no such thing."""
    response = answer.get("response", answer)
    output = response.get("output") if isinstance(response, Mapping) else None
    if not isinstance(output, list) or not all(isinstance(item, (dict, list)) for item in output):
        return None
    params = answer.get("responses_create_params")
    prompt_items = params.get("input") if isinstance(params, Mapping) else None
    items: dict[int, ResponseItem] = {}
    calls: set[int] = set()
    for call, item in walk(output):
        if written_by_model(item):
            calls.add(call)
            if holds_ids(item):
                items[call] = item
    messages: list[Message] = []
    for message in messages_of(prompt_items, walk(output), {call: call for call in calls}):
        chat = {key: value for key, value in message.items() if value is not None}
        chat.setdefault("content", None)
        if chat.get("tool_calls"):
            chat["tool_calls"] = loads(chat["tool_calls"])
        messages.append(chat)
    details = response.get("incomplete_details") if isinstance(response, Mapping) else None
    cut = details.get("reason") if isinstance(details, Mapping) else None
    return messages, items, str(cut) if cut else None


def _tools(task: Task) -> list[ResponseItem]:
    """The tools in the Responses shape, as the task's row gives them: ``strict`` and all else stay what they are there. A
    field that the shape requires and the row lacks gets its neutral value."""
    params = task.row.get("responses_create_params")
    for tools in (task.row.get("tools"), params.get("tools") if isinstance(params, Mapping) else None, task.tools):
        # Parquet files often hold them as JSON text.
        listed = loads(tools) if isinstance(tools, str) else tools
        if isinstance(listed, list) and listed:
            beside = [
                {k: v for k, v in t.items() if k not in ("type", "function")} if "function" in t else {} for t in listed
            ]
            pairs = zip(beside, response_tools(listed), strict=True)
            return [{"parameters": {}, "strict": False, **extra, **tool} for extra, tool in pairs]
    return []
