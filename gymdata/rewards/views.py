"""A rollout as a reward sees it, while it is collected and from a saved row."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gymdata.errors import DataError
from gymdata.rewards.port import TaskRow, View
from gymdata.rollouts.messages import Message, RolloutRow
from gymdata.rollouts.turns import Turn, expand_prompts, main_turns

#: Columns that ``saved_view`` reads, besides the rollout's id and, for rewards that read tokens, ``turns``.
VIEWED = ("status", "messages", "tools", "task", "extra", "n_turns", "n_generated_tokens")


def view_of(
    *,
    messages: Sequence[Message],
    produced_by: Sequence[int | None],
    task: TaskRow,
    tools: Sequence[Mapping[str, object]] | None,
    turns: Sequence[Turn],
    status: str,
    environment: Mapping[str, object] | None = None,
) -> View:
    """``produced_by``: the model call of each message, None for those of others. ``environment``: its verdict."""
    ids: list[int] = []
    for number, call in enumerate(turns):
        if number:
            ids.extend(int(token) for token in call["prompt_delta_ids"])
        sampled = call["generation_token_ids"]
        ids.extend(sampled.tolist() if hasattr(sampled, "tolist") else sampled)
    first = next((i for i, turn in enumerate(produced_by) if turn is not None), len(messages))
    generated = [m for m, turn in zip(messages, produced_by, strict=True) if turn is not None]
    left = environment or {}
    return {
        "messages": list(messages),
        "prompt": list(messages[:first]),
        "completion": list(messages[first:]),
        "text": (generated[-1].get("content") or "") if generated else "",
        "completion_ids": ids,
        "task": task,
        "tools": tools,
        "turns": turns,
        "status": status,
        "stdout": left.get("stdout"),
        "stderr": left.get("stderr"),
        "exit_code": left.get("exit_code"),
        "output_obj": left.get("output_obj"),
        "directory": left.get("directory"),
    }


def saved_view(row: RolloutRow) -> View | DataError:
    """``view_of`` a row of the rollouts table; without its ``turns``, ``completion_ids`` is empty. The error names the
    rollout and the field whose text is not the JSON that it must be."""
    where, verdict = f"rollout {row['rollout_id']}", None
    # `validate` reports other text; only rewards that take what is in it have a use for it.
    with contextlib.suppress(DataError):
        verdict = _from_json(row, "extra", dict, where).get("environment")
    produced_by = [message.get("turn") for message in row["messages"]]
    # Time may have run out before the first token: then an assistant's messages are the task's own.
    sampled = row["n_generated_tokens"] or not row["n_turns"]
    if sampled and not any(turn is not None for turn in produced_by):
        # No row says it (imported ones): every assistant message counts as a model call.
        numbers = itertools.count()
        produced_by = [next(numbers) if message["role"] == "assistant" else None for message in row["messages"]]
    try:
        return view_of(
            messages=[_chat_message(message, f"{where}, message {n}") for n, message in enumerate(row["messages"])],
            produced_by=produced_by,
            task=_from_json(row, "task", dict, where),
            tools=_from_json(row, "tools", list, where) or None,
            turns=row.get("turns") or [],
            status=row["status"],
            environment=verdict if isinstance(verdict, Mapping) else None,
        )
    except DataError as error:
        return error


def n_turns(rollout: View) -> int:
    """Model calls of a rollout; of one without token ids, its assistant messages after the prompt."""
    turns = rollout.get("turns")
    return len(turns) if turns else sum(m["role"] == "assistant" for m in rollout["completion"])


def conversation_ids(rollout: View) -> tuple[np.ndarray, np.ndarray]:
    """Of the conversation that the rollout's messages are (``main_turns``), as int32: the first prompt, and the last prompt
    with its generation; empty where the rollout has no turns.

    Raises DataError (T209, T210) when the turns are not what was collected.
    """
    turns = rollout["turns"]
    if not turns:
        return np.empty(0, np.int32), np.empty(0, np.int32)
    prompts = expand_prompts(turns)
    first, last = main_turns(turns, prompts)
    generation = np.asarray(turns[last]["generation_token_ids"], dtype=np.int32)
    return prompts[first], np.concatenate((prompts[last], generation))


def _chat_message(message: Message, where: str) -> Message:
    chat = {k: v for k, v in message.items() if v is not None and k not in ("turn", "extra", "tool_calls")}
    chat.setdefault("content", None)
    if message.get("tool_calls"):
        chat["tool_calls"] = _from_json(message, "tool_calls", list, where)
    return {**_from_json(message, "extra", dict, where), **chat}


def _from_json(row: RolloutRow, name: str, kind: type[list[Any]] | type[dict[str, Any]], where: str) -> Any:
    """The value of a column of JSON text; empty for null. Raises DataError for any other text."""
    text = row.get(name)
    if not text:
        return kind()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if value is None and text.strip() == "null":
        return kind()
    calls = name != "tool_calls" or (isinstance(value, list) and all(isinstance(call, dict) for call in value))
    if not isinstance(value, kind) or not calls:
        raise DataError.bad_json(f"{where}, field {name!r}", text, "a list of objects" if kind is list else "an object")
    return value
