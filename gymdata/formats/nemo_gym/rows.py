"""One NeMo Gym row: its value, its model calls as arrays, and its messages as the checks see them.

A line is read by ``cut``, or where that cannot be done by Python's json, which names row, turn and position. Invariant: both
give the same row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from gymdata.errors import json_kind, json_value
from gymdata.formats.conversion.importing import BadItem
from gymdata.formats.nemo_gym.cut import RENDERED, Call, UncutError, cut_line
from gymdata.formats.text.words import as_float, number_of
from gymdata.rollouts.failures import Failure, failure_of
from gymdata.rollouts.messages import (
    GENERATION,
    LOG_PROBS,
    NOT_TEXT,
    PROMPT,
    TOOL_ERROR,
    JsonObject,
    ResponseItem,
    flat_items,
    holds_ids,
    meant_role,
    walk,
    written_by_model,
)
from gymdata.rollouts.turn_columns import ASSISTANT, SYSTEM, TOOL, USER
from gymdata.store.lines import NON_FINITE, RepeatedKeyError, row_lines, unique_keys
from gymdata.store.paths import Source

_GROUP_KEYS = ("group_id", "task_id")
#: The position of the row's task in its file of tasks. Every file counts from 0, so only the prompt tells two tasks apart.
_POSITION_KEYS = ("_ng_task_index", "task_index")
_SETTINGS = ("temperature", "top_p", "top_k", "min_p")
_ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER}
#: Where the metadata of a request has what its policy sees or hears, beside the messages.
_MEDIA_URL = re.compile(r"\b(?:image|audio|video)_url(?=\\*['\"]\s*:)")
#: How the names of files of failed attempts end.
_SIDECAR = "_failures.jsonl"


class BadRow(BadItem):
    """Why a row cannot be used, and what the violation says: ``detail``, and in ``more`` the place, what was expected and
    what is there."""

    def __init__(self, code: str, detail: str, **more: Any) -> None:
        places = [f"{name} {more[name]}" for name in ("turn", "position") if more.get(name) is not None]
        values = [f"{word} {more[word]}" for word in ("expected", "got") if more.get(word)]
        super().__init__(code, "; ".join(filter(None, (detail, ", ".join(places), *values))))
        self.detail, self.more = detail, more


@dataclass(slots=True)
class Entry:
    """A message: an item, or all items of a model call. ``role``: its position in ``ROLES``, -1 for others; ``item``: the
    number of its first item; ``turn``: of its model call in the output, else -1."""

    role: int
    item: int
    turn: int = -1
    #: Whether it has tool calls, and text or reasoning.
    calls: bool = False
    says: bool = False
    texts: list[str] = field(default_factory=list)
    #: Of a tool's result: whether it is an error; the id, as JSON, for which there is no earlier call.
    fails: bool = False
    unanswered: str | None = None


#: Reads the token lists of an item; its second argument is the number of the model call.
CallOf = Callable[[ResponseItem, int], Call | None]


@dataclass(slots=True)
class Row:
    """``value``: its token lists may be the numbers of their calls only. ``output``: the items of its response, each with
    the number of the call that wrote it or that it follows. ``calls``: None for a call without ids."""

    value: JsonObject
    output: list[tuple[int, ResponseItem]]
    calls: list[Call | None]
    entries: list[Entry]
    rollout_id: str | None
    group: str
    #: Identifies the prompt where the group is an id of the row.
    given: str
    reward: float | None
    settings: dict[str, Any]
    #: Whether the last call was cut at a token limit; None when the row does not say.
    cut: bool | None
    offers_tools: bool
    #: Why its reward is none.
    failure: Failure | None = None


class Attempt(NamedTuple):
    """A failed attempt that has no response to read."""

    value: JsonObject
    failure: Failure


def failures_file(path: Path) -> Path:
    """The file of failed attempts that NeMo Gym writes next to a file of rollouts."""
    return path.with_name(f"{path.stem}{_SIDECAR}")


def main_file(path: Path) -> Path | None:
    """The file of rollouts whose failed attempts ``path`` has; None for any other file."""
    main = path.with_name(path.name.removesuffix(_SIDECAR) + ".jsonl")
    return main if path.name.endswith(_SIDECAR) and main.is_file() else None


def read_rows(source: Source) -> Iterator[tuple[int, bytes, Row | Attempt | BadRow]]:
    """(line, its text, the row, or why there is none) of a file."""
    of_failures = main_file(source.path) is not None
    for number, line in row_lines(source):
        yield number, line, read_any(line, of_failures)


def read_any(line: bytes, of_failures: bool) -> Row | Attempt | BadRow:
    """The row, or why there is none. ``of_failures``: it is of a file of failed attempts."""
    try:
        row = read_row(line)
        row.failure = _failure_of(row.value, of_failures)
        return row
    except BadRow as bad:
        return _failed_attempt(line, of_failures) or bad


def _failure_of(value: JsonObject, of_failures: bool) -> Failure | None:
    """Why a row has no reward; ``of_failures``: it is of a file of failed attempts."""
    failure = failure_of("nemo-gym", value)
    if of_failures and (failure is None or failure.is_rollout):
        return Failure("environment", f"a row of *{_SIDECAR}", _SIDECAR)
    return failure


def _failed_attempt(line: bytes, of_failures: bool) -> Attempt | None:
    """A row that cannot be read because its attempt failed; None for any other row."""
    try:
        value = _load(line)
    except BadRow:
        return None
    failure = _failure_of(value, of_failures)
    return None if failure is None or failure.is_rollout else Attempt(value, failure)


def read_row(line: bytes) -> Row:
    """Raises BadRow."""
    try:
        value, cut = cut_line(line)
        calls = enumerate(cut)
        row = _row_of(value, lambda item, _: _cut_call(item, calls))
        if next(calls, None) is None:
            return row
    except (UncutError, BadRow, RecursionError):
        pass  # Python's json reads it, or names what is wrong
    return read_carefully(line)


def read_carefully(line: bytes) -> Row:
    """The row by Python's json. Raises BadRow."""
    value = _load(line)
    try:
        if b"\\ud" in line.lower():
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return _row_of(value, _call_of)
    except UnicodeEncodeError as error:
        raise BadRow("S101", "text with a lone surrogate, which is not Unicode") from error
    except RecursionError as error:
        raise BadRow("S101", "nested too deeply") from error


