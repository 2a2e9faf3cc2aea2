"""The schema of JSON rows, for validation without pyarrow: types, known keys, keys given twice.

Invariants: a value of another type than its column's is S102 at its place; a key that nothing reads is reported, once per
file; the types are those of the schema (a test compares them).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gymdata.errors import json_value
from gymdata.interop.nemo_gym.rows import BadRow, unique_keys
from gymdata.store.lines import NON_FINITE

_ABSENT = object()
#: A turn's position, and its lists of tokens.
INT_FIELDS = ("parent", "prefix_length", "digest")
LISTS = ("prompt_delta_ids", "generation_token_ids", "generation_log_probs")
#: The types of the columns outside the token evidence, as in schema.ROLLOUTS, which would need pyarrow; ? may be null.
COLUMNS = {
    "run_id": "text", "task_id": "text", "rollout_index": "int32", "policy": "text", "policy_hash": "text",
    "policy_version": "int32", "status": "text", "stop_reason": "text?", "finish_reason": "text?", "reward": "number?",
    "rewards": "parts", "temperature": "number", "n_turns": "int32", "n_breaks": "int32", "n_context_tokens": "int64",
    "n_generated_tokens": "int64", "prompt_hash": "int64?", "generation_hash": "int64?", "tools": "text",
    "task": "text", "extra": "text", "started_at": "time", "duration_s": "number",
}  # fmt: skip
MESSAGE = {
    "role": "text", "content": "text?", "reasoning": "text?", "tool_calls": "text?", "tool_call_id": "text?",
    "name": "text?", "turn": "int32?", "extra": "text?",
}  # fmt: skip
STATUS = ("completed", "truncated")
#: The columns of a turn besides ids, log-probabilities and its position.
TURN = {
    "finish_reason": "text", "agent": "text?", "reward": "number?", "top_log_probs": "alternatives?", "rendered": "bool?",
    "server": "text?", "weight_versions": "spans?",
}  # fmt: skip
_KNOWN = {
    "": frozenset({"rollout_id", "group_id", "messages", "turns", *COLUMNS}),
    "turns[].": frozenset({*TURN, *INT_FIELDS, *LISTS}),
    "messages[].": frozenset(MESSAGE),
}


@dataclass(slots=True)
class UnknownKey:
    """A key that the table does not have: the first row with it, and in how many it is."""

    first: int
    rows: int = 0


def record_unknown_key(number: int, value: Mapping[str, Any], strange: dict[str, UnknownKey]) -> None:
    """Record an unknown key, which may be misspelt: each is reported once per file."""
    keys = {key for key in value if key not in _KNOWN[""]}
    for where, items in (("turns[].", value.get("turns") or ()), ("messages[].", value["messages"])):
        known = _KNOWN[where]
        for item in items:
            if not known.issuperset(item):
                keys |= {where + key for key in item if key not in known}
    for key in sorted(keys):
        strange.setdefault(key, UnknownKey(number)).rows += 1


def reject_duplicate_keys(line: bytes, value: Mapping[str, Any]) -> None:
    """Raise S102 for a key that an object of the row has twice, of which a JSON parser silently keeps the last."""
    # A key ends with a quote and a colon; inside a text that quote is escaped.
    if line.count(b'":') - line.count(b'\\":') == _count_keys(value):
        return
    try:
        json.loads(line, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError):
        return  # a reader that decodes it otherwise has read it


def _count_keys(value: Any) -> int:
    """Keys of all objects in a value. Lists of tokens are skipped: a list whose first item is a number has no keys."""
    count, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        if type(one) is dict:
            count += len(one)
            one = one.values()
        waiting += [v for v in one if type(v) is dict or (type(v) is list and v and type(v[0]) in (dict, list))]
    return count


def check_types(value: Mapping[str, Any], types: Mapping[str, str], where: str, turn: int | None = None) -> None:
    """Raise S102 for a value of another type than its column's. A column that is absent is not looked at."""
    for name, wanted in types.items():
        given = value.get(name, _ABSENT)
        if given is _ABSENT or (given is None and wanted.endswith("?")):
            continue
        kind = wanted.removesuffix("?")
        if not _FITS[kind](given):
            raise BadRow("S102", where + name, turn=turn, expected=_EXPECTED[kind], got=json_value(given))


def _is_text(value: Any) -> bool:
    if type(value) is not str:
        return False
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
    return True


def _is_number(value: Any) -> bool:
    return type(value) is float or type(value) is int or (type(value) is str and value in NON_FINITE)


def _is_time(value: Any) -> bool:
    try:
        return type(value) is str and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def _are_parts(value: Any) -> bool:
    """Named rewards: an object, or a list of names and values as Parquet has them."""
    if isinstance(value, list):
        if not all(isinstance(part, dict) and _is_text(part.get("name")) for part in value):
            return False
        return all(part.get("value") is None or _is_number(part["value"]) for part in value)
    return isinstance(value, dict) and all(part is None or _is_number(part) for part in value.values())


def _are_alternatives(value: Any) -> bool:
    def is_one(item: Any) -> bool:
        return isinstance(item, dict) and type(item.get("id")) is int and _is_number(item.get("log_prob"))

    return isinstance(value, list) and all(isinstance(p, list) and all(map(is_one, p)) for p in value)


def _are_spans(value: Any) -> bool:
    def is_one(item: Any) -> bool:
        return (
            isinstance(item, dict)
            and _is_text(item.get("version"))
            and all(type(at := item.get(end)) is int and -(2**31) <= at < 2**31 for end in ("start", "end"))
        )

    return isinstance(value, list) and all(map(is_one, value))


_FITS: dict[str, Callable[[Any], bool]] = {
    "text": _is_text,
    "int32": lambda value: type(value) is int and -(2**31) <= value < 2**31,
    "int64": lambda value: type(value) is int and -(2**63) <= value < 2**63,
    "number": _is_number,
    "time": _is_time,
    "parts": _are_parts,
    "alternatives": _are_alternatives,
    "spans": _are_spans,
    "bool": lambda value: type(value) is bool,
}
_EXPECTED = {
    "text": "text",
    "int32": "a 32-bit integer",
    "int64": "a 64-bit integer",
    "number": "a number",
    "time": "an ISO 8601 time with offset",
    "parts": "an object of numbers",
    "alternatives": "a list of {id, log_prob} a token",
    "spans": "a list of {version, start, end}",
    "bool": "true or false",
}
