"""One NeMo Gym row: its value, its model calls as arrays, and its messages as the checks see them.

Most of a line is repetition, because each prompt contains the ones before it. So the token lists are cut out of the text,
prompts are compared as text, only what is new in them is parsed, all of it at once; orjson reads the rest. A line for which
that may not give the value that Python's json gives goes through Python's json alone, which names row, turn and position.

Invariants: both give the same Row; ids are int64 and log-probabilities float64, never Python lists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from gymdata.errors import json_kind, json_value
from gymdata.formats.conversion.importing import BadItem
from gymdata.formats.text.words import as_float, score
from gymdata.rollouts import turns as encoding
from gymdata.rollouts.failures import Failure, failure_of
from gymdata.rollouts.messages import (
    GENERATION,
    LOG_PROBS,
    NOT_TEXT,
    PROMPT,
    TOKEN_KEYS,
    TOOL_ERROR,
    JsonObject,
    ResponseItem,
    flat_items,
    has_long_number,
    meant_role,
    walk,
    written_by_model,
)
from gymdata.rollouts.turn_columns import ASSISTANT, SYSTEM, TOOL, USER
from gymdata.store.lines import NON_FINITE, RepeatedKeyError, unique_keys

_SPACE = b" \t\r\n"
_NUMERIC = b"0123456789+-.eE," + _SPACE
_GROUP_KEYS = ("group_id", "task_id")
#: The position of the row's task in its file of tasks. Every file counts from 0, so only the prompt tells two tasks apart.
_POSITION_KEYS = ("_ng_task_index", "task_index")
_SETTINGS = ("temperature", "top_p", "top_k", "min_p")
_ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER}
#: Where the metadata of a request has what its policy sees or hears, beside the messages.
_MEDIA_URL = re.compile(r"\b(?:image|audio|video)_url(?=\\*['\"]\s*:)")
#: On an item: its ids were rendered from text, not sampled.
RENDERED = "token_ids_rendered"
#: How the names of files of failed attempts end.
_SIDECAR = "_failures.jsonl"
#: A list's key and bracket. A quote right before a key's colon is never inside a JSON text.
_OPENING = re.compile(rb'"(%b)"[ \t]*:[ \t]*\[' % "|".join(TOKEN_KEYS).encode())
#: The same as Python's json writes them when one list follows another.
_LISTS = [b'"%b":[' % name.encode() for name in TOKEN_KEYS]
_AFTER = dict(pairwise(TOKEN_KEYS))
_NEXT = {a: b', "%b": [' % b.encode() for a, b in pairwise(TOKEN_KEYS)}


class BadRow(Exception):  # noqa: N818 - caught nearby, never shown as an error
    """Why a row cannot be used: the code and what the violation says."""

    def __init__(self, code: str, detail: str, **more: Any) -> None:
        super().__init__(detail)
        self.code, self.detail, self.more = code, detail, more


class TokenList:
    """A list of numbers. Of a prompt ``values`` may be the end only: then it begins with two lists ``before`` it, the
    prompt and the generation of an earlier call."""

    __slots__ = ("before", "values")

    def __init__(self, values: npt.NDArray[Any], before: tuple[TokenList, TokenList] | None = None) -> None:
        self.values, self.before = values, before

    def __len__(self) -> int:
        return len(self.values) if self.before is None else len(self.all_values())

    def __bool__(self) -> bool:
        return self.before is not None or len(self.values) > 0

    def all_values(self) -> npt.NDArray[Any]:
        """All numbers."""
        parts = []
        prompt = self
        while prompt.before is not None:
            parts += [prompt.values, prompt.before[1].values]
            prompt = prompt.before[0]
        if parts:
            self.values, self.before = np.concatenate([prompt.values, *parts[::-1]]), None
        return self.values


class Call(NamedTuple):
    """The lists of a model call, of which at least one is not empty. ``log_probs`` is None without a list."""

    prompt: TokenList
    generation: TokenList
    log_probs: npt.NDArray[np.float64] | None
    #: Whether its ids were rendered from text, not sampled.
    rendered: bool = False

    def ids_alone(self) -> encoding.Call:
        """The call for a ``TurnEncoder``, with ids of 32 bits and no log-probabilities."""
        prompt, generation = (ids.all_values().astype(np.int32) for ids in (self.prompt, self.generation))
        return encoding.Call(prompt, generation, np.empty(0, np.float32), "stop")


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


@dataclass(slots=True)
class Row:
    """``value``: in the output's items token lists are as they were read, ``TokenList`` or Python lists. ``calls`` has None
    for a model call without ids."""

    value: JsonObject
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


def failures_file(path: Path) -> Path:
    """The file of failed attempts that NeMo Gym writes next to a file of rollouts."""
    return path.with_name(f"{path.stem}{_SIDECAR}")


def main_file(path: Path) -> Path | None:
    """The file of rollouts whose failed attempts ``path`` has; None for any other file."""
    main = path.with_name(path.name.removesuffix(_SIDECAR) + ".jsonl")
    return main if path.name.endswith(_SIDECAR) and main.is_file() else None


def failure_in(value: JsonObject, of_failures: bool) -> Failure | None:
    """Why a row has no reward; ``of_failures``: it is of a file of failed attempts."""
    failure = failure_of("nemo-gym", value)
    if of_failures and (failure is None or failure.is_rollout):
        return Failure("environment", f"a row of *{_SIDECAR}", _SIDECAR)
    return failure


def failed_attempt(line: bytes, of_failures: bool) -> tuple[JsonObject, Failure] | None:
    """The value of a row that cannot be read because its attempt failed, and why it did; None for any other row."""
    try:
        value = load(line)
    except BadRow:
        return None
    failure = failure_in(value, of_failures)
    return None if failure is None or failure.is_rollout else (value, failure)


def read_row(line: bytes) -> Row:
    """Raises BadRow."""
    try:
        if (value := _cut_value(line)) is not None:
            return _row_of(value)
    except (BadRow, ValueError, TypeError, KeyError, AttributeError, RuntimeError):
        pass  # Python's json names what is wrong
    return read_carefully(line)


def read_carefully(line: bytes) -> Row:
    """The row by Python's json; its value has Python's lists. Raises BadRow."""
    value = load(line)
    try:
        if b"\\ud" in line.lower():
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return _row_of(value)
    except UnicodeEncodeError as error:
        raise BadRow("S101", "text with a lone surrogate, which is not Unicode") from error
    except RecursionError as error:
        raise BadRow("S101", "nested too deeply") from error


def load(line: bytes) -> JsonObject:
    """A row as Python objects. Raises BadRow S101 for what is no JSON object, S102 for duplicate keys."""
    try:
        # With its line end, an error at the end would be reported on line 2.
        text = line.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow("S101", f"not UTF-8: {error.reason} at byte {error.start}") from error
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except RepeatedKeyError as error:
        raise BadRow("S102", f"the key {error.args[0]!r} is given twice") from error
    except (ValueError, RecursionError) as error:
        raise BadRow("S101", f"not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise BadRow("S101", f"got {json_kind(value)}, expected an object")
    return value


def _cut_value(line: bytes) -> JsonObject | None:
    """The object of a line, with ``TokenList`` in the items of its output; None when its text may mean another value than
    the one that orjson reads."""
    rest: list[bytes] = []
    names: list[str] = []
    texts: list[bytes] = []
    #: For a prompt that begins with the text of an earlier prompt and generation: the numbers of these lists.
    before: list[tuple[int, int] | None] = []
    position, prompt, generation = 0, -1, -1
    #: The text of that prompt.
    prompt_text = bytearray()
    while True:
        if names and (head := _NEXT.get(names[-1])) and line.startswith(head, position + 1):
            name, begin = _AFTER[names[-1]], position + 1 + len(head)
        elif (opening := _OPENING.search(line, position)) is None:
            break
        elif line[opening.start() - 1] == ord("\\"):
            return None
        else:
            name, begin = opening[1].decode(), opening.end()
        fresh = begin
        if name == PROMPT and prompt >= 0 and generation >= 0:
            fresh = _continued(line, begin, prompt_text, texts[generation])
        end = line.find(b"]", fresh)
        if end < 0:
            return None
        number = len(names)
        rest += (line[position:begin], b"%d" % number)
        names.append(name)
        texts.append(line[fresh:end])
        before.append((prompt, generation) if fresh > begin else None)
        if name == PROMPT:
            prompt = number
            if fresh > begin:
                prompt_text += texts[-1]
            else:
                prompt_text[:] = texts[-1]
        elif name == GENERATION:
            generation = number
        position = end
    rest.append(line[position:])
    text = b"".join(rest)
    value = orjson.loads(text)
    written = orjson.dumps(value)
    if type(value) is not dict or not _is_unambiguous(text, written):
        return None
    if sum(map(written.count, _LISTS)) != len(names):
        return None  # a list whose key is spelled in another way
    return value if _placed(value, names, _token_lists(names, texts, before)) else None


def _continued(line: bytes, begin: int, prompt_text: bytearray, generation: bytes) -> int:
    """The position of a prompt's new numbers after ``prompt_text``, of an earlier prompt, and its ``generation``, which is
    added to it; ``begin`` when it does not continue them, or not in the same spelling."""
    if not prompt_text or not generation or prompt_text.isspace() or generation.isspace():
        return begin
    size = len(prompt_text)
    for comma in (b", ", b","):
        prompt_text += comma + generation + comma
        if line.startswith(prompt_text, begin):
            fresh = begin + len(prompt_text)
            # A comma before the bracket is not JSON.
            if line[fresh : fresh + 1] not in (b"]", b" "):
                return fresh
        del prompt_text[size:]
    return begin


def _token_lists(names: Sequence[str], texts: Sequence[bytes], before: Sequence[Any]) -> list[TokenList]:
    """The lists of a line, all ids and all log-probabilities parsed at once."""
    lists: list[TokenList] = [TokenList(np.empty(0, np.int64))] * len(names)
    for kind, dtype, of in (("i", np.int64, (PROMPT, GENERATION)), ("d", np.float64, (LOG_PROBS,))):
        chosen = [k for k, name in enumerate(names) if name in of]
        sizes = [0 if texts[k].isspace() or not texts[k] else texts[k].count(b",") + 1 for k in chosen]
        values = _numbers(b",".join(texts[k] for k, size in zip(chosen, sizes, strict=True) if size), kind, dtype)
        if len(values) != sum(sizes):
            raise ValueError("other than flat lists of numbers")
        end = 0
        for k, size in zip(chosen, sizes, strict=True):
            pair = before[k]
            lists[k] = TokenList(values[end : end + size], pair and (lists[pair[0]], lists[pair[1]]))
            end += size
    return lists


@cache
def fast_parser() -> Any:
    try:
        import simdjson
    except ImportError:
        return None
    return simdjson.Parser()


def _numbers(text: bytes, kind: str, dtype: Any) -> npt.NDArray[Any]:
    """The numbers of a list's text. Raises ValueError or TypeError for anything else, and for numbers beyond 64 bits."""
    if (parser := fast_parser()) is not None:
        return np.frombuffer(parser.parse(b"[%b]" % text).as_buffer(of_type=kind), dtype)
    values = np.asarray(orjson.loads(b"[%b]" % text))
    if text.translate(None, _NUMERIC) or (len(values) and values.dtype.kind not in ("if" if kind == "d" else "i")):
        raise ValueError("other than numbers")
    return values.astype(dtype)


