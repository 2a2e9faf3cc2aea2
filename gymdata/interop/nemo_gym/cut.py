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
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from gymdata.interop.nemo_gym import rows as nemo_rows
from gymdata.rollouts.logprobs import POSITIVE_TOLERANCE
from gymdata.rollouts.messages import (
    TOKEN_KEYS,
    chat_calls,
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
_NAMES = [b'"%b"' % name.encode() for name in TOKEN_KEYS]
_OPENING = re.compile(rb"[ \t]*:[ \t]*\[")
#: How the placeholder of a list begins: a JSON string of NUL and the number of the list.
_PLACE = b'"\\u0000'
#: The same as Python's json writes them when one list follows another.
_NEXT_HEADS = [b', "%b": [' % name.encode() for name in TOKEN_KEYS]
#: What simdjson and the row reader raise for a line that they cannot read.
_REFUSALS = (nemo_rows.BadRow, ValueError, TypeError, KeyError, AttributeError, RuntimeError)


#: Numbers of lists that follow each other, and the size of each list.
_Numbers = tuple[npt.NDArray[Any], list[int]]
MESSAGE_FIELDS = ("role", "content", "reasoning", "tool_calls", "tool_call_id", "name", "turn")


class Cut(NamedTuple):
    """A row without its token lists; ``row`` has no calls. ``delta``: the new ids of each turn's prompt;
    ``generation``: its sampled ids (both int32); ``log_probs``: float64, of the sampled ids of all turns in order."""

    row: nemo_rows.Row
    value: dict[str, Any]
    output: Output
    delta: Runs
    generation: Runs
    log_probs: npt.NDArray[np.float64]


class Output(NamedTuple):
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
        found = _parts(line, parser)
        if found is None:
            return None
        value, n_turns, ids, log_probs = found
        response = value["response"]
        output = _read_output(response["output"], n_turns)
        if output is None:
            return None
        # The output has been read already.
        row = nemo_rows.row_of(value | {"response": response | {"output": []}}, nemo_rows.Values(parser))
    except _REFUSALS:
        return None
    narrow = ids[0].astype(np.int32)
    delta, generation = ids[1][:n_turns], ids[1][n_turns:]
    if log_probs[1] != generation or not (delta[0] and all(generation)) or not (narrow == ids[0]).all():
        return None
    begin = sum(delta)
    return Cut(row, value, output, Runs(narrow[:begin], delta), Runs(narrow[begin:], generation), log_probs[0])


class CutRow(NamedTuple):
    """A row in which every turn is complete, without its token lists; ``row`` has no calls. ``new``, ``sampled``: the
    sizes of each turn's new part of the prompt, and of its generation. ``ids``: int64, the new ones of all prompts, then
    those of all generations; ``log_probs``: float64, of the sampled ids."""

    row: nemo_rows.Row
    new: list[int]
    sampled: list[int]
    ids: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float64]


def cut_row(line: bytes, parser: Any, acts: bool = False) -> CutRow | None:
    """The row of a line as ``rows.fast_document`` finds it, but for its token lists; None when that must read the line.
    ``acts``: collect what the checks of behavior need."""
    try:
        found = _parts(line, parser)
        if found is None:
            return None
        value, turns, (ids, sizes), (log_probs, each) = found
        new, sampled = sizes[:turns], sizes[turns:]
        if each != sampled or not (new[0] and all(sampled)):
            return None
        placed = _Placed(parser, sampled)
        row = nemo_rows.row_of(value, placed, acts)
    except _REFUSALS:
        return None
    # Each call was found where its lists were.
    if placed.taken != turns or len(row.calls) != turns:
        return None
    row.calls = []
    return CutRow(row, new, sampled, ids, log_probs)


def _parts(line: bytes, parser: Any) -> tuple[dict[str, Any], int, _Numbers, _Numbers] | None:
    """The object of a line with placeholders for its token lists, the number of turns, the ids (new ones of each prompt,
    then each generation), and the log-probabilities. None when the general readers must read the line."""
    found = _lists(line)
    if found is None:
        return None
    value = _loads(found.rest, len(TOKEN_KEYS) * len(found.new))
    if value is None:
        return None
    ids = _numbers(parser, [*found.new, *found.generations], "i", np.int64)
    log_probs = _numbers(parser, found.log_probs, "d", np.float64)
    return None if ids is None or log_probs is None else (value, len(found.new), ids, log_probs)


def _loads(rest: bytes, lists: int) -> dict[str, Any] | None:
    """The object of a line with ``lists`` placeholders; None when its text may mean another value than the one that
    orjson reads."""
    # A text of the line itself looks like a placeholder.
    if rest.count(_PLACE) != lists:
        return None
    value = orjson.loads(rest)
    return value if type(value) is dict and nemo_rows.is_unambiguous(rest, orjson.dumps(value)) else None


@cache
def _place(number: int) -> bytes:
    return b'%b%d"' % (_PLACE, number)


@cache
def _marks(turn: int) -> tuple[str, str, str]:
    """The texts of a turn's placeholders."""
    first, second, third = (f"\0{len(TOKEN_KEYS) * turn + k}" for k in range(len(TOKEN_KEYS)))
    return first, second, third


class _Lists(NamedTuple):
    """The token lists of a line, as text without brackets, and the ``rest`` with placeholders for them. ``new``: the
    part of each prompt after the previous prompt and generation."""

    rest: bytes
    new: list[bytes]
    generations: list[bytes]
    log_probs: list[bytes]


