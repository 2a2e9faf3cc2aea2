"""Rollouts and pairs as text for other trainers: TRL, OpenAI fine-tuning, verl.

Invariants: each format's writer counts what it cannot hold, so that the loss is reported; messages keep their order and
their text. Token ids and log-probabilities are in none of these formats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gymdata.rollouts.messages import json_text, loads, parsed
from gymdata.store.lines import spelled

Losses = Counter[str]
#: A row in another format, or None when it has no place there.
Writer = Callable[[Mapping[str, Any], Losses], dict[str, Any] | None]
_OPENAI_ROLES = frozenset({"system", "user", "assistant", "tool", "function", "developer"})

IDS, LOG_PROBS, REWARDS = "token ids", "log-probabilities", "rewards"
REASONING, ROLES = "messages' reasoning", "roles that the format lacks (now user)"
CALLS = "tool calls and what answers them, as messages of their own"
TOOLS = "tools, as a part of the prompt"
ENDS = "where the last generation ended (a chat template closes it in its own way)"
CALL_TEXT = "tool calls as they were sampled (a chat template writes them its own way)"
EMPTY = "rollouts without an assistant message"


def trl_messages(row: Mapping[str, Any], lost: Losses) -> dict[str, Any] | None:
    """``messages`` (and ``tools``): conversational language modelling, for SFT."""
    _count(row, lost)
    messages = [chat_message(m) for m in row["messages"]]
    if not any(m["role"] == "assistant" for m in messages):
        lost[EMPTY] += 1
        return None
    return {"messages": messages} | _tools(row)


def trl_prompt_completion(row: Mapping[str, Any], lost: Losses) -> dict[str, Any] | None:
    """``prompt`` up to the first assistant message, ``completion`` from it on."""
    _count(row, lost)
    messages = [chat_message(m) for m in row["messages"]]
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), None)
    if first is None:
        lost[EMPTY] += 1
        return None
    return {"prompt": messages[:first], "completion": messages[first:]} | _tools(row)


def trl_preference(pair: Mapping[str, Any], lost: Losses) -> dict[str, Any] | None:
    """``prompt``, ``chosen`` and ``rejected`` of a pair (and ``tools``), with its margin."""
    lost[IDS] += bool(len(pair["chosen_ids"]) or len(pair["rejected_ids"]))
    lost[LOG_PROBS] += bool(len(pair["chosen_logprobs"]) or len(pair["rejected_logprobs"]))
    lost[ENDS] += bool(len(pair["chosen_ids"]) or len(pair["rejected_ids"]))
    lost[CALL_TEXT] += any(_calls(pair[side]) for side in ("chosen", "rejected"))
    made: dict[str, Any] = {side: [chat_message(m) for m in pair[side]] for side in ("prompt", "chosen", "rejected")}
    lost["weights other than 1"] += pair["weight"] != 1
    return made | _tools(pair) | {"margin": spelled(pair["margin"])}


def openai(row: Mapping[str, Any], lost: Losses) -> dict[str, Any] | None:
    """OpenAI's fine-tuning rows: ``messages`` with arguments as text, ``tools``."""
    _count(row, lost)
    messages = []
    for message in row["messages"]:
        made = chat_message(message)
        lost[REASONING] += made.pop("reasoning_content", None) is not None
        if made["role"] not in _OPENAI_ROLES:
            lost[ROLES] += 1
            made["role"] = "user"
        for call in made.get("tool_calls", ()):
            function = call.get("function")
            if isinstance(function, dict) and not isinstance(function.get("arguments"), str):
                arguments = function.get("arguments")
                function["arguments"] = json_text(arguments if arguments is not None else {})
        messages.append(made)
    if not any(m["role"] == "assistant" for m in messages):
        lost[EMPTY] += 1
        return None
    return {"messages": messages} | _tools(row)


def verl(row: Mapping[str, Any], lost: Losses) -> dict[str, Any] | None:
    """A row of verl's prompt table: the first prompt, and what the task knows of its answer."""
    _count(row, lost)
    messages = row["messages"]
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    lost["everything from the first answer on"] += first < len(messages)
    lost[CALLS] += any(m["role"] == "tool" for m in messages[:first])
    # verl gives a model the tools of its own configuration.
    lost[TOOLS] += has_tools(row)
    task = loads(row["task"])
    task = task if isinstance(task, dict) else {}
    truth = next((task[k] for k in ("answer", "ground_truth", "expected_answer", "solution") if k in task), None)
    lost["ground truth (none known in the task)"] += truth is None
    return {
        "data_source": str(task.get("data_source") or task.get("source") or "gymdata"),
        "prompt": [{"role": m["role"], "content": m["content"] or ""} for m in messages[:first]],
        "ability": str(task.get("ability") or ""),
        "reward_model": {"style": "rule", "ground_truth": truth if isinstance(truth, str) else json_text(truth)},
        "extra_info": {
            "index": row["rollout_index"],
            "task_id": row["task_id"],
            "rollout_id": row["rollout_id"],
            "reward": row["reward"],
            "task": row["task"],
            "tools": row["tools"],
        },
    }


def chat_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of the table in the shape of chat templates: no nulls, calls as objects."""
    made: dict[str, Any] = {"role": message["role"], "content": message["content"]}
    text = message["tool_calls"]
    calls = None if text is None else _finite(text)
    if isinstance(calls, list) and calls:
        made["tool_calls"] = calls
    elif made["content"] is None:
        made["content"] = ""
    for name, key in _OF_MESSAGES:
        value = message[name]
        if value is not None:
            made[key] = value
    return made


#: Column of messages → key.
_OF_MESSAGES = (("reasoning", "reasoning_content"), ("tool_call_id", "tool_call_id"), ("name", "name"))


def _finite(text: Any) -> Any:
    """A JSON column, numbers that are not finite spelled; None when it is null or no JSON."""
    try:
        value, plain = parsed(text)
    except (TypeError, AttributeError, ValueError, RecursionError):
        return None
    return value if plain else spelled(value)


def _calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(m.get("tool_calls") and m.get("turn") is not None for m in messages)


def has_tools(row: Mapping[str, Any]) -> bool:
    """Whether a rollout or pair was given tools."""
    return bool(_tools(row))


def _tools(row: Mapping[str, Any]) -> dict[str, Any]:
    tools = _finite(row.get("tools"))
    return {"tools": tools} if isinstance(tools, list) and tools else {}


def _count(row: Mapping[str, Any], lost: Losses) -> None:
    lost[IDS] += row["n_turns"] > 0
    lost[LOG_PROBS] += row["n_turns"] > 0
    lost[ENDS] += row["n_turns"] > 0
    lost[CALL_TEXT] += _calls(row["messages"])
    lost[REWARDS] += row["reward"] is not None
    lost["which turn wrote which message"] += row["n_turns"] > 0
    lost["breaks and branches"] += row["n_breaks"] > 0


#: What the writers of rollouts read. Turns are looked at before, for what no consumer may take.
COLUMNS = (
    "rollout_id",
    "task_id",
    "rollout_index",
    "reward",
    "n_turns",
    "n_breaks",
    "messages",
    "tools",
    "task",
    "turns",
)
#: Format → (its writer, the table it is made from).
WRITERS: dict[str, tuple[Writer, str]] = {
    "trl-messages": (trl_messages, "rollouts"),
    "trl-prompt-completion": (trl_prompt_completion, "rollouts"),
    "trl-preference": (trl_preference, "pairs"),
    "openai": (openai, "rollouts"),
    "verl": (verl, "rollouts"),
}