def _placed(value: JsonObject, names: Sequence[str], lists: Sequence[TokenList]) -> bool:
    """Put the lists into the items of the output, where their numbers stand as lists; whether each was there."""
    response = value.get("response")
    output = response.get("output") if isinstance(response, dict) else None
    placed = 0
    for item in _objects(output) if isinstance(output, list) else ():
        if written_by_model(item):
            for name in TOKEN_KEYS:
                number = item.get(name)
                if type(number) is list:
                    # All flat lists of numbers were replaced, so a list of one number is one of these.
                    if len(number) != 1 or type(number[0]) is not int or names[number[0]] != name:
                        return False
                    item[name] = lists[number[0]]
                    placed += 1
    return placed == len(lists)


def _is_unambiguous(text: bytes, written: bytes) -> bool:
    """Whether an object's ``text`` has no duplicate keys and no numbers beyond 64 bits. ``written``: the JSON of its
    parsed value. False when that is not certain."""
    if text == written:
        return True
    bare, ours = text.translate(None, _SPACE), written.translate(None, _SPACE)
    # Most are equal, which is faster to see than anything is counted.
    return bare == ours or (b'\\\\":' not in bare and _keys(bare) == _keys(ours) and not has_long_number(text))


def _keys(bare: bytes) -> int:
    return bare.count(b'":') - bare.count(b'\\":')


