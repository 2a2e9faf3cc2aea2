"""What a rollouts row must look like before it is journaled.

What always holds: a row that passes can be sealed, so nothing that was sampled gets stuck in a journal. The check looks
at keys, types and array dtypes, not at every element, and costs a few microseconds.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

import numpy as np

from gymdata.core.schema import MESSAGE, ROLLOUTS, TURN
from gymdata.errors import DataError

_INT, _TEXT, _FLOAT = (int, np.integer), (str,), (float, int, np.floating, np.integer)
_OF_TYPE = {"string": _TEXT, "int32": _INT, "int64": _INT, "float": _FLOAT, "double": _FLOAT}


def _accepted(field: Any) -> tuple[type, ...]:
    text = str(field.type)
    kinds = _OF_TYPE.get(text) or ((dt.datetime,) if text.startswith("timestamp") else (list, tuple))
    return (*kinds, type(None)) if field.nullable else kinds


_COLUMNS = [(f.name, _accepted(f)) for f in ROLLOUTS.schema]
_REQUIRED = frozenset(f.name for f in ROLLOUTS.schema if not f.nullable)
_KNOWN = frozenset(ROLLOUTS.schema.names)
_MESSAGE = [(f.name, _accepted(f)) for f in MESSAGE]
_MESSAGE_KEYS = frozenset(f.name for f in MESSAGE)
_TURN_REQUIRED = frozenset(f.name for f in TURN if not f.nullable)
_TURN_KEYS = frozenset(f.name for f in TURN)
_ARRAYS = (("prompt_delta_ids", "i"), ("generation_token_ids", "i"), ("generation_log_probs", "f"))


def check_rollout(row: Mapping[str, Any]) -> None:
    """Raise DataError naming the field when ``row`` is not a rollouts row."""
    if not row.keys() <= _KNOWN or not row.keys() >= _REQUIRED:
        missing, extra = sorted(_REQUIRED - row.keys()), sorted(row.keys() - _KNOWN)
        raise _fault(row, ", ".join(missing + extra), f"missing {missing}, unknown {extra}", "the columns of rollouts")
    for name, accepted in _COLUMNS:
        value = row.get(name)
        if not isinstance(value, accepted) or value is True or value is False:
            raise _fault(row, name, repr(value)[:60], " or ".join(t.__name__ for t in accepted))
    if row["started_at"].tzinfo is None:
        raise _fault(row, "started_at", "a time without zone", "a time with zone")
    names = [part.get("name") for part in row["rewards"]]
    if len(set(names)) != len(names):
        raise _fault(row, "rewards", f"the names {names}", "distinct names")
    for i, message in enumerate(row["messages"]):
        if not message.keys() <= _MESSAGE_KEYS:
            raise _fault(row, f"messages[{i}]", ", ".join(message), ", ".join(sorted(_MESSAGE_KEYS)))
        for name, accepted in _MESSAGE:
            if not isinstance(message.get(name), accepted):
                raise _fault(row, f"messages[{i}].{name}", repr(message.get(name))[:60], accepted[0].__name__)
    for i, turn in enumerate(row["turns"]):
        _check_turn(row, i, turn)


def _check_turn(row: Mapping[str, Any], i: int, turn: Mapping[str, Any]) -> None:
    if not turn.keys() <= _TURN_KEYS or not turn.keys() >= _TURN_REQUIRED:
        raise _fault(row, f"turns[{i}]", ", ".join(turn), ", ".join(sorted(_TURN_KEYS)))
    for name, kind in _ARRAYS:
        values = turn[name]
        if not isinstance(values, np.ndarray):
            raise _fault(row, f"turns[{i}].{name}", type(values).__name__, "a numpy array")
        if values.dtype.kind != kind or values.ndim != 1:
            raise _fault(row, f"turns[{i}].{name}", f"{values.ndim}-dimensional {values.dtype}", "a flat array")
    if len(turn["generation_token_ids"]) != len(turn["generation_log_probs"]):
        got = f"{len(turn['generation_log_probs'])} for {len(turn['generation_token_ids'])} tokens"
        raise _fault(row, f"turns[{i}].generation_log_probs", got, "one log-probability a token")


def _fault(row: Mapping[str, Any], field: str, got: str, expected: str) -> DataError:
    return DataError(f"rollout {row.get('rollout_id')!r}, field {field!r}: got {got}, expected {expected}")
