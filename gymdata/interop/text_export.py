"""Rollouts and pairs as text for other trainers: TRL, OpenAI fine-tuning, verl.

Invariants: each format's writer counts what it cannot hold, so that the loss is reported; messages keep their order and
their text. Token ids and log-probabilities are in none of these formats.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from gymdata.rollouts.messages import has_long_number, json_text, loads, parsed
from gymdata.rollouts.ragged import list_parts
from gymdata.rollouts.schema import MESSAGE
from gymdata.store.columns import to_rows
from gymdata.store.lines import spelled

if TYPE_CHECKING:
    import pyarrow as pa

#: A message as ``rows`` gives it: the columns of ``_SAID``, the value of its calls, and whether it has calls that a turn
#: wrote. A dict of each would take as long to make as the message in the other format.
Said = tuple[str, str | None, str | None, str | None, str | None, Any, bool]
_SAID = ("role", "content", "reasoning", "tool_call_id", "name")
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


def rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The rows of a batch as the writers take them: messages as ``Said``, and no turns, which are only checked."""
    chats = [field.name for field in batch.schema if _is_chat(field.type)]
    said = [_said(batch.column(name)) for name in chats]
    rest = to_rows(batch.drop_columns([name for name in batch.schema.names if name in (*chats, "turns")]))
    for row, *messages in zip(rest, *said, strict=True):
        yield row | dict(zip(chats, messages, strict=True))


def _is_chat(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) and kind.value_type == MESSAGE)


def _said(messages: pa.ListArray) -> Iterator[list[Said]]:
    offsets, flat = list_parts(messages)
    columns = [_listed(flat.field(name)) for name in _SAID]
    calls = _listed(flat.field("tool_calls"))
    of_turn = _listed(flat.field("turn").is_valid())
    sampled = [bool(text) and known for text, known in zip(calls, of_turn, strict=True)]
    # Looked for in all of them at once, what hardly any has.
    careful = has_long_number("".join(filter(None, calls)).encode())
    every = zip(*columns, map(_finite if careful else _plain, calls), sampled, strict=True)
    return (list(islice(every, size)) for size in np.diff(offsets).tolist())


def _listed(array: pa.Array) -> list[Any]:
    values: list[Any] = array.to_numpy(zero_copy_only=False).tolist()
    return values


def trl_messages(row: Mapping[str, Any], lost: Losses) -> dict[str, Any] | None:
    """``messages`` (and ``tools``): conversational language modelling, for SFT."""
    _count(row, lost)
    messages = [chat_message(*m) for m in row["messages"]]
    if not any(m["role"] == "assistant" for m in messages):
        lost[EMPTY] += 1
        return None
    return {"messages": messages} | _tools(row)


def trl_prompt_completion(row: Mapping[str, Any], lost: Losses) -> dict[str, Any] | None:
    """``prompt`` up to the first assistant message, ``completion`` from it on."""
    _count(row, lost)
    messages = [chat_message(*m) for m in row["messages"]]
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
    made: dict[str, Any] = {side: [chat_message(*m) for m in pair[side]] for side in ("prompt", "chosen", "rejected")}
    lost["weights other than 1"] += pair["weight"] != 1
    # Of imported pairs nobody said it; TRL reads a number.
    margin = {} if math.isnan(pair["margin"]) else {"margin": spelled(pair["margin"])}
    return made | _tools(pair) | margin


def openai(row: Mapping[str, Any], lost: Losses) -> dict[str, Any] | None:
    """OpenAI's fine-tuning rows: ``messages`` with arguments as text, ``tools``."""
    _count(row, lost)
    messages = []
    for role, content, reasoning, *more in row["messages"]:
        if reasoning is not None:
            lost[REASONING] += 1
        if role not in _OPENAI_ROLES:
            lost[ROLES] += 1
            role = "user"
        made = chat_message(role, content, None, *more)
        for call in made.get("tool_calls", ()):
            function = call.get("function")
            if isinstance(function, dict) and not isinstance(arguments := function.get("arguments"), str):
                function["arguments"] = json_text(arguments if arguments is not None else {})
        messages.append(made)
    if not any(m["role"] == "assistant" for m in messages):
        lost[EMPTY] += 1
        return None
    return {"messages": messages} | _tools(row)


def verl(row: Mapping[str, Any], lost: Losses) -> dict[str, Any] | None:
    """A row of verl's prompt table: the first prompt, and what the task knows of its answer."""
    _count(row, lost)
    messages = [{"role": role, "content": content or ""} for role, content, *_ in row["messages"]]
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
        "prompt": messages[:first],
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


def chat_message(
    role: str,
    content: str | None,
    reasoning: str | None,
    tool_call_id: str | None,
    name: str | None,
    calls: Any,
    _sampled: bool,
) -> dict[str, Any]:
    """A message of the table in the shape of chat templates: no nulls, calls as objects."""
    made: dict[str, Any] = {"role": role, "content": content}
    if isinstance(calls, list) and calls:
        made["tool_calls"] = calls
    elif content is None:
        made["content"] = ""
    if reasoning is not None:
        made["reasoning_content"] = reasoning
    if tool_call_id is not None:
        made["tool_call_id"] = tool_call_id
    if name is not None:
        made["name"] = name
    return made


def _finite(text: str | None) -> Any:
    """A JSON column, numbers that are not finite spelled; None when it is null or no JSON."""
    if text is None:
        return None
    try:
        value, plain = parsed(text)
    except (ValueError, RecursionError):
        return None
    try:
        return value if plain else spelled(value)
    except RecursionError:
        # Too deep for any writer, which then names its row.
        return value


def _plain(text: str | None) -> Any:
    """The same of a text without long numbers."""
    try:
        return None if text is None else orjson.loads(text)
    except ValueError:
        return _finite(text)


def _calls(messages: Sequence[Said]) -> bool:
    return any(sampled for *_, sampled in messages)


def has_tools(row: Mapping[str, Any]) -> bool:
    """Whether a rollout or pair was given tools."""
    return bool(_tools(row))


def _tools(row: Mapping[str, Any]) -> dict[str, Any]:
    tools = _known_tools(row.get("tools"))
    return {"tools": tools} if isinstance(tools, list) and tools else {}


#: Many rollouts are given the same.
_known_tools = lru_cache(16)(_finite)


def _count(row: Mapping[str, Any], lost: Losses) -> None:
    lost[IDS] += row["n_turns"] > 0
    lost[LOG_PROBS] += row["n_turns"] > 0
    lost[ENDS] += row["n_turns"] > 0
    lost[CALL_TEXT] += _calls(row["messages"])
    lost[REWARDS] += row["reward"] is not None
    lost["which turn wrote which message"] += row["n_turns"] > 0
    lost["breaks and branches"] += row["n_breaks"] > 0


#: What the writers of rollouts read; turns are looked at before, for what no consumer may take. verl's knows the task, too.
COLUMNS = ("rollout_id", "reward", "n_turns", "n_breaks", "messages", "tools", "turns")
VERL_COLUMNS = (*COLUMNS, "task_id", "rollout_index", "task")
#: Format → (its writer, the table it is made from).
WRITERS: dict[str, tuple[Writer, str]] = {
    "trl-messages": (trl_messages, "rollouts"),
    "trl-prompt-completion": (trl_prompt_completion, "rollouts"),
    "trl-preference": (trl_preference, "pairs"),
    "openai": (openai, "rollouts"),
    "verl": (verl, "rollouts"),
}
