"""One NeMo Gym row, parsed by simdjson or by Python's json into one type.

Invariants: both parsers give the same Row or the same BadRow; ids are int64 bytes and log-probabilities float64 bytes,
never Python lists; a value of the wrong type is named with its turn and position.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson
import xxhash

from gymdata.errors import json_kind, json_value
from gymdata.interop.nemo_gym.acts import Acts, RowActs
from gymdata.rollouts.messages import GENERATION, LOG_PROBS, PROMPT, CallBorders, has_long_number, meant_role

#: prompt ids, generation ids (int64 bytes; empty when missing), log-probs (float64 bytes; None when missing).
CallBytes = tuple[bytes, bytes, bytes | None]
_NON_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_SPACE = b" \t\r\n"
#: The common end of the names of both lists of ids.
_IDS = b"_token_ids"
_GROUP_KEYS = ("group_id", "task_id")
#: The position of the row's task in its file of tasks. Every file counts from 0, so only the prompt tells two tasks apart.
_POSITION_KEYS = ("_ng_task_index", "task_index")
_SETTINGS = ("temperature", "top_p", "top_k", "min_p")


class BadRow(Exception):  # noqa: N818 - caught nearby, never shown as an error
    """Why a row cannot be used: the code and what the violation says."""

    def __init__(self, code: str, detail: str, **more: Any) -> None:
        super().__init__(detail)
        self.code, self.detail, self.more = code, detail, more


class Fault(NamedTuple):
    """A fault of a row's shape or messages."""

    code: str
    detail: str | None = None
    turn: int | None = None
    expected: str | None = None
    got: str | None = None


@dataclass(slots=True)
class Row:
    """The data of a row for the checks. ``calls`` has None for a model call without ids."""

    calls: list[CallBytes | None]
    rollout_id: str | None
    group: str
    reward: float | None
    faults: list[Fault] = field(default_factory=list)
    acts: RowActs | None = None
    settings: dict[str, Any] = field(default_factory=dict)


class _Retry(Exception):  # noqa: N818 - caught nearby, never shown as an error
    """simdjson's reader cannot decide; Python's must."""


class RowReader:
    """Reads a line as a row, for validation and import: with simdjson when it can decide, else with Python's json.
    ``acts``: collect what the checks of behavior need."""

    def __init__(self, acts: bool = False) -> None:
        self._parser, self._acts = fast_parser(), acts

    def __call__(self, line: bytes) -> Row:
        """Raises BadRow."""
        found = fast_document(self._parser, line, self._acts) if self._parser is not None else None
        return found[0] if found is not None else slow(line, self._acts)

    def document(self, line: bytes) -> tuple[Row, Any] | None:
        """The row with simdjson's document, which is valid until the next line; None when Python's json must read
        it."""
        return fast_document(self._parser, line) if self._parser is not None else None


def fast_parser() -> Any:
    try:
        import simdjson
    except ImportError:
        return None
    return simdjson.Parser()


def fast_document(parser: Any, line: bytes, acts: bool = False) -> tuple[Row, Any] | None:
    """The row by simdjson with its document, which is valid until the parser's next line, or with Python values; None when
    Python's json must read it."""
    try:
        texts = _IDS not in line
        bare = line if texts else _without_numbers(line)
        value = orjson.loads(bare)
        if not is_unambiguous(bare, orjson.dumps(value)):
            return None
        if texts:
            return row_of(value, Values(parser), acts), value
        lists = _CarefulLists() if _nested_lists(line) else _FastLists()
        document = parser.parse(line)
        get = getattr(document, "get", None)
        if get is None:
            return None
        return row_of(document, lists, acts), document
    except (_Retry, BadRow, ValueError, TypeError, KeyError, AttributeError, RuntimeError):
        # simdjson's refusals come as any of these, UnicodeDecodeError included; the slow way names what is wrong.
        return None


def _nested_lists(line: bytes) -> bool:
    """Whether a list may be directly in a list (simdjson's buffers would flatten it), or a text looks like that."""
    at = line.find(b"[")
    while at >= 0:
        before = line[at - 1]
        if before == 32:
            before = line[at - 2]
        if before in b",[" or before in b"\t\r\n ":
            return True
        at = line.find(b"[", at + 1)
    return False