def _load(line: bytes) -> JsonObject:
    """A row as Python objects. Raises BadRow S101 for what is no JSON object, S102 for duplicate keys."""
    try:
        # With its line end, an error at the end would be reported on line 2.
        text = line.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow("S101", f"not UTF-8: {error.reason} at byte {error.start}") from error
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except RepeatedKeyError as error:
        raise BadRow("S102", str(error)) from error
    except (ValueError, RecursionError) as error:
        raise BadRow("S101", f"not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise BadRow("S101", f"got {json_kind(value)}, expected an object")
    return value


def _walked(items: list[Any]) -> list[tuple[int, ResponseItem]]:
    """The items of lists, which some writers nest, as ``walk`` gives them. Raises BadRow for what is no object."""
    if not all(type(item) is dict for item in items):
        items = list(flat_items(items))
        for item in items:
            if not isinstance(item, dict):
                raise BadRow("S102", "an item", expected="an object", got=json_value(item))
    return walk(items)


def _row_of(value: JsonObject, call_of: CallOf) -> Row:
    """The row of a parsed line, whose items have token lists as ``call_of`` reads them. Raises BadRow."""
    response = value.get("response")
    if response is None:
        raise BadRow("S103", "the row has no response", expected="response")
    if not isinstance(response, dict):
        raise BadRow("S102", "response", expected="an object", got=json_value(response))
    output = response.get("output")
    if output is None:
        raise BadRow("S103", "the response has no output", expected="response.output")
    if not isinstance(output, list):
        raise BadRow("S102", "response.output", expected="a list", got=json_value(output))
    reward = value.get("reward")
    try:
        reward = reward_of(reward)
    except BadItem as error:
        raise BadRow("S102", "reward", expected="a number", got=json_value(reward)) from error
    params = value.get("responses_create_params")
    params = params if isinstance(params, dict) else {}
    if (metadata := params.get("metadata")) and (media := _MEDIA_URL.search(str(metadata))):
        detail = f"metadata.{media[0]} (images, audio and video are not trained)"
        raise BadRow("S102", detail, expected="text alone", got=json_kind(metadata))
    request_input = params.get("input")
    conversation = _Conversation(call_of)
    if isinstance(request_input, list):
        conversation.read(_walked(request_input), generated=False)
    elif isinstance(request_input, str):
        conversation.other({"role": "user"}, generated=False)
    walked = _walked(output)
    calls = conversation.read(walked, generated=True)
    details, name, tools = response.get("incomplete_details"), value.get("rollout_id"), params.get("tools")
    reason = details.get("reason") if isinstance(details, dict) else None
    group, given = _group(value, params)
    return Row(
        value=value,
        output=walked,
        calls=calls,
        entries=conversation.entries,
        rollout_id=name if isinstance(name, str) else None,
        group=group,
        given=given,
        reward=reward,
        settings={k: v for k in _SETTINGS if isinstance(v := params.get(k), (int, float))},
        cut=True if reason == "max_output_tokens" else False if response.get("status") == "completed" else None,
        offers_tools=isinstance(tools, list) and len(tools) > 0,
    )


def reward_of(value: Any) -> float | None:
    """The number of a row's reward. Raises BadItem for what says none."""
    return number_of(NON_FINITE.get(value, value) if isinstance(value, str) else value, "reward")


def _group(value: JsonObject, params: JsonObject) -> tuple[str, str]:
    """The group of a row, and what identifies its prompt where the group is an id. A prompt is all that was given."""
    asked, *more = (params.get(key) for key in ("input", "instructions", "tools"))
    prompt = ""
    if asked is not None or any(more):
        prompt = xxhash.xxh3_64_hexdigest(_text([asked, *more] if any(more) else asked))
    for key in _GROUP_KEYS:
        name = value.get(key)
        if isinstance(name, (str, int)):
            # Rows that gymdata wrote have the groups of their run.
            return str(name), "" if isinstance(value.get("gymdata"), dict) else prompt
    positions = (str(name) for key in _POSITION_KEYS if isinstance(name := value.get(key), (str, int)))
    return "-".join(filter(None, [next(positions, ""), prompt])), ""


def _text(value: Any) -> bytes:
    """The text of a prompt, by which rows are grouped."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


class _Conversation:
    """The entries of a row's items, of its input and then of its output."""

    def __init__(self, call_of: CallOf) -> None:
        self._call_of = call_of
        self.entries: list[Entry] = []
        self._count = 0
        self._call_ids: set[Any] = set()

    def read(self, walked: Iterable[tuple[int, ResponseItem]], generated: bool) -> list[Call | None]:
        """The model calls of items. What the model wrote in the input is given, and no call of this rollout."""
        calls: list[Call | None] = []
        for call, item in walked:
            if not written_by_model(item):
                self.other(item, generated)
                continue
            if call >= len(calls):
                self.entries.append(Entry(ASSISTANT, self._count, call if generated else -1, says=not generated))
                calls.append(None)
            if (lists := self._call_of(item, call)) is not None:
                calls[-1] = lists
            self._model(self.entries[-1], item, generated)
            self._count += 1
        return calls

    def _model(self, entry: Entry, item: ResponseItem, generated: bool) -> None:
        kind, chat_calls = item.get("type"), item.get("tool_calls")
        if kind == "function_call":
            self._call_ids.add(_key(item.get("call_id")))
            entry.calls |= generated
            return
        if kind == "reasoning":
            if generated and not entry.says:
                thoughts = chain(_texts(item.get("summary")), _texts(item.get("content")))
                entry.says = bool(item.get("encrypted_content")) or any(map(str.strip, thoughts))
            return
        if isinstance(chat_calls, list) and chat_calls:
            self._call_ids.update(_key(call.get("id")) for call in chat_calls if isinstance(call, dict))
            entry.calls |= generated
        elif generated:
            content = item.get("content")
            texts = list(_texts(content))
            # A refusal is an answer, and so is a part of another kind.
            entry.says |= any(map(str.strip, texts)) or (not texts and isinstance(content, list) and bool(content))
            entry.texts += texts

    def other(self, item: ResponseItem, generated: bool) -> None:
        """A message that the model did not write. Raises BadRow for one with an image or another part that is not text."""
        if generated and holds_ids(item):
            raise BadRow("S102", f"item {self._count}: token ids", expected="none", got=json_value(item.get("role")))
        entry = Entry(-1, self._count)
        content = item.get("content", item.get("output"))
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and any(word in kind for word in NOT_TEXT):
                detail = f"item {self._count}: a content part (images, audio, video and files are not trained)"
                raise BadRow("S102", detail, expected="text", got=json_value(kind))
        if item.get("type") == "function_call_output":
            # Those of the input count only where they answer nothing.
            if _key(item.get("call_id")) not in self._call_ids:
                entry.unanswered = json_value(item.get("call_id"))
            if generated or entry.unanswered is not None:
                entry.role = TOOL
            output = item.get("output")
            entry.fails = generated and any(map(_is_error, (output,) if isinstance(output, str) else _texts(output)))
        else:
            role = item.get("role")
            if (expected := meant_role(role)) is not None:
                raise BadRow("S102", f"item {self._count}: role", expected=repr(expected), got=json_value(role))
            entry.role = _ROLES.get(role, -1) if isinstance(role, str) else -1
        self.entries.append(entry)
        self._count += 1


_is_error = re.compile(TOOL_ERROR).search


def _texts(content: Any) -> Iterator[str]:
    """A text, or those of a list of parts."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text


def _key(value: Any) -> Any:
    """A call's id to look up. A list or object becomes its text, because lists are not hashable."""
    return value if value is None or isinstance(value, (str, int, float)) else _text(value)


def _cut_call(item: ResponseItem, calls: Iterator[tuple[int, Call]]) -> Call | None:
    """The next of the calls that were cut out of the line; None for an item without ids. Raises UncutError for an item that
    has other lists."""
    if item.get(PROMPT) is None and item.get(GENERATION) is None:
        return None
    number, call = next(calls, (None, None))
    if (
        call is None
        or item.get(PROMPT) != [number]
        or item.get(LOG_PROBS) != (None if call.log_probs is None else [number])
    ):
        raise UncutError
    call.rendered = item.get(RENDERED) is True
    return call


def _call_of(item: ResponseItem, turn: int) -> Call | None:
    """The call whose lists an item has; None without ids. Raises BadRow naming the first value that is none of a list."""
    if item.get(PROMPT) is None and item.get(GENERATION) is None:
        return None
    prompt, generation = _token_ids(item, PROMPT, turn), _token_ids(item, GENERATION, turn)
    log_probs = _log_probs(item.get(LOG_PROBS), turn)
    return Call(prompt, generation, log_probs, item.get(RENDERED) is True) if len(prompt) or len(generation) else None


def _token_ids(item: ResponseItem, name: str, turn: int) -> npt.NDArray[Any]:
    values = _listed(item.get(name), name, turn)
    for position, value in enumerate(values):
        if type(value) is not int or not -(2**63) <= value < 2**63:
            raise BadRow("S102", name, turn=turn, position=position, expected="a 64-bit integer", got=json_value(value))
    wide = np.asarray(values, np.int64)
    narrow = wide.astype(np.int32)
    return narrow if (narrow == wide).all() else wide


def _log_probs(values: Any, turn: int) -> npt.NDArray[np.float64] | None:
    if values is None:
        return None
    numbers = []
    for position, value in enumerate(_listed(values, LOG_PROBS, turn)):
        number: Any = NON_FINITE.get(value) if isinstance(value, str) else value
        if type(number) not in (int, float):
            raise BadRow("S102", LOG_PROBS, turn=turn, position=position, expected="a number", got=json_value(value))
        numbers.append(as_float(number))
    return np.asarray(numbers, np.float64)


def _listed(values: Any, name: str, turn: int) -> list[Any]:
    if values is not None and not isinstance(values, list):
        raise BadRow("S102", name, turn=turn, expected="a list", got=json_value(values))
    return values or []
