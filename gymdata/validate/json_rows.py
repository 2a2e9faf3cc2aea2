"""Reading rollouts from JSON lines for validation: rows of the rollouts table as text, sealed or in a journal.

Invariants: every line is either in a batch or named by a violation (S101 unreadable, S102 wrong type, S103 missing);
one bad row never hides another; non-finite numbers are read in every form that Python or gymdata writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gymdata.checks.violations import Violation
from gymdata.errors import DataError, counted, json_kind, json_value
from gymdata.interop.nemo_gym.rows import BadRow
from gymdata.rollouts.messages import SPELLED_CALL, TOOL_ERROR
from gymdata.rollouts.ragged import Ragged, offsets_of
from gymdata.rollouts.turn_columns import (
    ROLES,
    UNKNOWN,
    Evidence,
    Messages,
    TurnColumns,
    WeightSpans,
    call_ids_of,
)
from gymdata.store import journal
from gymdata.store.lines import NON_FINITE, decode, iter_lines
from gymdata.store.paths import Source
from gymdata.validate.json_columns import (
    COLUMNS,
    INT_FIELDS,
    MESSAGE,
    STATUS,
    TURN,
    UnknownKey,
    check_types,
    record_unknown_key,
    reject_duplicate_keys,
)

_BATCH_TOKENS = 1_000_000
_BATCH_ROWS = 20_000
_LISTS = {
    "prompt_delta_ids": np.int32,
    "generation_token_ids": np.int32,
    "generation_log_probs": np.float32,
}


@dataclass(slots=True)
class _Row:
    number: int
    value: Mapping[str, Any]
    turns: list[dict[str, Any]]
    messages: list[dict[str, Any]]


def scan(source: Source, strange: dict[str, UnknownKey]) -> Iterator[Evidence | Violation]:
    """The batches of one JSONL or journal file, or a part of one, and violations for the rows that are in none. Keys that
    nothing reads are counted in ``strange``, for ``unknown_keys``."""
    rows: list[_Row] = []
    tokens = 0
    first = source.part.rows if source.part is not None else 0
    try:
        for number, line in enumerate(_lines(source), first):
            if isinstance(line, Violation):
                yield line._replace(row=number)
                continue
            try:
                row = _read(number, line)
            except BadRow as bad:
                yield Violation(bad.code, number, detail=bad.detail, **bad.more)
                continue
            record_unknown_key(number, row.value, strange)
            rows.append(row)
            tokens += sum(len(t["prompt_delta_ids"]) + len(t["generation_token_ids"]) for t in row.turns)
            if tokens >= _BATCH_TOKENS or len(rows) >= _BATCH_ROWS:
                yield _gather(rows)
                rows, tokens = [], 0
    except DataError as error:
        yield Violation("S101", rows[-1].number + 1 if rows else first, detail=error.message)
    if rows:
        yield _gather(rows)


def unknown_keys(strange: Mapping[str, UnknownKey]) -> Iterator[Violation]:
    """Violations for the keys that ``scan`` counted in a whole file."""
    for key, seen in strange.items():
        detail = f"unknown key {key!r} in {counted(seen.rows, 'row')}, which nothing reads"
        yield Violation(
            "S102", seen.first, expected="a column of the table", got=key, detail=detail, severity="warning"
        )


def _lines(source: Source) -> Iterator[bytes | Violation]:
    """The JSON of each row, or what is wrong with its line."""
    if source.kind != "journal":
        for _, line in iter_lines(source):
            yield line
        return
    for entry in journal.scan(source.path):
        if entry.body is not None:
            yield entry.body
        elif entry.closed:
            yield Violation(
                "S101", 0, detail=f"damaged journal line at byte {entry.offset}: its checksum does not match"
            )
        else:
            # A writer was killed, or is writing now; resuming cuts it off. Nothing that was whole is lost.
            detail = f"torn last line of the journal at byte {entry.offset}; resuming the run cuts it off"
            yield Violation("S101", 0, detail=detail, severity="warning")


def _read(number: int, line: bytes) -> _Row:
    try:
        value = decode(line)
    except (ValueError, RecursionError) as error:
        raise BadRow("S101", f"not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise BadRow("S101", f"got {json_kind(value)}, expected an object")
    name = value.get("rollout_id")
    known = name if isinstance(name, str) else None
    try:
        reject_duplicate_keys(line, value)
        row = _Row(number, value, _turns(value), _messages_of(value))
        check_types(value, COLUMNS, "")
        if value.get("status", "completed") not in STATUS:
            raise BadRow("S102", "status", expected=" or ".join(STATUS), got=json_value(value["status"]))
        for index, message in enumerate(row.messages):
            check_types(message, MESSAGE, f"messages[{index}].")
        return row
    except BadRow as bad:
        bad.more.setdefault("rollout_id", known)
        raise


def _turns(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "rollout_id" not in value:
        raise BadRow("S103", "the row has no rollout_id", expected="rollout_id")
    for name in ("rollout_id", "group_id"):
        if name in value and not isinstance(value[name], str):
            raise BadRow("S102", name, expected="text", got=json_value(value[name]))
    if "turns" not in value:
        raise BadRow("S103", "the row has no turns", expected="turns")
    turns = value["turns"] if value["turns"] is not None else []
    if not isinstance(turns, list):
        raise BadRow("S102", "turns", expected="a list", got=json_value(turns))
    return [_turn(index, turn) for index, turn in enumerate(turns)]


def _turn(index: int, turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise BadRow("S102", "a turn", turn=index, expected="an object", got=json_value(turn))
    check_types(turn, TURN, "", index)
    result: dict[str, Any] = {"agent": turn.get("agent"), "rendered": bool(turn.get("rendered"))}
    result["weight_versions"] = turn.get("weight_versions") or ()
    if "finish_reason" in turn:
        result["finish_reason"] = turn["finish_reason"]
    for name in INT_FIELDS:
        if name not in turn:
            raise BadRow("S103", f"the turn has no {name}", turn=index, expected=name)
        if type(turn[name]) is not int:
            raise BadRow("S102", name, turn=index, expected="an integer", got=json_value(turn[name]))
        if not -(2**63) <= turn[name] < 2**63:
            raise BadRow("S102", name, turn=index, expected="a 64-bit integer", got=str(turn[name]))
        result[name] = turn[name] if name == "digest" else max(-(2**31), min(2**31 - 1, turn[name]))
    for name, kind in _LISTS.items():
        result[name] = _numbers(index, name, turn.get(name), kind)
    return result


def _numbers(turn: int, name: str, values: Any, kind: type) -> np.ndarray:
    """A list field as an array. A null or missing list is empty: T205 and L301 report it."""
    if values is None:
        return np.empty(0, kind)
    if not isinstance(values, list):
        raise BadRow("S102", name, turn=turn, expected="a list", got=json_value(values))
    floats = kind is np.float32
    types = set(map(type, values))
    if not types <= ({float, int} if floats else {int}):
        for position, value in enumerate(values):
            if type(value) is int or (
                floats and (type(value) is float or (type(value) is str and value in NON_FINITE))
            ):
                continue
            wanted = "a number" if floats else "an integer"
            raise BadRow("S102", name, turn=turn, position=position, expected=wanted, got=json_value(value))
        values = [NON_FINITE.get(v, v) if isinstance(v, str) else v for v in values]
    if floats:
        with np.errstate(over="ignore"):
            return np.asarray(values, np.float64).astype(np.float32)
    try:
        return np.asarray(values, kind)
    except OverflowError:
        position = next(i for i, v in enumerate(values) if not -(2**31) <= v < 2**31)
        got = str(values[position])
        raise BadRow("S102", name, turn=turn, position=position, expected="a 32-bit integer", got=got) from None


def _messages_of(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = value.get("messages")
    if messages is None:
        raise BadRow("S103", "the row has no messages", expected="messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise BadRow("S102", "messages", expected="a list of objects", got=json_value(messages))
    return messages


def _weights(turns: list[dict[str, Any]]) -> WeightSpans:
    spans = [span for turn in turns for span in turn["weight_versions"]]
    offsets = offsets_of([len(turn["weight_versions"]) for turn in turns])
    start, end = (Ragged(np.asarray([span[name] for span in spans], np.int32), offsets) for name in ("start", "end"))
    return WeightSpans(start, end, [span["version"] for span in spans])


def _gather(rows: list[_Row]) -> Evidence:
    turns = [t for row in rows for t in row.turns]
    values = [row.value for row in rows]
    reward = [_number(v.get("reward")) for v in values]
    evidence = Evidence(
        rows=np.asarray([row.number for row in rows], np.int64),
        turns=TurnColumns(
            offsets=offsets_of([len(row.turns) for row in rows]),
            parent=np.asarray([t["parent"] for t in turns], np.int32),
            prefix=np.asarray([t["prefix_length"] for t in turns], np.int32),
            digest=np.asarray([t["digest"] for t in turns], np.int64),
            delta=_lists(turns, "prompt_delta_ids"),
            generation=_lists(turns, "generation_token_ids"),
            logprobs=_lists(turns, "generation_log_probs"),
            agent=[t["agent"] for t in turns],
            rendered=np.asarray([t["rendered"] for t in turns], np.bool_)
            if any(t["rendered"] for t in turns)
            else None,
            weights=_weights(turns) if any(t["weight_versions"] for t in turns) else None,
        ),
        rollout_id=[v["rollout_id"] for v in values],
        group_id=[v.get("group_id") for v in values],
        messages=gather_messages([row.messages for row in rows]),
        reward=np.asarray([np.nan if r is None else r for r in reward], np.float64),
        reward_null=np.asarray([r is None for r in reward], np.bool_),
        bad_parts=[
            (r, str(name), number)
            for r, v in enumerate(values)
            if isinstance(v.get("rewards"), dict)
            for name, part in v["rewards"].items()
            if (number := _number(part)) is not None and not np.isfinite(number)
        ],
        temperature=np.asarray([_number(v.get("temperature", 1.0)) or 0.0 for v in values], np.float32),
    )
    evidence.counts = _counts(rows)
    evidence.cut = np.asarray([t.get("finish_reason") == "length" for t in turns], np.bool_)
    for name in dict.fromkeys(name for v in values if isinstance(v.get("rewards"), dict) for name in v["rewards"]):
        given = [_number((v.get("rewards") or {}).get(name)) for v in values]
        evidence.parts[str(name)] = np.asarray([np.nan if one is None else one for one in given], np.float64)
    evidence.offers_tools = any(v.get("tools") not in (None, "", "[]", []) for v in values)
    evidence.started = _started(values)
    return evidence


def _started(values: list[Mapping[str, Any]]) -> np.ndarray:
    """When each rollout began; ``UNKNOWN`` when the row does not say."""
    texts = [v.get("started_at") for v in values]
    try:
        return np.asarray([_instant(t) for t in texts], "datetime64[us]").astype(np.int64)
    except ValueError:
        return np.asarray([_microseconds(t) for t in texts], np.int64)


def _instant(text: Any) -> str:
    return text.rstrip("Z").removesuffix("+00:00") if isinstance(text, str) else "NaT"


def _microseconds(text: Any) -> int:
    try:
        return int(np.datetime64(_instant(text), "us").astype(np.int64))
    except ValueError:
        return UNKNOWN


def _counts(rows: list[_Row]) -> dict[str, np.ndarray]:
    """The count columns. A row without one gets the count of its turns."""
    result = {}
    for name in _COUNTS:
        if any(name in row.value for row in rows):
            counted = [row.value[name] if name in row.value else _COUNTS[name](row.turns) for row in rows]
            result[name] = np.asarray(counted, np.int64)
    return result


_COUNTS: dict[str, Callable[[list[dict[str, Any]]], int]] = {
    "n_turns": len,
    "n_context_tokens": lambda turns: sum(len(t["prompt_delta_ids"]) for t in turns),
    "n_generated_tokens": lambda turns: sum(len(t["generation_token_ids"]) for t in turns),
}


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return NON_FINITE.get(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _lists(turns: list[dict[str, Any]], name: str) -> Ragged:
    return Ragged.of_arrays([t[name] for t in turns], _LISTS[name])


def gather_messages(rollouts: list[list[dict[str, Any]]]) -> Messages:
    """Chat messages (dicts, or rows of the table) as arrays."""
    flat = [m for messages in rollouts for m in messages]
    code = {name: i for i, name in enumerate(ROLES)}

    def turn(m: dict[str, Any]) -> int:
        return m["turn"] if isinstance(m.get("turn"), int) else -1

    def calls(m: dict[str, Any]) -> set[str]:
        given = m.get("tool_calls")
        if isinstance(given, list):
            return {str(c.get("id")) for c in given if isinstance(c, dict)}
        return call_ids_of(given if isinstance(given, str) else None)

    def answers(assistant: int, tool: int) -> bool:
        return str(flat[tool]["tool_call_id"]) in calls(flat[assistant])

    return Messages(
        offsets=offsets_of([len(messages) for messages in rollouts]),
        role=np.asarray([code.get(str(m.get("role")), -1) for m in flat], np.int8),
        turn=np.asarray([turn(m) for m in flat], np.int32),
        calls=np.asarray([bool(m.get("tool_calls")) and m["tool_calls"] != "[]" for m in flat], np.bool_),
        has_call_id=np.asarray([m.get("tool_call_id") is not None for m in flat], np.bool_),
        answers=answers,
        surely_answered=np.zeros(len(flat), np.bool_),
        says=np.asarray([_has_text(m.get("content")) or _has_text(m.get("reasoning")) for m in flat], np.bool_),
        fails=np.asarray(
            [m.get("role") in ("tool", "function") and _matches(TOOL_ERROR, m.get("content")) for m in flat], np.bool_
        ),
        spelled_calls=lambda: np.asarray(
            [
                m.get("role") == "assistant" and not m.get("tool_calls") and _matches(SPELLED_CALL, m.get("content"))
                for m in flat
            ],
            np.bool_,
        ),
    )


def _has_text(value: Any) -> bool:
    # Content in parts is not looked into.
    return bool(value.strip()) if isinstance(value, str) else bool(value)


def _matches(pattern: str, text: Any) -> bool:
    return isinstance(text, str) and re.search(pattern, text) is not None
