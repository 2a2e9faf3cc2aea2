"""The fast reader of NeMo Gym lines in which each turn continues the one before: prompts are compared as text, and only
their new ids are parsed.

Most of a line is repetition, because each prompt contains the ones before it. The token lists are cut out of the text,
the rest is parsed as Python values, and the new ids of all turns are parsed at once. Invariants: the result is that of
the general readers (``rows``), or None, and then those read the line: other shapes, prompts that repeat earlier ids in
other text (white space), duplicate keys, anything that is not JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from gymdata.interop.nemo_gym import rows as nemo_rows
from gymdata.rollouts.messages import (
    TOKEN_KEYS,
    chat_calls,
    has_long_number,
    json_text,
    meant_role,
    name_of,
    other_message,
    reasoning_of,
    text_of,
    tool_call,
)
from gymdata.rollouts.ragged import Runs

#: In the order in which the lists must come; a search for one name is many times as fast as for any of three.
_HEADS = [re.compile(rb'"%b"[ \t]*:[ \t]*\[' % name.encode()) for name in TOKEN_KEYS]
_SPACE = b" \t\r\n"
#: How the placeholder of a list begins: a JSON string of NUL and the number of the list.
_PLACE = b'"\\u0000'
#: The same as Python's json writes them when one list follows another.
_NEXT_HEADS = [b', "%b": [' % name.encode() for name in TOKEN_KEYS]
#: What simdjson and the row reader raise for a line that they cannot read.
_REFUSALS = (nemo_rows.BadRow, ValueError, TypeError, KeyError, AttributeError, RuntimeError)


MESSAGE_FIELDS = ("role", "content", "reasoning", "tool_calls", "tool_call_id", "name", "turn")


@dataclass(frozen=True, slots=True)
class Cut:
    """A row without its token lists; ``row`` has no calls. ``delta``: the new ids of each turn's prompt;
    ``generation``: its sampled ids (both int32); ``log_probs``: float64, of the sampled ids of all turns in order."""

    row: nemo_rows.Row
    value: dict[str, Any]
    output: Output
    delta: Runs
    generation: Runs
    log_probs: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Output:
    """The items of a response. ``turns``: the indices of the items that had the token lists."""

    turns: list[int]
    #: The values of ``MESSAGE_FIELDS`` of the response's messages; None when a tool call follows a text that ends a
    #: turn: only ``messages.walk`` then knows which model call an item belongs to.
    messages: list[tuple[Any, ...]] | None
    #: Whether the last model call ended with token lists.
    ended: bool


def cut(line: bytes, parser: Any) -> Cut | None:
    """The row of a line without its newline; None when the general readers must read it. ``parser``: a simdjson
    parser."""
    try:
        found = _lists(line)
        if found is None:
            return None
        rest, lists = found
        value = _loads(rest, len(lists))
        if value is None:
            return None
        response = value["response"]
        output = _read_output(response["output"], len(lists))
        if output is None:
            return None
        # The output has been read already.
        row = nemo_rows.row_of(value | {"response": response | {"output": []}}, _Values(parser))
        new = _new_ids(lists[::3], lists[1::3])
        if new is None:
            return None
        ids = _numbers(parser, [*new, *lists[1::3]], "i", np.int64)
        log_probs = _numbers(parser, lists[2::3], "d", np.float64)
    except _REFUSALS:
        return None
    if ids is None or log_probs is None:
        return None
    narrow = ids[0].astype(np.int32)
    delta, generation = ids[1][: len(new)], ids[1][len(new) :]
    if log_probs[1] != generation or not (delta[0] and all(generation)) or not (narrow == ids[0]).all():
        return None
    begin = sum(delta)
    return Cut(row, value, output, Runs(narrow[:begin], delta), Runs(narrow[begin:], generation), log_probs[0])


def whole_row(line: bytes, parser: Any, acts: bool = False) -> nemo_rows.Row | None:
    """The row of a line with its model calls, as ``rows.fast`` returns it; None when that must read the line. ``acts``:
    collect what the checks of behavior need."""
    try:
        found = _lists(line)
        if found is None:
            return None
        rest, lists = found
        new = _new_ids(lists[::3], lists[1::3])
        value = _loads(rest, len(lists)) if new is not None else None
        if new is None or value is None:
            return None
        ids = _numbers(parser, [*new, *lists[1::3]], "i", np.int64)
        log_probs = _numbers(parser, lists[2::3], "d", np.float64)
        if ids is None or log_probs is None:
            return None
        placed = _Placed(parser, _calls(_bytes_of(*ids), _bytes_of(*log_probs)))
        row = nemo_rows.row_of(value, placed, acts)
    except _REFUSALS:
        return None
    return row if placed.taken == len(lists) == 3 * len(row.calls) else None


def _bytes_of(values: npt.NDArray[Any], sizes: Sequence[int]) -> list[bytes]:
    """The bytes of each list in ``values``: 8-byte numbers, list after list, of ``sizes`` numbers each."""
    data = values.tobytes()
    return [data[a:b] for a, b in pairwise(accumulate((8 * size for size in sizes), initial=0))]


def _calls(ids: Sequence[bytes], log_probs: Sequence[bytes]) -> list[bytes]:
    """Whole prompt, generation and log-probabilities of each turn, in that order, as bytes. ``ids``: the new ids of
    each prompt, then each generation."""
    found: list[bytes] = []
    held = b""
    for new, generation, chances in zip(ids, ids[len(log_probs) :], log_probs, strict=False):
        prompt = held + new
        found += (prompt, generation, chances)
        held = prompt + generation
    return found


def _loads(rest: bytes, lists: int) -> dict[str, Any] | None:
    """The object of a line with ``lists`` placeholders; None when the text may not mean what orjson reads: long
    numbers, duplicate keys, a text that looks like a placeholder."""
    # Long numbers lose digits; more placeholders than lists: a text of the line looks like one.
    if has_long_number(rest) or rest.count(_PLACE) != lists:
        return None
    value = orjson.loads(rest)
    return value if type(value) is dict and _same_keys(rest, orjson.dumps(value)) else None


def _lists(line: bytes) -> tuple[bytes, list[bytes]] | None:
    """The line with a placeholder for each token list, and the texts of the lists, without brackets; None for lines
    that this reader cannot handle."""
    kept: list[bytes] = []
    lists: list[bytes] = []
    at = 0
    for number, (next_head, heads) in enumerate(cycle(zip(_NEXT_HEADS, _HEADS, strict=True))):
        if line.startswith(next_head, at):
            begin = at + len(next_head)
        elif (head := heads.search(line, at)) is None:
            break
        elif line[head.start() - 1] == ord("\\"):
            return None
        else:
            begin = head.end()
        end = line.find(b"]", begin)
        if end < 0:
            return None
        kept += (line[at : begin - 1], b'%b%d"' % (_PLACE, number))
        lists.append(line[begin:end])
        at = end + 1
    if not lists or len(lists) % len(TOKEN_KEYS):
        return None
    kept.append(line[at:])
    return b"".join(kept), lists


def _same_keys(text: bytes, written: bytes) -> bool:
    """Whether an object's ``text`` has no duplicate keys: as many keys as ``written``, the JSON of its parsed value.
    False when that is not certain."""
    bare, ours = text.translate(None, _SPACE), written.translate(None, _SPACE)
    # Most are equal, which is faster to see than counting keys.
    return bare == ours or (b'\\\\":' not in bare and _keys(bare) == _keys(ours))


def _keys(bare: bytes) -> int:
    return bare.count(b'":') - bare.count(b'\\":')


class _Values(nemo_rows.PlainLists):
    """Python values whose text is simdjson's, because rows are grouped by the text of their prompts."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser

    def text(self, value: Any) -> bytes:
        if isinstance(value, (dict, list)):
            made: bytes = self._parser.parse(orjson.dumps(value)).mini
            return made
        return str(value).encode()


