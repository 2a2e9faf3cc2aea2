"""Rollouts and pairs as lines of messages for other trainers: TRL, OpenAI fine-tuning, NeMo RL.

Invariants: each format's writer counts what it cannot hold, so that the loss is reported; messages keep their order and
their text. Token ids and log-probabilities are in none of these formats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from gymdata.formats import Format
from gymdata.rollouts.messages import JsonObject, Message, TableRow, json_list, json_text, loads, object_of
from gymdata.store.lines import encode

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.formats.conversion.exporting import Export

IDS, LOG_PROBS = "token ids", "log-probabilities"
REASONING, ROLES = "messages' reasoning", "roles that the format lacks (now user)"
CALLS = "tool calls and what answers them, as messages of their own"
TOOLS = "tools, as a part of the prompt"
ENDS = "where the last generation ended (a chat template closes it in its own way)"
CALL_TEXT = "tool calls as they were sampled (a chat template writes them its own way)"
EMPTY = "rollouts without an assistant message"
UNTRAINED = "that messages of weight 0 are not trained (the format's trainer does not read it)"

#: Columns of rollouts that lines of messages are made of, and that are checked or counted.
COLUMNS = ("rollout_id", "reward", "rewards", "n_turns", "messages", "tools", "turns")
Losses = Counter[str]
#: Fields of a message under their names in TRL's rows, where chat templates read them, and in OpenAI's.
_NAMES = (("tool_call_id", "tool_call_id"), ("name", "name"))
_OF_TRL = (("reasoning", "reasoning_content"), *_NAMES)
_OPENAI_ROLES = {"system", "user", "assistant", "tool", "function", "developer"}


class TextFormat(Format):
    """A format of messages, without what was sampled."""

    #: Whether messages are as OpenAI's fine-tuning takes them.
    for_openai: ClassVar[bool] = False
    suffixes = (".jsonl",)
    columns: ClassVar[Sequence[str] | None] = COLUMNS
    #: Not read from Parquet: even an empty list takes time.
    unread: ClassVar[tuple[str, ...]] = ("turns.finish_reason", "turns.top_log_probs")

    def convert(self, batches: Iterable[pa.RecordBatch], export: Export) -> Iterator[Any]:
        unwritten = ["turns", "rewards"] if self.table == "rollouts" else []
        yield from super().convert((batch.drop_columns(unwritten) for batch in batches), export)

    def fields(self, row: TableRow, prompt: list[JsonObject], completion: list[JsonObject]) -> JsonObject:
        """The columns of a rollout, besides its tools. ``prompt``: its messages before the first of the assistant;
        ``completion``: those from there on."""
        raise NotImplementedError

    def write(self, row: TableRow, lost: Losses) -> Any:
        messages, openai = row["messages"], self.for_openai
        count_common(row, lost)
        if openai:
            lost[REASONING] += sum(message["reasoning"] is not None for message in messages)
            lost[ROLES] += sum(message["role"] not in _OPENAI_ROLES for message in messages)
        else:
            lost[UNTRAINED] += sum(map(is_untrained, messages))
        first = next((n for n, message in enumerate(messages) if message["role"] == "assistant"), None)
        if first is None:
            lost[EMPTY] += 1
            return None
        chat = [chat_message(message, openai=openai) for message in messages]
        return line(self.fields(row, chat[:first], chat[first:]) | tools_field(row))


def preference_parts(row: TableRow, lost: Losses) -> list[list[JsonObject]]:
    """The messages of the prompt, the chosen and the rejected side of a pair. Counts what a line cannot hold of the rest."""
    has_ids = bool(len(row["chosen_ids"]) or len(row["rejected_ids"]))
    lost[IDS] += has_ids
    lost[ENDS] += has_ids
    lost[LOG_PROBS] += bool(len(row["chosen_logprobs"]) or len(row["rejected_logprobs"]))
    lost[CALL_TEXT] += _samples_calls((*row["chosen"], *row["rejected"]))
    lost["weights other than 1"] += row["weight"] != 1
    return [[chat_message(message) for message in row[name]] for name in ("prompt", "chosen", "rejected")]


def line(fields: JsonObject) -> bytes:
    """A line of JSON, with its newline. Raises ``importing.ODD`` for text that JSON cannot hold."""
    return orjson.dumps(fields) + b"\n"


def tools_field(row: TableRow) -> JsonObject:
    """The column of the tools that a rollout or pair was given; none without any."""
    tools = _json_list(row.get("tools") or "", False)
    return {} if tools is None else {"tools": tools}


def chat_message(message: Message, *, openai: bool = False) -> JsonObject:
    """A message of the table as TRL's or OpenAI's: no nulls; OpenAI has no reasoning, and arguments of calls as text."""
    role, content = message["role"], message["content"]
    calls = _json_list(message["tool_calls"], openai) if message["tool_calls"] else None
    chat = {
        "role": "user" if openai and role not in _OPENAI_ROLES else role,
        "content": "" if content is None and calls is None else content,
    }
    if calls is not None:
        chat["tool_calls"] = calls
    for name, key in _NAMES if openai else _OF_TRL:
        if message[name] is not None:
            chat[key] = message[name]
    return chat | {"weight": 0} if is_untrained(message) else chat


@lru_cache(256)  # many rollouts have the same tools, and many calls are alike
def _json_list(text: str, arguments_as_text: bool) -> orjson.Fragment | None:
    """The list of a JSON text, as it is written; None for an empty list. Raises ValueError for any other text."""
    if not (values := json_list(text)):
        return None
    for value in values if arguments_as_text else ():
        function = value.get("function")
        if isinstance(function, dict) and not isinstance(arguments := function.get("arguments"), str):
            function["arguments"] = json_text({} if arguments is None else arguments)
    return orjson.Fragment(encode(values))


def is_untrained(message: Message) -> bool:
    """Whether a message of the assistant is one that its source does not train."""
    extra = message["extra"] if message["role"] == "assistant" else None
    return extra is not None and object_of(loads(extra)).get("weight") == 0


def has_tools(row: TableRow) -> bool:
    """Whether a rollout or pair was given tools."""
    return bool(tools_field(row))


def count_common(row: TableRow, lost: Losses) -> None:
    """Count what none of the text formats can hold of a rollout, besides the kinds of ``Export.account``."""
    for kind in (IDS, LOG_PROBS, ENDS):
        lost[kind] += row["n_turns"] > 0
    lost[CALL_TEXT] += _samples_calls(row["messages"])


def _samples_calls(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the policy called a tool in a turn."""
    return any(message["tool_calls"] and message["turn"] is not None for message in messages)
