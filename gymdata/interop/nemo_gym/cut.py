"""The fast way from a line to a row whose turns each continue the one before: prompts are compared as text, and only what
is new in them is parsed.

A prompt repeats all that came before it, so most of a line is repetition. The token lists are cut out of the text, the rest
is parsed as Python values, and the new ids of all turns are parsed at once. Invariants: either the same comes out as by the
slow ways, or nothing, and then those look at the line: at other shapes, at any other spelling of what is repeated, at
duplicate keys, at whatever is no JSON.
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
from gymdata.rollouts.messages import TOKEN_KEYS, meant_role, parsed, written_by_model

#: In the order in which the fast way takes lists; a search for one name is many times as fast as for any of three.
_HEADS = [re.compile(rb'"%b"[ \t]*:[ \t]*\[' % name.encode()) for name in TOKEN_KEYS]
#: Stands for list n in the values; a text of the row that looks so is not in the place of a list.
_PLACE = "\0{}"
_SPACE = b" \t\r\n"
#: What simdjson's refusals come as.
_REFUSALS = (nemo_rows.BadRow, ValueError, TypeError, KeyError, AttributeError, RuntimeError)


@dataclass(frozen=True, slots=True)
class Cut:
    """A row without its token lists; ``row`` has no calls. ``turns``: where in the response's output the items are that held
    the lists, each with ``delta``, the new ids of its prompt, and ``generation``. ``log_probs``: of all turns, float64."""

    row: nemo_rows.Row
    value: dict[str, Any]
    turns: list[int]
    delta: list[npt.NDArray[np.int32]]
    generation: list[npt.NDArray[np.int32]]
    log_probs: npt.NDArray[np.float64]


def cut(line: bytes, parser: Any) -> Cut | None:
    """The row of a line; None when the slow ways have to look at it. ``parser``: simdjson's."""
    try:
        found = _lists(line)
        if found is None:
            return None
        rest, lists = found
        value, plain = parsed(rest.decode())
        if not plain or type(value) is not dict or not _same_keys(rest, orjson.dumps(value)):
            return None
        response = value["response"]
        places = _take_out(response["output"], len(lists))
        if places is None:
            return None
        # The output was looked at.
        row = nemo_rows.row_of(value | {"response": response | {"output": []}}, _Values(parser))
        new = _new(lists[::3], lists[1::3])
        if new is None:
            return None
        ids = _numbers(parser, [text for pair in zip(new, lists[1::3], strict=True) for text in pair], "i", np.int64)
        log_probs = _numbers(parser, lists[2::3], "d", np.float64)
    except _REFUSALS:
        return None
    if ids is None or log_probs is None or log_probs[1] != ids[1][1::2] or not (ids[1][0] and all(ids[1][1::2])):
        return None
    narrow = ids[0].astype(np.int32)
    if not (narrow == ids[0]).all():
        return None
    parts = [narrow[a:b] for a, b in pairwise(accumulate(ids[1], initial=0))]
    return Cut(row, value, places, parts[::2], parts[1::2], log_probs[0])


def _lists(line: bytes) -> tuple[bytes, list[bytes]] | None:
    """The line with places for its token lists, and the texts of those."""
    kept: list[bytes] = []
    lists: list[bytes] = []
    at = 0
    for number, heads in enumerate(cycle(_HEADS)):
        head = heads.search(line, at)
        if head is None:
            break
        begin = head.end()
        end = line.find(b"]", begin)
        if end < 0 or line[head.start() - 1] == ord("\\"):
            return None
        kept += (line[at : begin - 1], b'"\\u0000%d"' % number)
        lists.append(line[begin:end])
        at = end + 1
    if not lists:
        return None
    kept.append(line[at:])
    return b"".join(kept), lists


def _same_keys(text: bytes, written: bytes) -> bool:
    """Whether an object's text has as many keys as ``written``, the text of its value, where none stands twice. False where
    that cannot be seen."""
    bare, ours = text.translate(None, _SPACE), written.translate(None, _SPACE)
    # Most are spelled alike, which is seen sooner than it is counted.
    return bare == ours or (b'\\\\":' not in bare and _keys(bare) == _keys(ours))


def _keys(bare: bytes) -> int:
    return bare.count(b'":') - bare.count(b'\\":')


class _Values(nemo_rows.PlainLists):
    """Python's values, of which a text is what simdjson makes of it: rows of one prompt are a group by that."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser

    def text(self, value: Any) -> bytes:  # type: ignore[override]  # an instance's, for the parser
        if isinstance(value, (dict, list)):
            made: bytes = self._parser.parse(orjson.dumps(value)).mini
            return made
        return str(value).encode()


def _take_out(output: list[Any], count: int) -> list[int] | None:
    """Where the items are that hold the ``count`` places, three each and all in order, which are taken out of them."""
    at = 0
    found = []
    for index, item in enumerate(output):
        if type(item) is not dict:
            return None
        if not written_by_model(item):
            if item.get("type") != "function_call_output" and meant_role(item.get("role")) is not None:
                return None
        elif not item.keys().isdisjoint(TOKEN_KEYS):
            for name in TOKEN_KEYS:
                if item.pop(name, None) != _PLACE.format(at):
                    return None
                at += 1
            found.append(index)
    return found if at == count else None


def _new(prompts: Sequence[bytes], generations: Sequence[bytes]) -> list[bytes] | None:
    """What each prompt has after the prompt and generation before it; None where one does not begin with them."""
    found = [prompts[0]]
    for (before, prompt), generation in zip(pairwise(prompts), generations[:-1], strict=True):
        at = _after(prompt, 0, before)
        at = _after(prompt, at, generation) if at >= 0 else -1
        if at < 0:
            return None
        found.append(prompt[at:])
    return found


def _after(text: bytes, at: int, part: bytes) -> int:
    """Where the numbers go on that follow ``part``, which has some and stands at ``at``; -1 where it does not."""
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
    """The numbers of all lists, and how many each has."""
    filled = [text for text in texts if text and not text.isspace()]
    if len(filled) == len(texts):
        sizes = [text.count(b",") + 1 for text in texts]
    else:
        sizes = [text.count(b",") + 1 if text and not text.isspace() else 0 for text in texts]
    values = np.frombuffer(parser.parse(b"[%b]" % b",".join(filled)).as_buffer(of_type=kind), dtype)
    return (values, sizes) if len(values) == sum(sizes) else None
