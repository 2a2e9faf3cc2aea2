"""Chat messages and tasks as plain values, messages in columns, and items of the Responses shape as chat messages.

Invariants: what one model call wrote (reasoning, text, calls) is one assistant message, and the other way about;
any JSON is taken, and what is no text becomes JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import xxhash

from gymdata.errors import DataError, UsageError, counted, option
from gymdata.rollouts.ragged import Ints, list_parts, offsets_of, places

if TYPE_CHECKING:
    import pyarrow as pa

#: A chat message as a plain dict: role, content, and optionally reasoning, tool_calls, tool_call_id, name.
#: ``tool_calls`` is a list of ``{"id": str, "type": "function", "function": {"name": str, "arguments": dict}}``.
Message = dict[str, Any]
#: A tool as chat templates take it: ``{"type": "function", "function": {"name", "description", "parameters"}}``.
ToolDefinition = dict[str, Any]
Tools = Sequence[ToolDefinition] | None
#: A call of ``tool_calls``; a message in a table holds them as JSON text.
ToolCall = dict[str, Any]
#: An item of the Responses shape: a message, a reasoning, a function call or its output.
ResponseItem = dict[str, Any]
#: An object of the JSON that requests, answers and the files of other programs have.
JsonObject = dict[str, Any]
#: A row of a table with all of its columns or those that were read (``gymdata.rollouts.schema``), and such rows of the
#: rollouts, of pairs and of scores; a line of failures.jsonl.
TableRow = dict[str, Any]
RolloutRow = TableRow
PairRow = TableRow
ScoreRow = TableRow
FailureRow = TableRow
#: A row of a task file, whose fields are the user's.
TaskRow = Mapping[str, Any]
#: How a tool's result begins when it is an error message.
TOOL_ERROR = r'(?i)^\s*(\{\s*"error"\s*:\s*[^nf\s]|error\b|traceback \(most recent call last\))'
#: Markup of tool calls in models' text.
SPELLED_CALL = (
    r"<tool_call>|<function_call>|<function=|\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_call|<｜tool▁call|"
    r'"name"\s*:\s*"[^"]*"\s*,\s*"(arguments|parameters)"\s*:'
)


#: Substrings of the types of content parts that are not text; none of these is sampled or trained.
NOT_TEXT = ("image", "audio", "video", "file")


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the task file. ``row`` is the whole source row, kept for rewards and environments."""

    task_id: str
    messages: list[Message]
    tools: list[ToolDefinition] | None
    row: TaskRow
    content_hash: str


def split_tasks(task_ids: Iterable[str], share: float, seed: int = 0) -> set[str]:
    """The tasks of the held-out side: ``share`` of the distinct ones, at least one and never all, drawn by seeded hash.

    Raises UsageError when there are fewer than two tasks or the share is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise UsageError.bad_value("split", share, "a share between 0 and 1, such as 0.1")
    distinct = set(task_ids)
    if len(distinct) < 2:
        raise UsageError(
            f"split: got {counted(len(distinct), 'task')}, expected at least 2, so that one can be held out",
            hint=f"give data of more tasks, or hold out none: {option('split', 0)} in training, elsewhere no "
            f"{option('split')} or {option('test_share')}",
        )
    drawn = sorted(distinct, key=lambda t: (xxhash.xxh3_64_intdigest(t.encode(), seed), t))
    return set(drawn[: min(max(1, round(share * len(drawn))), len(drawn) - 1)])


def split_messages(messages: pa.ListArray, n_turns: np.ndarray) -> tuple[pa.ListArray, pa.ListArray]:
    """Each rollout's messages before the model's first one, and from there on.

    The model's messages carry the number of their turn. Where none does (imported files), they are the last ``n_turns``
    assistant messages.
    """
    offsets, flat = list_parts(messages)
    import pyarrow.compute as pc

    generated = np.flatnonzero(flat.field("turn").is_valid().to_numpy(zero_copy_only=False))
    first = np.append(generated, len(flat))[np.searchsorted(generated, offsets[:-1])]
    unnumbered = np.flatnonzero(first >= offsets[1:])
    if len(unnumbered):
        by_model = pc.fill_null(pc.equal(flat.field("role"), "assistant"), False)
        assistant = np.flatnonzero(by_model.to_numpy(zero_copy_only=False))
        low, high = np.searchsorted(assistant, offsets[unnumbered]), np.searchsorted(assistant, offsets[unnumbered + 1])
        index = np.maximum(high - np.maximum(np.asarray(n_turns)[unnumbered], 1), low)
        first[unnumbered] = np.append(assistant, len(flat))[index]
    cut = np.minimum(first, offsets[1:])
    return _sublists(flat, offsets[:-1], cut), _sublists(flat, cut, offsets[1:])


def joined_contents(messages: pa.ListArray, role: str | None = None) -> pa.Array:
    """The contents of each list's messages that have any, of one ``role`` or all, as one text."""
    import pyarrow as pa
    import pyarrow.compute as pc

    offsets, flat = list_parts(messages)
    content = pc.fill_null(flat.field("content"), "")
    chosen = pc.not_equal(content, "")
    if role is not None:
        chosen = pc.and_(chosen, pc.fill_null(pc.equal(flat.field("role"), role), False))
    bounds = offsets_of(chosen.to_numpy(zero_copy_only=False))[offsets]
    return pc.binary_join(pa.ListArray.from_arrays(bounds.astype(np.int32), content.filter(chosen)), "\n\n")