class _Placed(_Values):
    """The same for a line with placeholders, which are replaced by ``lists`` in their order."""

    def __init__(self, parser: Any, lists: Sequence[bytes]) -> None:
        super().__init__(parser)
        self._lists = lists
        self.taken = 0

    def ids(self, values: Any, name: str, turn: int) -> bytes:
        del turn
        at = self.taken
        if values != f"\0{at}" or name != TOKEN_KEYS[at % 3]:
            raise ValueError(name)
        self.taken += 1
        return self._lists[at]

    floats = ids


def _read_output(output: list[Any], count: int) -> Output | None:
    """The output's items without their ``count`` placeholders, which are removed; None unless there are three per turn,
    all in order."""
    turns: list[int] = []
    rows: list[tuple[Any, ...]] = []
    texts: list[str] = []
    reasons: list[str] = []
    calls: list[dict[str, Any]] = []
    at = 0
    #: Whether the model's items so far are not yet a message; whether the last item is a text that ends a turn.
    speaking = closed = False
    plain = ended = True

    def assistant_message(turn: int | None) -> tuple[Any, ...]:
        content, reasoning = "\n".join(texts) if texts else None, "\n".join(reasons) if reasons else None
        called = json_text(calls) if calls else None
        texts.clear()
        reasons.clear()
        calls.clear()
        return "assistant", content, reasoning, called, None, None, turn

    for index, item in enumerate(output):
        if type(item) is not dict:
            return None
        kind = item.get("type")
        if kind == "function_call":
            plain = plain and not closed
            calls.append(tool_call(item))
        elif kind == "reasoning":
            reasons.append(reasoning_of(item))
        elif item.get("role") == "assistant":
            texts.append(text_of(item.get("content")))
            calls += chat_calls(item)
        else:
            if speaking:
                rows.append(assistant_message(None))
            speaking = closed = False
            if kind == "function_call_output":
                called = name_of(item.get("call_id"))
                rows.append(("tool", text_of(item.get("output")), None, None, called, None, None))
            elif meant_role(item.get("role")) is not None:
                return None
            else:
                rows.append(tuple(map(other_message(item).get, MESSAGE_FIELDS)))
            continue
        speaking = item.keys().isdisjoint(TOKEN_KEYS)
        ended = not speaking
        closed = ended and kind != "function_call" and kind != "reasoning"
        if speaking:
            continue
        for name in TOKEN_KEYS:
            if item.pop(name, None) != f"\0{at}":
                return None
            at += 1
        rows.append(assistant_message(len(turns)))
        turns.append(index)
    if speaking:
        rows.append(assistant_message(None))
    return Output(turns, rows if plain else None, ended) if at == count else None