def _objects(items: list[Any]) -> Iterable[ResponseItem]:
    """The items of lists, which some writers nest, in order. Raises BadRow for what is no object."""
    if all(type(item) is dict for item in items):
        return items
    flat = list(flat_items(items))
    for item in flat:
        if not isinstance(item, dict):
            raise BadRow("S102", "an item", expected="an object", got=json_value(item))
    return flat


def _row_of(value: JsonObject) -> Row:
    """The row of a parsed line. Raises BadRow."""
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
    conversation = _Conversation()
    if isinstance(request_input, list):
        conversation.read(request_input, generated=False)
    elif isinstance(request_input, str):
        conversation.other({"role": "user"}, generated=False)
    calls = conversation.read(output, generated=True)
    details, name, tools = response.get("incomplete_details"), value.get("rollout_id"), params.get("tools")
    reason = details.get("reason") if isinstance(details, dict) else None
    group, given = _group(value, params)
    return Row(
        value=value,
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
    return score(NON_FINITE.get(value, value) if isinstance(value, str) else value, "reward")


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

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._count = 0
        self._call_ids: set[Any] = set()

    def read(self, items: list[Any], generated: bool) -> list[Call | None]:
        """The model calls of ``items``. What the model wrote in the input is given, and no call of this rollout."""
        calls: list[Call | None] = []
        for call, item in walk(_objects(items)):
            if not written_by_model(item):
                self.other(item, generated)
                continue
            if call >= len(calls):
                self.entries.append(Entry(ASSISTANT, self._count, call if generated else -1, says=not generated))
                calls.append(None)
            prompt, generation = item.get(PROMPT), item.get(GENERATION)
            if prompt is not None or generation is not None:
                ids = token_ids(prompt, PROMPT, call), token_ids(generation, GENERATION, call)
                log_probs = _log_probs(item.get(LOG_PROBS), call)
                if ids[0] or ids[1]:
                    calls[-1] = Call(*ids, log_probs, item.get(RENDERED) is True)
            self._model(self.entries[-1], item, generated)
            self._count += 1
        return calls

    def _model(self, entry: Entry, item: ResponseItem, generated: bool) -> None:
        kind, chat_calls = item.get("type"), item.get("tool_calls")
        if kind == "function_call":
            self._call_ids.add(_key(item.get("call_id")))
        elif kind != "reasoning" and isinstance(chat_calls, list):
            self._call_ids.update(_key(call.get("id")) for call in chat_calls if isinstance(call, dict))
        if not generated:
            return
        if kind == "function_call" or (isinstance(chat_calls, list) and chat_calls):
            entry.calls = True
        elif kind == "reasoning":
            if not entry.says:
                texts = [text for key in ("summary", "content") for text in _texts(item.get(key))]
                entry.says = bool(item.get("encrypted_content")) or any(map(str.strip, texts))
        else:
            content = item.get("content")
            texts = list(_texts(content))
            # A refusal is an answer, and so is a part of another kind.
            entry.says |= any(map(str.strip, texts)) or (not texts and isinstance(content, list) and bool(content))
            entry.texts += texts

    def other(self, item: ResponseItem, generated: bool) -> None:
        """A message that the model did not write. Raises BadRow for one with an image or another part that is not text."""
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


def token_ids(values: Any, name: str, turn: int) -> TokenList:
    """The ids of a list that was read. Raises BadRow naming the first value that is no id."""
    if isinstance(values, TokenList):
        return values
    for position, value in enumerate(_listed(values, name, turn)):
        if type(value) is not int or not -(2**63) <= value < 2**63:
            raise BadRow("S102", name, turn=turn, position=position, expected="a 64-bit integer", got=json_value(value))
    return TokenList(np.asarray(values or (), np.int64))


def _log_probs(values: Any, turn: int) -> npt.NDArray[np.float64] | None:
    if values is None or isinstance(values, TokenList):
        return None if values is None else values.values
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
