"""NeMo Gym rows as batches of arrays, which the checks of rollouts read.

Invariants: every line is in a batch or named by a violation; turns count model calls, with and without ids; importing this
loads neither pyarrow nor polars.
"""

from __future__ import annotations

import heapq
import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from gymdata.checks.violations import Violation
from gymdata.errors import DataError
from gymdata.formats.nemo_gym.cut import Call
from gymdata.formats.nemo_gym.rows import Attempt, BadRow, Row, main_file, read_any
from gymdata.rollouts.failures import short_reason
from gymdata.rollouts.messages import SPELLED_CALL
from gymdata.rollouts.ragged import Ragged, offsets_of
from gymdata.rollouts.turn_columns import Evidence, Messages, TurnColumns
from gymdata.rollouts.turns import TurnTree
from gymdata.store.lines import row_lines
from gymdata.store.paths import Source
from gymdata.workers.forked import in_child

_BATCH_TOKENS = 250_000
_BATCH_ROWS = 4_096
#: Bytes of a file that two processes read, and of a block that one of them reads.
LARGE, BLOCK = 30_000_000, 4_000_000
_NO_IDS = np.empty(0, np.int32)
#: By call: its parent, its prefix_length, and the prompt's ids after that.
Encoded = tuple[list[int], list[int], list[npt.NDArray[Any]]]
_spells_call = re.compile(SPELLED_CALL).search


def scan(source: Source) -> Iterator[Evidence | Violation]:
    """The batches of a file, and violations for the rows that are in none, in the order of the rows. A large file is read by
    this process and a child, block by block in turn."""
    if sys.platform != "linux" or source.path.stat().st_size < LARGE or len(os.sched_getaffinity(0)) == 1:
        yield from (item for _, item in _found(source, 0, 1))
        return
    with in_child(_found(source, 1, 2)) as others:
        yield from (item for _, item in heapq.merge(_found(source, 0, 2), others, key=itemgetter(0)))


def _found(source: Source, part: int, parts: int) -> Iterator[tuple[int, Evidence | Violation]]:
    """What is in the blocks of a file of which this part is the next, each with the number of its block."""
    of_failures = main_file(source.path) is not None
    rows: list[tuple[int, bytes | None, Row]] = []
    n_tokens = n_bytes = block = 0
    number = -1
    fault: DataError | None = None
    try:
        for number, (_, line) in enumerate(row_lines(source)):
            is_next = parts > 1 and n_bytes // BLOCK > block
            if rows and (is_next or n_tokens >= _BATCH_TOKENS or len(rows) >= _BATCH_ROWS):
                yield block, _gather(rows)
                rows, n_tokens = [], 0
            block += is_next
            n_bytes += len(line)
            if block % parts != part:
                continue
            row = read_any(line, of_failures)
            if isinstance(row, BadRow):
                yield block, Violation(row.code, number, detail=row.detail, **row.more)
            elif isinstance(row, Attempt):
                yield block, Violation("R501", number, detail=short_reason(row.failure._asdict()))
            else:
                # A seed of their own, so that no id is taken for a line.
                key = None if row.rollout_id is not None else xxhash.xxh3_128_digest(line.strip(), 1)
                # Of the value only its arrays are needed.
                row.value, row.output = {}, []
                rows.append((number, key, row))
                n_tokens += sum(len(call.prompt) + len(call.generation) for call in row.calls if call is not None)
    except DataError as error:
        fault = error
    if rows:
        yield block, _gather(rows)
    if fault is not None and block % parts == part:
        yield block, Violation("S101", number + 1, detail=fault.message)


def _gather(numbered: Sequence[tuple[int, bytes | None, Row]]) -> Evidence:
    rows = [row for *_, row in numbered]
    calls = [call for row in rows for call in row.calls]
    offsets = offsets_of([len(row.calls) for row in rows])
    of_rows = [_encoded(row.calls) for row in rows]
    parents = [parent for columns in of_rows for parent in columns[0]]
    prefixes = [prefix for columns in of_rows for prefix in columns[1]]
    deltas = [delta for columns in of_rows for delta in columns[2]]
    generations = [_NO_IDS if call is None else call.generation for call in calls]
    # Without a generation the missing ids are the fault, not the numbers beside them.
    log_probs = [
        _NO_IDS if call is None or call.log_probs is None or not len(call.generation) else call.log_probs
        for call in calls
    ]
    cut = np.zeros(len(calls), np.bool_)
    tells = np.zeros(len(calls), np.bool_)
    for last, row in zip((offsets[1:] - 1).tolist(), rows, strict=True):
        if row.calls and row.cut is not None:
            tells[last], cut[last] = True, row.cut
    reward = [row.reward if row.failure is None else None for row in rows]
    return Evidence(
        rows=np.asarray([number for number, *_ in numbered], np.int64),
        turns=TurnColumns(
            offsets=offsets,
            parent=np.asarray(parents, np.int32),
            prefix=np.asarray(prefixes, np.int32),
            digest=np.zeros(len(calls), np.int64),
            delta=_ids(deltas),
            generation=_ids(generations),
            logprobs=Ragged.of_arrays(log_probs, np.float64),
        ),
        rollout_id=[row.rollout_id for row in rows],
        group_id=[row.group for row in rows],
        row_keys=[key for _, key, _ in numbered],
        messages=_messages(rows),
        reward=np.asarray([np.nan if number is None else number for number in reward], np.float64),
        reward_null=np.asarray([number is None for number in reward], np.bool_),
        cut=cut,
        tells_cut=tells,
        offers_tools=any(row.offers_tools for row in rows),
        settings=[row.settings for row in rows],
        failures={k: short_reason(row.failure._asdict()) for k, row in enumerate(rows) if row.failure is not None},
        foreign=True,
    )


def _ids(arrays: Sequence[npt.NDArray[Any]]) -> Ragged:
    return Ragged.of_arrays(arrays, np.result_type(np.int32, *{array.dtype for array in arrays}))


def _encoded(calls: Sequence[Call | None]) -> Encoded:
    """(parent, prefix_length, the prompt's ids after it) of each call. A call without a prompt has no parent and is none."""
    parents, prefixes, deltas = [-1] * len(calls), [0] * len(calls), [_NO_IDS] * len(calls)
    tree, numbers = TurnTree(), list[int]()
    before = None
    for k, call in enumerate(calls):
        if call is not None and len(call.prompt):
            prompt, continues = call.after(before)
            parent, prefixes[k], deltas[k] = tree.add(prompt, call.generation, continues=continues)
            parents[k] = numbers[parent] if parent >= 0 else -1
            numbers.append(k)
            before = call
    return parents, prefixes, deltas


def _messages(rows: Sequence[Row]) -> Messages:
    entries = [entry for row in rows for entry in row.entries]

    return Messages(
        offsets=offsets_of([len(row.entries) for row in rows]),
        role=np.asarray([entry.role for entry in entries], np.int8),
        turn=np.asarray([entry.turn for entry in entries], np.int32),
        calls=np.asarray([entry.calls for entry in entries], np.bool_),
        says=np.asarray([entry.says for entry in entries], np.bool_),
        fails=np.asarray([entry.fails for entry in entries], np.bool_),
        spelled_calls=partial(_spelled_calls, [entry.texts for entry in entries]),
        items=np.asarray([entry.item for entry in entries], np.int64),
        unanswered={k: entry.unanswered for k, entry in enumerate(entries) if entry.unanswered is not None},
    )


def _spelled_calls(texts: Sequence[Sequence[str]]) -> list[int]:
    return [k for k, of_entry in enumerate(texts) if any(map(_spells_call, of_entry))]
