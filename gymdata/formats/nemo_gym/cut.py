"""The model calls of a line of NeMo Gym rows, cut out of its text.

Most of a line is repetition, because each prompt contains the ones before it. So the token lists are cut out of the text,
prompts are compared as text, and only the numbers that are new are parsed.

Invariant: a line with lists that are not as NeMo Gym writes them (those of a call one after another, none empty, ids of 32
bits), with a key twice in an object, or that only Python's json reads (``NaN``) is not cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from gymdata.rollouts.messages import GENERATION, LOG_PROBS, PROMPT, JsonObject

#: On an item: its ids were rendered from text, not sampled.
RENDERED = "token_ids_rendered"
#: A prompt's key and bracket, and the lists after its end. A quote right before a colon is never inside a JSON text.
_PROMPT = re.compile(rb'"%b"\s*:\s*\[\s*(?=[^\s\]])' % PROMPT.encode())
_SAMPLED = re.compile(
    rb'\]\s*,\s*"%b"\s*:\s*\[\s*([^\s\]][^\]]*)\](?:\s*,\s*"%b"\s*:\s*\[\s*([^\s\]][^\]]*)\])?'
    % (GENERATION.encode(), LOG_PROBS.encode())
)
#: Integers of any size are read exactly.
_object = msgspec.json.Decoder(dict[str, Any]).decode
_ids = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]])
_numbers = msgspec.json.Decoder(list[float])
_SPACE = b" \t\r\n"


class UncutError(Exception):
    """The line is read by Python's json."""


@dataclass(slots=True, eq=False)
class Call:
    """The lists of a model call: ids, of which there are some, as int64 only where one has more than 32 bits, and
    log-probabilities, None without a list. ``rendered``: the ids were rendered from text, not sampled. ``before``: the call
    with whose prompt and generation this prompt begins, where that is known; ``prompt`` has the ids after these."""

    prompt: npt.NDArray[Any]
    generation: npt.NDArray[Any]
    log_probs: npt.NDArray[np.float64] | None
    rendered: bool = False
    before: Call | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it has ids of its prompt and of its generation."""
        return len(self.generation) > 0 and len(self.prompt) > 0

    def whole_prompt(self) -> npt.NDArray[Any]:
        parts, call = [self.prompt], self
        while call.before is not None:
            call = call.before
            parts += [call.generation, call.prompt]
        return np.concatenate(parts[::-1])

    def after(self, before: Call | None) -> tuple[npt.NDArray[Any], bool]:
        """The ids of the prompt after the prompt and the generation of ``before``, and whether it begins with these; else
        the whole prompt."""
        continues = before is not None and self.before is before
        return self.prompt if continues else self.whole_prompt(), continues


def cut_line(line: bytes) -> tuple[JsonObject, list[Call]]:
    """The object of a line, in which each token list has the number of its call alone, and the calls. Raises UncutError."""
    rest, position = list[bytes](), 0
    #: The new ids of each call and its generation, its log-probabilities where it has some, and whether its prompt continues
    #: the call before.
    ids, log_probs, has_log_probs, continues = list[bytes](), list[bytes](), list[bool](), list[bool]()
    prompt = generation = b""
    while (opening := _PROMPT.search(line, position)) is not None:
        begin, number = opening.end(), b"%d" % len(continues)
        fresh = _fresh(line, begin, prompt, generation)
        end = line.find(b"]", fresh)
        sampled = _SAMPLED.match(line, end)
        if line[opening.start() - 1] == ord("\\") or sampled is None:
            raise UncutError
        prompt, generation, numbers = line[begin:end], sampled[1], sampled[2]
        rest += [line[position:begin], number, line[end : sampled.start(1)], number]
        position = sampled.end(1)
        if numbers is not None:
            rest += [line[position : sampled.start(2)], number]
            position = sampled.end(2)
            log_probs.append(numbers)
        ids += [line[fresh:end], generation]
        has_log_probs.append(numbers is not None)
        continues.append(fresh > begin)
    text = b"".join([*rest, line[position:]])
    calls = list[Call]()
    try:
        value = _object(text)
        id_lists, number_lists = _parsed(_ids, ids, np.int32), _parsed(_numbers, log_probs, np.float64)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UncutError from error
    if _has_key_twice(text, value):
        raise UncutError
    for has_numbers, follows in zip(has_log_probs, continues, strict=True):
        call = Call(next(id_lists), next(id_lists), next(number_lists) if has_numbers else None)
        call.before = calls[-1] if follows else None
        calls.append(call)
    return value, calls


def _parsed(decoder: msgspec.json.Decoder[Any], texts: list[bytes], dtype: Any) -> Iterator[npt.NDArray[Any]]:
    """The numbers of each of the lists, all parsed at once. Raises MsgspecError for anything else."""
    values = np.array(decoder.decode(b"[%b]" % b",".join(texts)), dtype)
    ends = accumulate(text.count(b",") + 1 for text in texts)
    return (values[begin:end] for begin, end in pairwise(chain([0], ends)))


def _fresh(line: bytes, begin: int, prompt: bytes, generation: bytes) -> int:
    """The position of the new numbers of the prompt at ``begin``, after those of the last ``prompt`` and ``generation``;
    ``begin`` when it does not continue them, or not in the same spelling."""
    for comma in (b", ", b","):
        before = b"".join((prompt, comma, generation, comma))
        if line.startswith(before, begin):
            fresh = begin + len(before)
            # A comma before the bracket is not JSON.
            return begin if line[fresh : fresh + 1] in b"]" + _SPACE else fresh
    return begin


def _has_key_twice(text: bytes, value: JsonObject) -> bool:
    """Whether an object in ``text`` may have a key twice: it has another number of keys than its ``value``."""
    bare, ours = (json.translate(None, _SPACE) for json in (text, msgspec.json.encode(value)))
    # Most are equal, which is faster to see than keys are counted. One that ends with a backslash is not counted.
    return bare != ours and (b'\\\\":' in bare or _count_keys(bare) != _count_keys(ours))


def _count_keys(bare: bytes) -> int:
    """The keys of JSON without spaces: a key ends with a quote and a colon; inside of a text that quote is escaped."""
    return bare.count(b'":') - bare.count(b'\\":')