def _new_ids(prompts: Sequence[bytes], generations: Sequence[bytes]) -> list[bytes] | None:
    """The text of each prompt's new ids, after the previous prompt and generation; None when a prompt does not begin
    with these."""
    found = [prompts[0]]
    for (before, prompt), generation in zip(pairwise(prompts), generations[:-1], strict=True):
        at = _after(prompt, 0, before)
        at = _after(prompt, at, generation) if at >= 0 else -1
        if at < 0:
            return None
        found.append(prompt[at:])
    return found


def _after(text: bytes, at: int, part: bytes) -> int:
    """Where the numbers after ``part`` begin; -1 when ``part`` has no numbers, or ``text`` does not have it at
    ``at``."""
    end = at + len(part)
    if not part or part.isspace() or not text.startswith(part, at):
        return -1
    if end == len(text):
        return end
    if text[end] != ord(","):
        return -1
    end += 1
    return end + 1 if text[end : end + 1] == b" " else end


def _numbers(parser: Any, texts: Sequence[bytes], kind: str, dtype: Any) -> tuple[npt.NDArray[Any], list[int]] | None:
    """The numbers of all lists, flat, and the length of each; None when the lengths do not fit."""
    filled = [text for text in texts if text and not text.isspace()]
    if len(filled) == len(texts):
        sizes = [text.count(b",") + 1 for text in texts]
    else:
        sizes = [text.count(b",") + 1 if text and not text.isspace() else 0 for text in texts]
    values = np.frombuffer(parser.parse(b"[%b]" % b",".join(filled)).as_buffer(of_type=kind), dtype)
    return (values, sizes) if len(values) == sum(sizes) else None