def _lists(line: bytes) -> _Lists | None:
    """The lists of a line; None when a prompt does not begin with the previous prompt and generation, or a list is
    missing."""
    kept: list[bytes] = []
    new: list[bytes] = []
    generations: list[bytes] = []
    log_probs: list[bytes] = []
    others = ((_NEXT_HEADS[1], _NAMES[1], generations), (_NEXT_HEADS[2], _NAMES[2], log_probs))
    prompt = bytearray()
    at = 0
    while (begin := _opened(line, at, _NAMES[0])) is not None:
        fresh = _continued(line, begin, prompt, generations[-1]) if new and begin >= 0 else begin
        if fresh < 0 or (end := line.find(b"]", fresh)) < 0:
            return None
        added = line[fresh:end]
        if fresh > begin and added.isspace():
            return None
        prompt += added
        new.append(added)
        kept += (line[at : begin - 1], _place(len(kept) // 2))
        at = end + 1
        for head, name, lists in others:
            begin = at + len(head) if line.startswith(head, at) else _opened(line, at, name)
            if begin is None or begin < 0 or (end := line.find(b"]", begin)) < 0:
                return None
            lists.append(line[begin:end])
            kept += (line[at : begin - 1], _place(len(kept) // 2))
            at = end + 1
    if not new:
        return None
    kept.append(line[at:])
    return _Lists(b"".join(kept), new, generations, log_probs)


def _opened(line: bytes, at: int, name: bytes) -> int | None:
    """The position after the opening bracket of the next list of ``name``; None when there are no more, -1 when it is
    inside a text."""
    while (head := line.find(name, at)) >= 0:
        at = head + len(name)
        if line.startswith(b": [", at):
            end = at + 3
        elif (found := _OPENING.match(line, at)) is not None:
            end = found.end()
        else:
            continue
        return end if line[head - 1] != ord("\\") else -1
    return None


def _continued(line: bytes, begin: int, prompt: bytearray, generation: bytes) -> int:
    """The position of a prompt's new numbers, and ``prompt`` becomes its text up to there, which was that of the previous
    prompt; -1 when it does not begin with this and the previous ``generation``, or one of them has no numbers."""
    if not prompt or prompt.isspace() or not generation or generation.isspace():
        return -1
    size = len(prompt)
    # As Python's json writes it: one comparison.
    prompt += b", %b, " % generation
    fresh = begin + len(prompt)
    if line.startswith(prompt, begin) and not line.startswith(b"]", fresh):
        return fresh
    fresh = _after(line, _after(line, begin, prompt[:size]), generation)
    prompt[:] = line[begin : max(fresh, begin)]
    return fresh


class _Placed(nemo_rows.Values):
    """The values of a line with placeholders in the order of the lists; a call is the number of ids that it ``sampled``."""

    def __init__(self, parser: Any, sampled: Sequence[int]) -> None:
        super().__init__(parser)
        self._sampled = sampled
        self.taken = 0

    def call(self, prompt: Any, generation: Any, log_probs: Any, turn: int) -> int:
        del turn
        at = self.taken
        if (prompt, generation, log_probs) != _marks(at):
            raise ValueError(prompt)
        self.taken += 1
        return self._sampled[at]

    def sampled(self, call: int) -> int:
        return call


def _read_output(output: list[Any], count: int) -> Output | None:
    """The output's items without the placeholders of ``count`` turns, which are removed; None unless each turn has
    its own, in order."""
    turns: list[int] = []
    rows: list[tuple[Any, ...]] = []
    texts: list[str] = []
    reasons: list[str] = []
    calls: list[dict[str, Any]] = []
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
        if tuple(item.pop(name, None) for name in TOKEN_KEYS) != _marks(len(turns)):
            return None
        rows.append(assistant_message(len(turns)))
        turns.append(index)
    if speaking:
        rows.append(assistant_message(None))
    return Output(turns, rows if plain else None, ended) if len(turns) == count else None


def _after(line: bytes, at: int, part: bytes | bytearray) -> int:
    """The position of the list's numbers after ``part``; -1 when ``line`` does not have it at ``at``, or ``at`` is -1."""
    end = at + len(part)
    if at < 0 or not line.startswith(part, at):
        return -1
    if line.startswith(b"]", end):
        return end
    if not line.startswith(b",", end):
        return -1
    end += 1 + line.startswith(b" ", end + 1)
    # A comma before the closing bracket is not JSON.
    return end if not line.startswith(b"]", end) else -1


def _numbers(parser: Any, texts: Sequence[bytes], kind: str, dtype: Any) -> _Numbers | None:
    """The numbers of all lists, flat, and the length of each; None when the lengths do not fit."""
    lists = parser.parse(b"[[%b]]" % b"],[".join(texts))
    # The buffer has all numbers of the nested lists.
    values = np.frombuffer(lists.as_buffer(of_type=kind), dtype)
    sizes = [len(numbers) for numbers in lists]
    return (values, sizes) if len(values) == sum(sizes) else None


def all_below(ids: npt.NDArray[np.int64], limit: int) -> bool:
    """Whether all are 0 or more, and less than ``limit``."""
    # Unsigned, negative ones are the largest.
    return not len(ids) or int(ids.view(np.uint64).max()) < limit


def all_negative(log_probs: npt.NDArray[np.float64]) -> bool:
    """Whether all are finite and at most 0, but for rounding."""
    # The maximum is NaN where any is.
    return not len(log_probs) or bool(log_probs.max() <= POSITIVE_TOLERANCE and log_probs.min() > -np.inf)
