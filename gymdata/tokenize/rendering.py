"""The model calls of a conversation that has only text, with the ids that a chat template gives them.

Invariants: a turn's generation is what the template writes of that assistant message, through its end token and no more,
and all else is prompt; a prompt holds the ids of the turns before it wherever the template writes their text again, and
where it does not, it is rendered whole, so that the turn is a break at the very token; every turn is marked as rendered
and has no log-probability (NaN).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gymdata.errors import DataError
from gymdata.rollouts.messages import (
    Message,
    PairRow,
    RolloutRow,
    Tools,
    chat_message,
    loads,
    messages_of,
    object_of,
)
from gymdata.rollouts.turns import Call, TurnEncoder
from gymdata.tokenize.settings import Mask

if TYPE_CHECKING:
    from gymdata.chat.template import TransformersChat

#: A placeholder for the assistant's text: words that no template looks for.
_STAND_IN = "gymdata stands here"


def rendered_row(row: RolloutRow, chat: TransformersChat, mask: Mask = "completion") -> RolloutRow:
    """A rollouts row without turns, with turns rendered from its text. Raises DataError saying why it cannot be
    rendered."""
    messages = [chat_message(m, f"message {n}") for n, m in enumerate(row["messages"])]
    written = generated(row, mask)
    if not written:
        raise DataError("no assistant message that the model wrote")
    encoder = TurnEncoder()
    cut = row["status"] == "truncated"
    for call in calls(messages, written, _tools(row), chat, cut=cut):
        encoder.add(call)
    number = {index: turn for turn, index in enumerate(written)}
    return {
        **row,
        **encoder.columns(),
        "finish_reason": row["finish_reason"] or encoder.turns[-1]["finish_reason"],
        "messages": [{**m, "turn": number.get(n)} for n, m in enumerate(row["messages"])],
    }


def rendered_pair(row: PairRow, chat: TransformersChat) -> PairRow:
    """A pairs row without ids, with the ids and masks of its prompt and both sides rendered from their text. Raises
    DataError saying why it cannot be rendered."""
    prompt = [chat_message(m, f"prompt, message {n}") for n, m in enumerate(row["prompt"])]
    prompts, columns = [], {}
    for side in ("chosen", "rejected"):
        answers = [chat_message(m, f"{side}, message {n}") for n, m in enumerate(row[side])]
        written = [len(prompt) + n for n, m in enumerate(answers) if m["role"] == "assistant"]
        if written[:1] != [len(prompt)]:
            raise DataError(f"{side}: does not begin with a message of the assistant")
        first, *later = calls([*prompt, *answers], written, _tools(row), chat, cut=False)
        ids, mask = [first.generation_token_ids], [np.ones(len(first.generation_token_ids), np.int8)]
        for call in later:
            before = np.concatenate([first.prompt_token_ids, *ids])
            if not np.array_equal(call.prompt_token_ids[: len(before)], before):
                raise DataError(f"{side}: the chat template rewrites earlier turns, so it is not one sequence")
            context = call.prompt_token_ids[len(before) :]
            ids += [context, call.generation_token_ids]
            mask += [np.zeros(len(context), np.int8), np.ones(len(call.generation_token_ids), np.int8)]
        prompts.append(first.prompt_token_ids)
        columns[f"{side}_ids"], columns[f"{side}_mask"] = np.concatenate(ids), np.concatenate(mask)
        columns[f"{side}_logprobs"] = np.full(len(columns[f"{side}_ids"]), np.nan, np.float32)
    if not np.array_equal(prompts[0], prompts[1]):
        raise DataError("the chat template writes the prompt in two ways, depending on the answer")
    return {**row, **columns, "prompt_ids": prompts[0], "rendered": True}


def _tools(row: RolloutRow) -> Tools:
    tools = loads(row.get("tools"))
    return tools if isinstance(tools, list) and tools else None


def calls(
    messages: Sequence[Message], written: Sequence[int], tools: Tools, chat: TransformersChat, *, cut: bool
) -> list[Call]:
    """The model calls that wrote the messages at ``written`` (rising). ``cut``: a limit ended the last one, so it has no
    end token. Raises DataError when the template refuses the conversation, or leaves out what the assistant wrote."""
    model_calls: list[Call] = []
    context: list[int] = []
    closed = ""
    for index in written:
        full_text = chat.text(messages[: index + 1], tools, generate=False)
        before = _before(messages[: index + 1], full_text, tools, chat)
        again = bool(closed) and before.startswith(closed)
        prompt = [*context, *chat.encode(before[len(closed) :])] if again else chat.encode(before)
        ids, ends = chat.encode_with_ends(full_text[len(before) :])
        end = next((k for k in range(len(ids) - 1, -1, -1) if ids[k] in chat.end_of_turn_ids), len(ids) - 1)
        ids, ends = ids[: end + 1], ends[: end + 1]
        if length := cut and index == written[-1] and bool(ids) and ids[-1] in chat.end_of_turn_ids:
            ids, ends = ids[:-1], ends[:-1]
        none = np.full(len(ids), np.nan, np.float32)
        reason = "length" if length else "stop"
        model_calls.append(Call(np.array(prompt, np.int32), np.array(ids, np.int32), none, reason, rendered=True))
        context, closed = [*prompt, *ids], before + full_text[len(before) :][: ends[-1] if ends else 0]
    return model_calls


def _before(messages: Sequence[Message], full_text: str, tools: Tools, chat: TransformersChat) -> str:
    """The part of ``full_text`` before the text of its last message: the prompt that a model would continue. When the
    template changes that text, the part before a placeholder in its place."""
    prompt = chat.text(messages[:-1], tools, generate=True) if len(messages) > 1 else ""
    if prompt and full_text.startswith(prompt):
        return prompt
    for stand_in in ({"content": _STAND_IN}, {"content": "", "reasoning": _STAND_IN}):
        try:
            text = chat.text([*messages[:-1], {"role": "assistant", **stand_in}], tools, generate=False)
        except DataError:
            continue
        head = text[: max(text.rfind(_STAND_IN), 0)]
        if head and full_text.startswith(head):
            return head
    raise DataError("the chat template does not show where the assistant's words begin")


def generated(row: RolloutRow, mask: Mask = "completion") -> list[int]:
    """Indices of the messages that the model wrote: the assistant's, after the task's own messages (``completion``), all of
    them, or the last. Never those that their file gives the weight 0."""
    messages = row["messages"]
    weights = [object_of(loads(m.get("extra"))).get("weight") if m.get("extra") else None for m in messages]
    written = [n for n, m in enumerate(messages) if m["role"] == "assistant" and weights[n] != 0]
    if mask != "completion":
        return written if mask == "assistant" else written[-1:]
    # The messages of the row's task, where it has any.
    task = object_of(loads(row["task"]))
    params = task.get("responses_create_params")
    if isinstance(params, dict):
        task_messages = list(messages_of(params.get("input"), (), {}))
    else:
        named: list[Any] = next((task[key] for key in ("messages", "prompt") if isinstance(task.get(key), list)), [])
        task_messages = [m for m in named if isinstance(m, dict)]
    start = 0
    while start < min(len(task_messages), len(messages)) and _says(task_messages[start]) == _says(messages[start]):
        start += 1
    return [n for n in written if n >= start] or written


def _says(message: Message) -> tuple[Any, Any]:
    return message.get("role"), message.get("content") or ""