def call_text(call: Any) -> str:
    """A tool call in a line: ``name({…})``. Quotes within its arguments are as the model meant them, to be searched."""
    function = object_of(object_of(call).get("function"))
    arguments = json_text(function.get("arguments"))
    return f"{function.get('name')}({arguments})".replace('\\"', '"')


def _sublists(flat: pa.Array, begin: Ints, end: Ints) -> pa.ListArray:
    """Lists of ``flat[begin[i]:end[i]]``."""
    import pyarrow as pa

    indices, offsets = places(begin, end - begin)
    return pa.ListArray.from_arrays(offsets.astype(np.int32), flat.take(pa.array(indices)))


PROMPT, GENERATION, LOG_PROBS = TOKEN_KEYS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
#: Roles of the table of messages.
ROLES = ("system", "user", "assistant", "tool", "function", "environment", "other")
#: Synonyms of roles: a row that uses one is refused, because its messages would have no known role.
_OTHER_NAMES = dict.fromkeys(("human",), "user") | dict.fromkeys(("gpt", "ai", "bot", "chatbot", "model"), "assistant")
#: Items, each with the number of its call.
Walked = Iterable[tuple[int, ResponseItem]]


def written_by_model(item: ResponseItem) -> bool:
    """Whether a model call produced the item."""
    return item.get("type") in ("reasoning", "function_call") or item.get("role") == "assistant"


def holds_ids(item: ResponseItem) -> bool:
    """Whether an item that the model wrote has prompt or generation ids."""
    return bool(item.get(PROMPT)) or bool(item.get(GENERATION))


def meant_role(role: Any) -> str | None:
    """The role that ``role`` is a synonym of; None when it is not one."""
    return _OTHER_NAMES.get(role.lower()) if isinstance(role, str) else None


def walk(items: Iterable[Any]) -> list[tuple[int, ResponseItem]]:
    """Each item with the number of the call that wrote it, or that it follows (-1: none). Nested lists are flattened."""
    walked = list[tuple[int, ResponseItem]]()
    call, is_open = -1, False
    #: Where the function calls after a message with ids begin: ids at their end make them a call of their own.
    after_message: int | None = None
    for item in flat_items(items):
        if not written_by_model(item):
            is_open, after_message = False, None
        else:
            kind, has_ids = item.get("type"), holds_ids(item)
            is_after = after_message is not None and kind == "function_call"
            if is_after and has_ids:
                call += 1
                walked[after_message:] = [(call, waiting) for _, waiting in walked[after_message:]]
            elif not is_after and not is_open:
                call += 1
            if has_ids or not is_after:
                is_open = not has_ids
                ends_message = has_ids and kind not in ("function_call", "reasoning")
                after_message = len(walked) + 1 if ends_message else None
        walked.append((call, item))
    return walked


def flat_items(items: Iterable[Any]) -> Iterator[Any]:
    """The items of nested lists of any depth, in order."""
    open_lists = [iter(items)]
    while open_lists:
        for item in open_lists[-1]:
            if isinstance(item, list):
                open_lists.append(iter(item))
                break
            yield item
        else:
            open_lists.pop()


_ROLES = {"developer": "system"}
_KNOWN_ROLES = frozenset({"system", "user", "assistant", "tool", "function", "environment"})


#: Writes JSON as RFC 8259 has it.
STRICT = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def messages_of(prompt: Any, output: Walked, turn_of: Mapping[int, int]) -> Iterator[Message]:
    """The conversation of a row. ``output``: its items as ``walk`` gives them; ``turn_of``: the turn that each model call
    became."""
    if isinstance(prompt, str):
        yield {"role": "user", "content": prompt}
    elif isinstance(prompt, list):
        yield from _merged(walk(prompt), {})
    yield from _merged(output, turn_of)


