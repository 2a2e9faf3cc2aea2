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
    items_of,
    loads,
    response_tools,
    with_call_ids,
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
