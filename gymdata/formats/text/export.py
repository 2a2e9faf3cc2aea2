"""Rollouts and pairs as lines of messages for other trainers: TRL, OpenAI fine-tuning.

Invariants: each format's writer counts what it cannot hold, so that the loss is reported; messages keep their order and
their text. Token ids and log-probabilities are in none of these formats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from gymdata.formats.text.chat_text import COMPLETION, Chat, Lines, Mask, Pieces, Shape, add_lists, by_message, distinct
from gymdata.rollouts.messages import JsonObject, json_text, loads
from gymdata.rollouts.ragged import Ints, Ragged
from gymdata.store.lines import name_non_finite

if TYPE_CHECKING:
    import pyarrow as pa

Losses = Counter[str]

IDS, LOG_PROBS, REWARDS = "token ids", "log-probabilities", "rewards"
REASONING, ROLES = "messages' reasoning", "roles that the format lacks (now user)"
CALLS = "tool calls and what answers them, as messages of their own"
TOOLS = "tools, as a part of the prompt"
ENDS = "where the last generation ended (a chat template closes it in its own way)"
CALL_TEXT = "tool calls as they were sampled (a chat template writes them its own way)"
EMPTY = "rollouts without an assistant message"
UNTRAINED = "that messages of weight 0 are not trained (the format's trainer does not read it)"


def _arguments_as_text(calls: list[Any]) -> list[Any]:
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and not isinstance(arguments := function.get("arguments"), str):
            function["arguments"] = json_text(arguments if arguments is not None else {})
    return calls


_NAMES = (("tool_call_id", "tool_call_id"), ("name", "name"))
#: As chat templates read messages: no nulls, arguments of calls as objects.
TRL = Shape((("reasoning", "reasoning_content"), *_NAMES))
_OPENAI_ROLES = frozenset({"system", "user", "assistant", "tool", "function", "developer"})
OPENAI = Shape(_NAMES, _OPENAI_ROLES, _arguments_as_text)


#: What is before the prompt, the chosen and the rejected messages of a line.
TRL_SIDES = (b'{"prompt":[', b'],"chosen":[', b'],"rejected":[')
NEMO_RL_SIDES = (b'{"context":[', b'],"completions":[{"rank":0,"completion":[', b']},{"rank":1,"completion":[')


def preferences(begins: Sequence[bytes], batch: pa.RecordBatch, lost: Losses) -> Lines:
    """A line per pair, with its tools and its margin where the format has a place. ``begins``: one of those above."""
    prompt, *sides = (Chat(batch.column(name), TRL) for name in ("prompt", "chosen", "rejected"))
    has_ids, has_log_probs = (
        np.logical_or(*(Ragged.of(batch.column(f"{side}_{suffix}")).lengths > 0 for side in ("chosen", "rejected")))
        for suffix in ("ids", "logprobs")
    )
    calls = np.logical_or(*(side.rows(side.sampled()) for side in sides))
    weighted = batch.column("weight").to_numpy(zero_copy_only=False) != 1
    counts = {IDS: has_ids, LOG_PROBS: has_log_probs, ENDS: has_ids, CALL_TEXT: calls, "weights other than 1": weighted}
    _add_counts(lost, counts)
    pieces, margins = Pieces(), batch.column("margin").to_pylist()
    # Imported pairs may have no margin; TRL expects a number, so the key is left out.
    ends = [b"" if m != m else b',"margin":' + orjson.dumps(name_non_finite(m)) for m in margins]
    if begins is NEMO_RL_SIDES:
        lost["margins"] += sum(map(bool, ends))
        ends = [b"}]"] * len(ends)
        if "tools" in batch.schema.names:
            lost[TOOLS] += sum(has_tools({"tools": text}) for text in batch.column("tools").to_pylist())
            batch = batch.drop_columns(["tools"])
    chats = zip(begins, (prompt, *sides), strict=True)
    lists = [(begin, chat.pieces(pieces, chat.leads())) for begin, chat in chats]
    return _lines(pieces, lists, batch, pieces.add(ends) + np.arange(len(ends)))


def conversations(
    begin: bytes, shape: Shape, batch: pa.RecordBatch, lost: Losses, *, split: bool = False, label: Mask | None = None
) -> Lines:
    """A line per rollout with an assistant message. ``begin``: the JSON up to the first message; ``split``: the messages
    from the first assistant message on are in ``completion``; ``label``: of each rollout, written as its ``label``."""
    import pyarrow as pa

    chat = Chat(batch.column("messages"), shape)
    is_assistant = chat.of_role("assistant".__eq__)
    has_assistant = chat.rows(is_assistant)
    count_common(batch, chat, lost)
    lost_reasoning = chat.not_null("reasoning") & ("reasoning" not in dict(shape.texts))
    _add_counts(lost, {REASONING: lost_reasoning, ROLES: chat.of_role(shape.lacks), EMPTY: ~has_assistant})
    lost[UNTRAINED] += 0 if shape is OPENAI else int(chat.untrained().sum())
    if not has_assistant.all():
        batch, label = batch.filter(pa.array(has_assistant)), None if label is None else label[has_assistant]
        chat = Chat(batch.column("messages"), shape)
        is_assistant = chat.of_role("assistant".__eq__)
    pieces, leads = Pieces(), chat.leads()
    if split:
        first = np.flatnonzero(is_assistant)
        leads[first[np.searchsorted(first, chat.offsets[:-1])]] = COMPLETION
    more = [] if label is None else [pieces.add([b',"label":false', b',"label":true']) + label]
    return _lines(pieces, [(begin, chat.pieces(pieces, leads))], batch, *more)


def _lines(pieces: Pieces, lists: Sequence[tuple[bytes, Ragged]], batch: pa.RecordBatch, *more: Ints) -> Lines:
    """A line per row of ``batch``: each list's opening text and messages (n lists of pieces), then the tools, and of each
    array of ``more``, (n,), the row's piece."""
    n = batch.num_rows
    units = np.arange(n + 1)
    parts = [part for begin, chat in lists for part in (Ragged(np.full(n, pieces.add([begin]), np.int32), units), chat)]
    tools = add_lists(pieces, *distinct(batch.column("tools"))) if "tools" in batch.schema.names else np.full(n, -1)
    end = pieces.add([b"]", b'],"tools":', b"}\n"])
    parts.append(by_message([end + (tools >= 0), tools, *more, np.full(n, end + 2)], units))
    return Lines(n, pieces.joined(Ragged.interleaved(parts)[0].values))


def _add_counts(lost: Losses, masks: Mapping[str, Mask]) -> None:
    for name, mask in masks.items():
        lost[name] += int(mask.sum())


def has_tools(row: JsonObject) -> bool:
    """Whether a rollout or pair was given tools."""
    tools = _known_tools(row.get("tools"))
    return isinstance(tools, list) and bool(tools)


#: Many rollouts have the same tools.
_known_tools = lru_cache(16)(loads)


def count_common(batch: pa.RecordBatch, chat: Chat, lost: Losses) -> None:
    """Count what none of the text formats can hold of rollouts."""
    of_turns, broken = (batch.column(name).to_numpy(zero_copy_only=False) > 0 for name in ("n_turns", "n_breaks"))
    rewarded = batch.column("reward").is_valid().to_numpy(zero_copy_only=False)
    by_turn = dict.fromkeys((IDS, LOG_PROBS, ENDS, "which turn wrote which message"), of_turns)
    calls = chat.rows(chat.sampled())
    _add_counts(lost, by_turn | {CALL_TEXT: calls, REWARDS: rewarded, "breaks and branches": broken})