def _merged(items: Walked, turn_of: Mapping[int, int]) -> Iterator[Message]:
    for (call, by_model), walked in groupby(items, lambda walked: (walked[0], written_by_model(walked[1]))):
        of_call = [item for _, item in walked]
        if by_model:
            yield _answer(of_call, turn_of.get(call))
        else:
            yield from map(_other_message, of_call)


def _answer(items: Iterable[ResponseItem], turn: int | None) -> Message:
    """What one call wrote as one message."""
    content, reasoning, calls = list[str](), list[str](), list[ToolCall]()
    for item in items:
        if item.get("type") == "reasoning":
            reasoning.append(text_of(item.get("summary") or item.get("content")))
        elif item.get("type") == "function_call":
            calls.append(_tool_call(item))
        else:
            content.append(text_of(item.get("content")))
            chat_calls = item.get("tool_calls")
            calls += [c for c in chat_calls if isinstance(c, dict)] if isinstance(chat_calls, list) else []
    return {
        "role": "assistant",
        "content": "\n".join(content) if content else None,
        "reasoning": "\n".join(reasoning) if reasoning else None,
        "tool_calls": json_text(calls) if calls else None,
        "turn": turn,
    }


def _other_message(item: ResponseItem) -> Message:
    """The message of an item that the model did not write."""
    if item.get("type") == "function_call_output":
        return {"role": "tool", "content": text_of(item.get("output")), "tool_call_id": _name(item.get("call_id"))}
    role = str(item.get("role") or "other")
    role = _ROLES.get(role, role)
    message = {"role": role if role in _KNOWN_ROLES else "other", "content": text_of(item.get("content"))}
    return message | {k: item[k] for k in ("tool_call_id", "name") if isinstance(item.get(k), str)}


def _tool_call(item: ResponseItem) -> ToolCall:
    """A function call item in the chat shape."""
    arguments = item.get("arguments")
    if isinstance(arguments, str) and isinstance(value := loads(arguments), dict):
        arguments = value
    function = {"name": str(item.get("name")), "arguments": arguments}
    return {"id": _name(item.get("call_id")), "type": "function", "function": function}


def _name(value: Any) -> str | None:
    return None if value is None else str(value)


