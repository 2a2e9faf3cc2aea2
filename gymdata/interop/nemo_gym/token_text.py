"""The token lists of turns as JSON text, whole prompts included: every id is formatted once, however often it is
repeated.

Invariants: a list reads back as the ids that it was made from, a log-probability as the same float32; non-finite
numbers are written as Python's json does. The loops are over turns, never over tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import orjson

from gymdata.interop.trajectories.own import shortest
from gymdata.rollouts.messages import RolloutRow
from gymdata.rollouts.ragged import Ragged
from gymdata.rollouts.turn_columns import TurnColumns
from gymdata.store.columns import to_rows

if TYPE_CHECKING:
    import pyarrow as pa

#: Shares the memory of a longer text that it is a prefix of.
Text = bytes | memoryview
#: Tokens whose text is held at a time.
_TOKENS = 500_000


@dataclass(slots=True)
class RowTexts:
    """The lists of one rollout's turns, without their brackets. ``rendered``: whether a turn's ids were rendered from
    text."""

    prompts: list[Text]
    generations: list[bytes]
    log_probs: list[bytes]
    rendered: list[bool]

    def __len__(self) -> int:
        return len(self.prompts)


def rows(batch: pa.RecordBatch) -> Iterator[RolloutRow]:
    """The rows of a batch of rollouts as ``to_rows`` gives them, with ``RowTexts`` as their turns, seconds as their times,
    and messages as a function that gives them: imported rows are written without. Raises DataError for turns that were
    changed after collection."""
    # Slices of the batch bound the memory of their token text.
    tokens = batch.column("n_context_tokens").to_numpy() + batch.column("n_generated_tokens").to_numpy()
    ends = np.flatnonzero(np.diff(np.cumsum(tokens) // _TOKENS)) + 1
    for first, last in pairwise([0, *ends.tolist(), batch.num_rows]):
        part = batch.slice(first, last - first)
        turns = TurnColumns.of(part.column("turns"))
        turns.refuse_altered(part.column("rollout_id"))
        # Converted to Python values at the first use.
        converted = cache(partial(to_rows, part.select(["messages"])))
        # Python datetime objects are slow to create.
        started = (part.column("started_at").cast("int64").to_numpy() / 1e6).tolist()
        columns = to_rows(part.drop_columns(["turns", "messages", "started_at"]))
        for number, (row, texts) in enumerate(zip(columns, row_texts(turns), strict=True)):
            yield row | {
                "turns": texts,
                "messages": lambda rows=converted, number=number: rows()[number]["messages"],
                "started_at": started[number],
            }


def row_texts(turns: TurnColumns) -> Iterator[RowTexts]:
    """One for each rollout. Prompts are those of ``TurnColumns.prompts``; the digests are not looked at."""
    delta, generations, log_probs = _pieces(turns.delta), _pieces(turns.generation), _pieces(turns.logprobs)
    rendered = [False] * len(turns) if turns.rendered is None else turns.rendered.tolist()
    one_chain = turns.one_chain().tolist()
    parents, prefixes, lengths = turns.parent.tolist(), turns.prefix.tolist(), turns.max_prefix.tolist()
    for row, (first, last) in enumerate(pairwise(turns.offsets.tolist())):
        of = slice(first, last)
        if one_chain[row]:
            # The prompts of turns that each continue the one before: beginnings of one text.
            ends, end = [], -1
            pieces: list[Text] = []
            for new, sampled in zip(delta[of], generations[of], strict=True):
                for piece in (new, sampled):
                    if piece:
                        pieces.append(piece)
                        # With the comma before it.
                        end += 1 + len(piece)
                    ends.append(max(end, 0))
            text = memoryview(b",".join(pieces))
            prompts: list[Text] = [text[:end] for end in ends[::2]]
        else:
            prompts, contexts = [], list[bytes]()
            parts = zip(delta[of], generations[of], parents[of], prefixes[of], lengths[of], strict=True)
            for new, sampled, parent, prefix, most in parts:
                before = contexts[parent] if parent >= 0 else b""
                prompt = _joined(before if prefix == most else _first(before, prefix), new)
                prompts.append(prompt)
                contexts.append(_joined(prompt, sampled))
        yield RowTexts(prompts, generations[of], log_probs[of], rendered[of])


def numbers(text: Text) -> list[int | float]:
    """The values of a list's text."""
    values: list[int | float] = json.loads(b"".join((b"[", text, b"]")))
    return values


def _pieces(lists: Ragged) -> list[bytes]:
    if not len(lists.values):
        return [b""] * len(lists)
    # All values as one list, without spaces.
    if np.isinf(lists.values).any():
        text = json.dumps([shortest(value) for value in lists.values], separators=(",", ":")).encode()
    else:
        # orjson writes a float32 with the fewest digits that round-trip, and NaN as null.
        text = orjson.dumps(np.ascontiguousarray(lists.values), option=orjson.OPT_SERIALIZE_NUMPY)
        text = text.replace(b"null", b"NaN") if np.isnan(lists.values).any() else text
    # A number begins after a comma (the first after the bracket) and ends before the next (the last before the bracket).
    starts = np.concatenate(([1], np.flatnonzero(np.frombuffer(text, np.uint8) == ord(",")) + 1, [len(text)]))
    begin, end = starts[lists.offsets[:-1]], starts[lists.offsets[1:]] - 1
    return [text[a:b] for a, b in zip(begin.tolist(), end.tolist(), strict=True)]


def _joined(before: bytes, after: bytes) -> bytes:
    return before + b"," + after if before and after else before or after


def _first(text: bytes, count: int) -> bytes:
    """The text of the first ``count`` numbers, fewer than there are."""
    if not count:
        return b""
    return text[: int(np.flatnonzero(np.frombuffer(text, np.uint8) == ord(","))[count - 1])]