def _without_numbers(line: bytes) -> bytes:
    """The line with empty lists in place of those without texts, which have no keys."""
    kept: list[bytes] = []
    at = searched = 0
    end = -1
    while (begin := line.find(b"[", searched)) >= 0:
        if end < begin and (end := line.find(b"]", begin)) < 0:
            break
        searched = line.find(b'"', begin, end)
        if searched < 0:
            kept.append(line[at : begin + 1])
            at = searched = end
    kept.append(line[at:])
    return b"".join(kept)


def is_unambiguous(text: bytes, written: bytes) -> bool:
    """Whether an object's ``text`` has no duplicate keys and no numbers beyond 64 bits. ``written``: the JSON of its
    parsed value. False when that is not certain."""
    if text == written:
        return True
    bare, ours = text.translate(None, _SPACE), written.translate(None, _SPACE)
    # Most are equal, which is faster to see than anything is counted.
    return bare == ours or (b'\\\\":' not in bare and _keys(bare) == _keys(ours) and not has_long_number(text))


def _keys(bare: bytes) -> int:
    return bare.count(b'":') - bare.count(b'\\":')


def load(line: bytes) -> dict[str, Any]:
    """A row as Python objects. Raises BadRow S101 for what is no JSON object, S102 for duplicate keys."""
    try:
        # With its line end, an error at the end would be reported on line 2.
        text = line.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow("S101", f"not UTF-8: {error.reason} at byte {error.start}") from error
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise BadRow("S101", f"not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise BadRow("S101", f"got {json_kind(value)}, expected an object")
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for ``json.loads``. Raises BadRow S102 for a key that it has twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [k for k, _ in pairs]
        twice = next(k for k in names if names.count(k) > 1)
        raise BadRow("S102", f"the key {twice!r} is given twice")
    return found


def slow(line: bytes, acts: bool = False) -> Row:
    """The row by Python's json. Raises BadRow."""
    value = load(line)
    if "\\ud" in (lowered := line.decode("utf-8").lower()) and _has_surrogate(value):
        del lowered
        raise BadRow("S101", "text with a lone surrogate, which is not Unicode")
    return row_of(value, PlainLists(), acts)


def _has_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


class _Lists:
    """The token lists of a model call."""

    def call(self, prompt: Any, generation: Any, log_probs: Any, turn: int) -> Any:
        """The call, of which at least one list of ids is given; None when both are empty. Raises BadRow."""
        read = self.ids(prompt, PROMPT, turn), self.ids(generation, GENERATION, turn)
        floats = self.floats(log_probs, LOG_PROBS, turn)
        return (*read, floats) if read[0] or read[1] else None

    def sampled(self, call: Any) -> int:
        """How many ids the call generated."""
        return len(call[1]) // 8

    def ids(self, values: Any, name: str, turn: int) -> bytes:
        raise NotImplementedError

    def floats(self, values: Any, name: str, turn: int) -> bytes | None:
        raise NotImplementedError


class _FastLists(_Lists):
    """Lists out of simdjson's memory."""

    def ids(self, values: Any, name: str, turn: int) -> bytes:
        del name, turn
        return b"" if values is None else bytes(values.as_buffer(of_type="i"))

    def floats(self, values: Any, name: str, turn: int) -> bytes | None:
        del name, turn
        return None if values is None else bytes(values.as_buffer(of_type="d"))

    def text(self, value: Any) -> bytes:
        mini = getattr(value, "mini", None)
        return mini if mini is not None else str(value).encode()

    def is_object(self, value: Any) -> bool:
        return hasattr(value, "get")

    def is_list(self, value: Any) -> bool:
        return hasattr(value, "as_list")


class _CarefulLists(_FastLists):
    """The same for a row that may have a list directly in a list."""

    def ids(self, values: Any, name: str, turn: int) -> bytes:
        _flat(values)
        return super().ids(values, name, turn)

    def floats(self, values: Any, name: str, turn: int) -> bytes | None:
        _flat(values)
        return super().floats(values, name, turn)


def _flat(values: Any) -> None:
    if values is not None and values.mini.count(b"[") != 1:
        raise _Retry


class PlainLists(_Lists):
    """The same out of Python's values."""

    def ids(self, values: Any, name: str, turn: int) -> bytes:
        if values is None:
            return b""
        _expect_list(values, name, turn)
        for position, value in enumerate(values):
            if type(value) is not int or not -(2**63) <= value < 2**63:
                raise BadRow(
                    "S102", name, turn=turn, position=position, expected="a 64-bit integer", got=json_value(value)
                )
        return array("q", values).tobytes()

    def floats(self, values: Any, name: str, turn: int) -> bytes | None:
        if values is None:
            return None
        _expect_list(values, name, turn)
        numbers = []
        for position, value in enumerate(values):
            number: Any = _NON_FINITE.get(value) if isinstance(value, str) else value
            if type(number) not in (int, float):
                raise BadRow("S102", name, turn=turn, position=position, expected="a number", got=json_value(value))
            numbers.append(_float(number))
        return array("d", numbers).tobytes()

    def text(self, value: Any) -> bytes:
        if isinstance(value, str):
            return value.encode("utf-8", "surrogatepass")
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")

    def is_object(self, value: Any) -> bool:
        return isinstance(value, dict)

    def is_list(self, value: Any) -> bool:
        return isinstance(value, list)


class Values(PlainLists):
    """Python values whose text is simdjson's, because rows are grouped by the text of their prompts."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser

    def text(self, value: Any) -> bytes:
        if isinstance(value, (dict, list)):
            made: bytes = self._parser.parse(orjson.dumps(value)).mini
            return made
        return str(value).encode()


def _float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def _expect_list(values: Any, name: str, turn: int) -> None:
    if not isinstance(values, list):
        raise BadRow("S102", name, turn=turn, expected="a list", got=json_value(values))


def row_of(value: Any, lists: Any, acts: bool = False) -> Row:
    """The row of a parsed line. ``lists``: what its objects and lists are, such as ``PlainLists()``. Raises BadRow."""
    response = value.get("response")
    if response is None:
        raise BadRow("S103", "the row has no response", expected="response")
    if not lists.is_object(response):
        raise BadRow("S102", "response", expected="an object", got=json_value(response))
    output = response.get("output")
    if output is None:
        raise BadRow("S103", "the response has no output", expected="response.output")
    if not lists.is_list(output):
        raise BadRow("S102", "response.output", expected="a list", got=json_value(output))
    reward = value.get("reward")
    if isinstance(reward, str):
        reward = _NON_FINITE.get(reward, reward)
    if reward is not None and type(reward) not in (int, float):
        raise BadRow("S102", "reward", expected="a number", got=json_value(reward))
    params = value.get("responses_create_params")
    given: Any = params.get("input") if lists.is_object(params) else None
    conversation = _Conversation(Acts() if acts else None)
    if lists.is_list(given):
        for item in given:
            conversation.item(item, lists)
        conversation.begin()
    elif isinstance(given, str):
        conversation.other("user")
    for item in output:
        conversation.item(item, lists)
    name = value.get("rollout_id")
    return Row(
        calls=conversation.calls,
        rollout_id=name if isinstance(name, str) else None,
        group=_group(value, given, lists),
        reward=None if reward is None else _float(reward),
        faults=conversation.faults if conversation.spoke else [*conversation.faults, Fault("M404")],
        acts=conversation.acts_of(value, response, lists),
        settings=_settings(params) if lists.is_object(params) else {},
    )


def _group(value: Any, given: Any, lists: Any) -> str:
    for key in _GROUP_KEYS:
        name = value.get(key)
        if isinstance(name, (str, int)):
            return str(name)
    prompt = xxhash.xxh3_64_hexdigest(lists.text(given)) if given is not None else ""
    positions = (str(name) for key in _POSITION_KEYS if isinstance(name := value.get(key), (str, int)))
    return "-".join(filter(None, [next(positions, ""), prompt]))


def _settings(params: Any) -> dict[str, Any]:
    found = {name: params.get(name) for name in _SETTINGS}
    return {name: v for name, v in found.items() if isinstance(v, (int, float))}


def _key(value: Any, lists: Any) -> Any:
    """A call's id to look up. A list or object becomes its text, because lists are not hashable."""
    return value if value is None or isinstance(value, (str, int, float)) else lists.text(value)


class _Conversation:
    """Walks items in order: cuts them into model calls and watches the order of roles."""

    __slots__ = ("_acts", "_before", "_borders", "_call_ids", "_count", "calls", "faults", "spoke")

    def __init__(self, acts: Acts | None) -> None:
        self.calls: list[CallBytes | None] = []
        self._acts = acts
        self.faults: list[Fault] = []
        self.spoke = False
        self._borders = CallBorders()
        self._before: str | None = None
        self._count = 0
        self._call_ids: set[Any] = set()

    def begin(self) -> None:
        """The output begins: what the model wrote before is given, and no call of this rollout."""
        self.calls.clear()
        self._borders = CallBorders()
        if self._acts is not None:
            self._acts.begin()

    def acts_of(self, value: Any, response: Any, lists: Any) -> RowActs | None:
        """What the model did in the output, if requested."""
        if self._acts is None:
            return None
        generated = [0 if call is None else lists.sampled(call) for call in self.calls]
        return self._acts.of_row(value, response, lists, generated)

    def item(self, item: Any, lists: Any) -> None:
        """One item of input or output."""
        # Nearly all are plain: a call for each costs as much as the rest of this.
        if type(item) is not dict and not lists.is_object(item):
            if lists.is_list(item):
                # Some writers nest the items of one step in a list.
                for inner in item:
                    self.item(inner, lists)
                return
            raise BadRow("S102", "an item", expected="an object", got=json_value(item))
        kind = item.get("type")
        if kind == "function_call":
            self._call_ids.add(_key(item.get("call_id"), lists))
            self._model(item, kind, lists)
        elif kind == "reasoning":
            self._model(item, kind, lists)
        elif kind == "function_call_output":
            self.other("tool")
            if self._acts is not None:
                self._acts.result(item.get("output"), lists)
            if _key(item.get("call_id"), lists) not in self._call_ids:
                got = json_value(item.get("call_id"))
                self.faults.append(
                    Fault("M403", f"item {self._count - 1}", expected="the call_id of an earlier call", got=got)
                )
        else:
            role = item.get("role")
            if role == "assistant":
                self._chat_calls(item, lists)
                self._model(item, kind, lists)
            else:
                if (meant := meant_role(role)) is not None:
                    raise BadRow("S102", f"item {self._count}: role", expected=repr(meant), got=json_value(role))
                self.other(role if isinstance(role, str) else "other")

    def _chat_calls(self, item: Any, lists: Any) -> None:
        """Call ids of an assistant message in the chat shape."""
        calls = item.get("tool_calls")
        if lists.is_list(calls):
            for call in calls:
                if lists.is_object(call):
                    self._call_ids.add(_key(call.get("id"), lists))

    def _model(self, item: Any, kind: Any, lists: Any) -> None:
        self.spoke = True
        call: CallBytes | None = None
        prompt, generation = item.get(PROMPT), item.get(GENERATION)
        if prompt is not None or generation is not None:
            turn = self._borders.count - self._borders.open
            call = lists.call(prompt, generation, item.get(LOG_PROBS), turn)
        begins = self._borders.model(kind, call is not None)
        if begins:
            if self._before == "assistant":
                self.faults.append(Fault("M402", f"item {self._count + 1 - begins}", len(self.calls)))
            self.calls.append(call)
        elif call is not None:
            self.calls[-1] = call
        if self._acts is not None:
            self._acts.model(item, kind, begins, lists)
        self._before = "assistant"
        self._count += 1

    def other(self, role: str) -> None:
        """A message that the model did not write."""
        self._borders.other()
        if role in ("system", "developer") and self._before not in (None, "system", "developer"):
            self.faults.append(Fault("M401", f"item {self._count}"))
        self._before = role
        self._count += 1