def text_of(content: Any) -> str:
    """Content as text: parts are joined, other values become JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part for part in content if part is not None]
        texts = [(p["text"] if "text" in p else p.get("refusal", "")) if isinstance(p, dict) else p for p in parts]
        return "".join([text if isinstance(text, str) else json_text(text) for text in texts])
    return json_text(content)


def chat_tools(tools: Any) -> str:
    """Responses tools in the chat shape, as JSON."""
    listed = tools if isinstance(tools, list) else [] if tools is None else [tools]
    return json_text(
        [
            {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
            if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool
            else tool
            for tool in listed
        ]
    )


def row_tools(row: JsonObject) -> str:
    """The tools of a NeMo Gym row in the chat shape, as JSON: as its rollout had them where gymdata wrote the row, whose
    request has less of them, else those of its request."""
    tools = object_of(row.get("gymdata")).get("tools")
    request = object_of(row.get("responses_create_params"))
    return json_text(tools) if isinstance(tools, list) else chat_tools(request.get("tools"))


def response_tools(tools: Any) -> list[Any]:
    """Chat tools in the Responses shape."""
    listed = tools if isinstance(tools, list) else []
    return [
        {"type": "function", **t["function"]} if isinstance(t, dict) and isinstance(t.get("function"), dict) else t
        for t in listed
    ]


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """``messages`` as the table has them, in which each call has an id, and each tool message that of the call that it
    answers."""
    rows: list[Message] = []
    unanswered: list[str] = []
    for number, message in enumerate(messages):
        row = dict(message)
        calls = message.get("tool_calls")
        calls = loads(calls) if isinstance(calls, str) else calls
        if isinstance(calls, list) and calls and all(isinstance(call, dict) for call in calls):
            calls = [{**call, "id": call.get("id") or f"call_{number}_{index}"} for index, call in enumerate(calls)]
            row["tool_calls"] = json_text(calls)
            unanswered = [call["id"] for call in calls]
        elif message["role"] == "tool":
            name = message.get("tool_call_id") or (unanswered[0] if unanswered else None)
            unanswered = [other for other in unanswered if other != name]
            row["tool_call_id"] = name
        rows.append(row)
    return rows


def items_of(messages: Sequence[Message], first: int = 0) -> Iterator[tuple[int | None, ResponseItem]]:
    """Items for messages (rows of the table), each with the turn that it ends, if it ends one. Ids count from ``first``."""
    for number, message in enumerate(messages, first):
        call, content = message.get("tool_call_id"), message.get("content") or ""
        if message["role"] == "tool" and call is not None:
            yield None, {"type": "function_call_output", "call_id": call, "output": content}
        elif message["role"] != "assistant":
            named = {k: message[k] for k in ("name", "tool_call_id") if message.get(k) is not None}
            yield None, {"role": message["role"], "content": content, "type": "message", **named}
        else:
            items = list(_model_items(message, number))
            for item in items[:-1]:
                yield None, item
            yield message.get("turn"), items[-1]


def _model_items(message: Message, number: int) -> Iterator[ResponseItem]:
    calls = [c for c in json_list(message.get("tool_calls")) if isinstance(c, dict)]
    if message.get("reasoning") is not None:
        summary = [{"text": message["reasoning"], "type": "summary_text"}]
        yield {"id": f"rs_{number}", "summary": summary, "type": "reasoning"}
    if message.get("content") or (message.get("content") is not None and not calls) or not calls:
        shown: list[Any] = [{"annotations": [], "text": message.get("content") or "", "type": "output_text"}]
        yield {"id": f"msg_{number}", "content": shown, "role": "assistant", "status": "completed", "type": "message"}
    for index, call in enumerate(calls):
        inner = call.get("function")
        function = inner if isinstance(inner, dict) else call
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json_text(arguments if arguments is not None else {})
        yield {
            "arguments": text,
            "call_id": call.get("id"),
            "name": function.get("name"),
            "type": "function_call",
            "id": f"fc_{number}_{index}",
            "status": "completed",
        }


def chat_message(message: Message, where: str) -> Message:
    """A message of a rollouts row as chat templates take it, the arguments of its calls as objects where they are the JSON
    text of one. Raises DataError for invalid tool calls."""
    chat = {k: v for k, v in message.items() if v is not None and k not in ("turn", "extra", "tool_calls")}
    if message.get("tool_calls"):
        calls = loads(message["tool_calls"])
        if not isinstance(calls, list):
            raise DataError.bad_json(f"{where}, field 'tool_calls'", message["tool_calls"], "a list")
        for index, call in enumerate(calls):
            function = object_of(object_of(call).get("function"))
            arguments = loads(function.get("arguments"))
            if isinstance(arguments, dict):
                calls[index] = {**call, "function": {**function, "arguments": arguments}}
        chat["tool_calls"] = calls
    return {"content": None, **chat}


def call_arguments(function: Mapping[str, Any]) -> JsonObject:
    """The arguments of a call, which may be JSON text; empty text and null are an empty object. Raises DataError for what is
    no object, and for numbers that JSON has not (NaN, infinity)."""
    arguments = function.get("arguments")
    value = {} if arguments is None or arguments == "" else arguments
    value = loads(value) if isinstance(value, str) else value
    if not isinstance(value, dict) or value != json.loads(json.dumps(value), parse_constant=str):
        reason = "the arguments of a call are not a JSON object"
        error = DataError(f"{reason}: {function.get('name')}: got {json_text(arguments)[:100]}")
        error.reason = reason
        raise error
    return value


def loads(text: Any) -> Any:
    """The value of a JSON column; None when it is null or not JSON."""
    if not isinstance(text, str):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def json_list(text: str | None) -> list[Any]:
    """The list of a JSON column; empty where it is null. Raises ValueError for a text that is not the JSON of a list."""
    values = loads(text) if text else []
    if not isinstance(values, list):
        raise ValueError(f"got {text!r:.60}, expected a list as JSON")
    return values


def drop_nulls(value: Any) -> Any:
    """Arrow gives every struct all keys of the column; a null key means that it was not there."""
    if isinstance(value, dict):
        return {k: drop_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [drop_nulls(v) for v in value]
    return value


def object_of(value: Any) -> JsonObject:
    """``value``, a JSON object; an empty one for any other value."""
    return value if isinstance(value, dict) else {}


def field_at(row: Mapping[str, Any], path: str) -> Any:
    """A field of a row by its name, or dotted where it is inside another; None when it is missing."""
    value: Any = row
    if path in row:
        return row[path]
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


#: Levels of a row above the arguments of a call, at most.
_LEVELS_ABOVE = 12


def storable(arguments: Any) -> bool:
    """Whether rows can hold the arguments of a call: no number beyond 64 bits, no lone surrogate, fewer than 250 levels.
    Others stay text."""
    for _ in range(_LEVELS_ABOVE):
        arguments = [arguments]
    try:
        orjson.dumps(arguments)
    except TypeError:
        return False
    return True


def json_text(value: Any) -> str:
    """``value`` as strict JSON: a number that is not finite becomes its name, as text."""
    try:
        return STRICT.encode(value)
    except ValueError:
        # By Python's json, which keeps integers of any size.
        named = json.loads(json.dumps(value, ensure_ascii=False), parse_constant=str)
        return json.dumps(named, ensure_ascii=False, separators=(",", ":"))
