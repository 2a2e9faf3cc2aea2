"""NeMo Gym rows as batches of arrays, which the checks of rollouts read.

Invariants: every line is in a batch or named by a violation; turns count model calls, with and without ids; importing this
loads neither pyarrow nor polars.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from gymdata.checks.violations import Violation
from gymdata.errors import DataError
from gymdata.formats.nemo_gym.rows import BadRow, Call, Row, failed_attempt, failure_in, main_file, read_row
from gymdata.rollouts.failures import short_reason
from gymdata.rollouts.messages import SPELLED_CALL
from gymdata.rollouts.ragged import Ragged, offsets_of
from gymdata.rollouts.turn_columns import Evidence, Messages, TurnColumns
from gymdata.rollouts.turns import TurnEncoder
from gymdata.store.lines import row_lines
from gymdata.store.paths import Source

_BATCH_TOKENS = 250_000
_BATCH_ROWS = 4_096
#: By call: its parent, its prefix_length, and the prompt's ids after that.
Encoded = tuple[list[int], list[int], list[npt.NDArray[Any]]]
_spells_call = re.compile(SPELLED_CALL).search


def scan(source: Source) -> Iterator[Evidence | Violation]:
    """The batches of a file, and violations for the rows that are in none."""
    rows: list[tuple[int, bytes | None, Row]] = []
    failures: dict[int, str] = {}
    of_failures = main_file(source.path) is not None
    tokens = 0
    number = 0
    try:
        for number, (_, line) in enumerate(row_lines(source)):
            try:
                row = read_row(line)
            except BadRow as bad:
                if attempt := failed_attempt(line, of_failures):
                    yield Violation("R501", number, detail=short_reason(attempt[1]._asdict()))
                    continue
                yield Violation(bad.code, number, detail=bad.detail, **bad.more)
                continue
            # A seed of their own, so that no id is taken for a line.
            key = None if row.rollout_id is not None else xxhash.xxh3_128_digest(line.strip(), 1)
            if (failure := failure_in(row.value, of_failures)) is not None:
                failures[number], row.reward = short_reason(failure._asdict()), None
            # Of the value only its arrays are needed.
            row.value = {}
            rows.append((number, key, row))
            tokens += sum(
                len(call.prompt.values) + len(call.generation.values) for call in row.calls if call is not None
            )
            if tokens >= _BATCH_TOKENS or len(rows) >= _BATCH_ROWS:
                yield _gather(rows, failures)
                rows, failures, tokens = [], {}, 0
    except DataError as error:
        yield Violation("S101", number + (number > 0 or bool(rows)), detail=error.message)
    if rows:
        yield _gather(rows, failures)


def _gather(numbered: Sequence[tuple[int, bytes | None, Row]], failures: Mapping[int, str]) -> Evidence:
    rows = [row for *_, row in numbered]
    calls = [call for row in rows for call in row.calls]
    offsets = offsets_of([len(row.calls) for row in rows])
    of_rows = [encoded(row.calls) for row in rows]
    parents = [parent for columns in of_rows for parent in columns[0]]
    prefixes = [prefix for columns in of_rows for prefix in columns[1]]
    deltas = [delta for columns in of_rows for delta in columns[2]]
    empty = np.empty(0, np.int64)
    generations = [empty if call is None else call.generation.values for call in calls]
    # Without a generation the missing ids are the fault, not the numbers beside them.
    log_probs = [
        empty if call is None or call.log_probs is None or not call.generation else call.log_probs for call in calls
    ]
    cut = np.zeros(len(calls), np.bool_)
    tells = np.zeros(len(calls), np.bool_)
    for last, row in zip((offsets[1:] - 1).tolist(), rows, strict=True):
        if row.calls and row.cut is not None:
            tells[last], cut[last] = True, row.cut
    reward = [row.reward for row in rows]
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
        failures={k: failures[number] for k, (number, *_) in enumerate(numbered) if number in failures},
        foreign=True,
    )


def _ids(arrays: Sequence[npt.NDArray[Any]]) -> Ragged:
    """As int32 where they fit."""
    lists = Ragged.of_arrays(arrays, np.int64)
    narrow = lists.values.astype(np.int32)
    return lists.like(narrow) if (narrow == lists.values).all() else lists


def encoded(calls: Sequence[Call | None]) -> Encoded:
    """(parent, prefix_length, the prompt's ids after it) of each call. A call without a prompt has no parent and is none."""
    parents, prefixes, deltas = [-1] * len(calls), [0] * len(calls), [np.empty(0, np.int64)] * len(calls)
    with_prompt = [k for k, call in enumerate(calls) if call is not None and call.prompt]
    n_context, before = 0, None
    for k in with_prompt:
        call = calls[k]
        assert call is not None
        if before is not None:
            if not continues(call, before[1]):
                return _encoded_apart(calls, with_prompt)
            parents[k], prefixes[k] = before[0], n_context
        deltas[k] = call.prompt.values if call.prompt.before is not None else call.prompt.values[prefixes[k] :]
        n_context += len(deltas[k]) + len(call.generation.values)
        before = k, call
    return parents, prefixes, deltas


def continues(call: Call, before: Call) -> bool:
    """Whether a call's prompt begins with the prompt and the generation of the call ``before``."""
    lists = call.prompt.before
    if lists is not None and lists[0] is before.prompt and lists[1] is before.generation:
        return True
    context = np.concatenate((before.prompt.all_values(), before.generation.values))
    prompt = call.prompt.all_values()
    return len(prompt) >= len(context) and bool((prompt[: len(context)] == context).all())


def _encoded_apart(calls: Sequence[Call | None], with_prompt: Sequence[int]) -> Encoded:
    """The same by the encoder of turns, where some prompt does not continue the one before."""
    parents, prefixes, deltas = [-1] * len(calls), [0] * len(calls), [np.empty(0, np.int64)] * len(calls)
    encoder = TurnEncoder()
    for k in with_prompt:
        call = calls[k]
        assert call is not None
        turn = encoder.add(call.ids_alone())
        parents[k] = with_prompt[turn["parent"]] if turn["parent"] >= 0 else -1
        prefixes[k] = turn["prefix_length"]
        deltas[k] = call.prompt.all_values()[prefixes[k] :]
    return parents, prefixes, deltas


def _messages(rows: Sequence[Row]) -> Messages:
    entries = [entry for row in rows for entry in row.entries]

    def spelled_calls() -> list[tuple[int, str]]:
        spelled = ((k, next(filter(_spells_call, entry.texts), None)) for k, entry in enumerate(entries))
        return [(k, text) for k, text in spelled if text is not None]

    unanswered = {k: entry.unanswered for k, entry in enumerate(entries) if entry.unanswered is not None}
    answered = np.ones(len(entries), np.bool_)
    answered[list(unanswered)] = False
    return Messages(
        offsets=offsets_of([len(row.entries) for row in rows]),
        role=np.asarray([entry.role for entry in entries], np.int8),
        turn=np.asarray([entry.turn for entry in entries], np.int32),
        calls=np.asarray([entry.calls for entry in entries], np.bool_),
        has_call_id=np.ones(len(entries), np.bool_),
        answers=lambda *_: False,
        surely_answered=answered,
        says=np.asarray([entry.says for entry in entries], np.bool_),
        fails=np.asarray([entry.fails for entry in entries], np.bool_),
        spelled_calls=spelled_calls,
        items=np.asarray([entry.item for entry in entries], np.int64),
        unanswered=unanswered,
    )
