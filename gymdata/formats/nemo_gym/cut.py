"""The model calls of a line of NeMo Gym rows, cut out of its text.

Most of a line is repetition, because each prompt contains the ones before it. So the token lists are cut out of the text,
prompts are compared as text, only what is new in them is parsed, all of it at once; orjson reads the rest.

Invariants: a line for which that may not give the value that Python's json gives, or whose lists are not as NeMo Gym writes
them (those of a call one after another, none empty), is not cut; ids are int64 and log-probabilities float64.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from gymdata.rollouts import turns as encoding
from gymdata.rollouts.messages import GENERATION, LOG_PROBS, PROMPT, TOKEN_KEYS, JsonObject, has_long_number

_SPACE = b" \t\r\n"
_NUMERIC = b"0123456789+-.eE," + _SPACE
#: On an item: its ids were rendered from text, not sampled.
RENDERED = "token_ids_rendered"
#: A prompt's key and bracket, and those of the lists after it. A quote right before a colon is never inside a JSON text.
_PROMPT = re.compile(rb'"%b"[ \t]*:[ \t]*\[' % PROMPT.encode())
_GENERATION, _LOG_PROBS = (
    re.compile(rb'\][ \t]*,[ \t]*"%b"[ \t]*:[ \t]*\[' % name.encode()) for name in (GENERATION, LOG_PROBS)
)
#: The same as orjson writes them.
_LISTS = [b'"%b":[' % name.encode() for name in TOKEN_KEYS]


@dataclass(slots=True, eq=False)
class Call:
    """The lists of a model call: ids, of which there are some, and log-probabilities, None without a list. ``rendered``: the
    ids were rendered from text, not sampled. ``before``: the call with whose prompt and generation this prompt begins, where
    that is known; ``prompt`` has the ids after these."""

    prompt: npt.NDArray[np.int64]
    generation: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float64] | None
    rendered: bool = False
    before: Call | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it has ids of its prompt and of its generation."""
        return len(self.generation) > 0 and (len(self.prompt) > 0 or self.before is not None)

    def whole_prompt(self) -> npt.NDArray[np.int64]:
        parts, call = [self.prompt], self
        while call.before is not None:
            call = call.before
            parts += [call.generation, call.prompt]
        return np.concatenate(parts[::-1])

    def ids_alone(self) -> encoding.Call:
        """The call for a ``TurnEncoder``, with ids of 32 bits and no log-probabilities."""
        prompt, generation = (ids.astype(np.int32) for ids in (self.whole_prompt(), self.generation))
        return encoding.Call(prompt, generation, np.empty(0, np.float32), "stop")


def new_ids(calls: Sequence[Call]) -> list[npt.NDArray[np.int64]] | None:
    """The ids of each prompt after the prompt and the generation of the call before; None where a prompt does not begin with
    these."""
    new = [call.whole_prompt() for call in calls[:1]]
    for before, call in pairwise(calls):
        if call.before is before:
            new.append(call.prompt)
            continue
        context, prompt = np.concatenate((before.whole_prompt(), before.generation)), call.whole_prompt()
        if len(prompt) < len(context) or (prompt[: len(context)] != context).any():
            return None
        new.append(prompt[len(context) :])
    return new


class _Cut(NamedTuple):
    """The lists of a model call as text. ``follows``: its prompt begins with the prompt and the generation of the call
    before, which are not in its text."""

    prompt: bytes
    generation: bytes
    log_probs: bytes | None
    follows: bool


def cut_line(line: bytes) -> tuple[JsonObject, list[Call]] | None:
    """The object of a line, in which each token list has the number of its call alone, and the calls; None when the text may
    mean another value than the one that orjson reads. Raises ValueError or TypeError for lists of anything but numbers, and
    for numbers beyond 64 bits."""
    rest: list[bytes] = []
    cuts: list[_Cut] = []
    position = 0
    #: The text of the last prompt.
    prompt_text = bytearray()
    while (opening := _PROMPT.search(line, position)) is not None:
        begin = opening.end()
        fresh = _continued(line, begin, prompt_text, cuts[-1].generation) if cuts else begin
        end = line.find(b"]", fresh)
        generation = _GENERATION.match(line, end)
        if line[opening.start() - 1] == ord("\\") or generation is None:
            return None
        if fresh == begin:
            prompt_text.clear()
        prompt = line[fresh:end]
        prompt_text += prompt
        number = b"%d" % len(cuts)
        rest += [line[position:begin], number, generation[0], number]
        position = line.find(b"]", generation.end())
        log_probs = _LOG_PROBS.match(line, position)
        texts = [prompt, line[generation.end() : position]]
        if log_probs is not None:
            rest += [log_probs[0], number]
            position = line.find(b"]", log_probs.end())
            texts.append(line[log_probs.end() : position])
        if position < 0 or not all(map(bytes.strip, texts)):
            return None
        cuts.append(_Cut(texts[0], texts[1], texts[2] if log_probs is not None else None, fresh > begin))
    rest.append(line[position:])
    text = b"".join(rest)
    value = orjson.loads(text)
    written = orjson.dumps(value)
    n_lists = sum(2 + (cut.log_probs is not None) for cut in cuts)
    if type(value) is not dict or not _is_unambiguous(text, written) or sum(map(written.count, _LISTS)) != n_lists:
        return None
    return value, _calls(cuts)


def _continued(line: bytes, begin: int, prompt_text: bytearray, generation: bytes) -> int:
    """The position of a prompt's new numbers after ``prompt_text``, of the prompt before, and its ``generation``, which is
    added to it; ``begin`` when it does not continue them, or not in the same spelling."""
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


def _calls(cuts: Sequence[_Cut]) -> list[Call]:
    """The calls of a line, all ids and all log-probabilities parsed at once."""
    ids = _parsed([text for cut in cuts for text in (cut.prompt, cut.generation)], "i", np.int64)
    log_probs = _parsed([cut.log_probs for cut in cuts if cut.log_probs is not None], "d", np.float64)
    calls: list[Call] = []
    for cut in cuts:
        numbers = next(log_probs) if cut.log_probs is not None else None
        calls.append(Call(next(ids), next(ids), numbers, before=calls[-1] if cut.follows else None))
    return calls


def _parsed(texts: Sequence[bytes], kind: str, dtype: Any) -> Iterator[npt.NDArray[Any]]:
    """The numbers of each of the texts."""
    values = _numbers(b",".join(texts), kind, dtype)
    ends = list(accumulate(text.count(b",") + 1 for text in texts))
    if len(values) != (ends[-1] if ends else 0):
        raise ValueError("other than flat lists of numbers")
    return (values[begin:end] for begin, end in zip([0, *ends], ends, strict=False))


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
        try:
            return np.frombuffer(parser.parse(b"[%b]" % text).as_buffer(of_type=kind), dtype)
        except RuntimeError as error:
            if "still exist" in str(error):  # an earlier result: a fault of this program, and of no line
                raise
            raise ValueError(str(error)) from error
    values = np.asarray(orjson.loads(b"[%b]" % text))
    if text.translate(None, _NUMERIC) or (len(values) and values.dtype.kind not in ("if" if kind == "d" else "i")):
        raise ValueError("other than numbers")
    return values.astype(dtype)


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
