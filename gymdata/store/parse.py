"""Parsing journaled rows: token lists straight into arrays where simdjson is installed.

Invariants: the result builds the same columns as plain JSON parsing does. Only for rows that this code journaled:
simdjson would flatten a nested list, and ``check_rollout`` lets none into a journal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

_BUFFERS = {
    "prompt_delta_ids": ("i", np.int64),
    "generation_token_ids": ("i", np.int64),
    "generation_log_probs": ("d", np.float64),
}


def row_parser() -> Callable[[bytes], Any]:
    """A function from a journaled row's JSON to the row; lists of tokens may be arrays. Not for several threads."""
    try:
        import simdjson
    except ImportError:
        # No wheel for this Python: slower, otherwise the same.
        return orjson.loads
    parser = simdjson.Parser()

    def parse(body: bytes) -> Any:
        try:
            return _row(parser.parse(body))
        except (TypeError, ValueError):
            # A log-probability that is not finite is a word, which fits no buffer.
            return orjson.loads(body)

    return parse


def _row(document: Any) -> dict[str, Any]:
    row = {key: _plain(document[key]) for key in document if key != "turns"}
    row["turns"] = [_turn(turn) for turn in document["turns"]]
    return row


def _turn(turn: Any) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key in turn:
        value = turn[key]
        if key in _BUFFERS:
            kind, dtype = _BUFFERS[key]
            result[key] = np.frombuffer(value.as_buffer(of_type=kind), dtype)
        else:
            result[key] = _plain(value)
    return result


def _plain(value: Any) -> Any:
    if hasattr(value, "as_list"):
        return value.as_list()
    return value.as_dict() if hasattr(value, "as_dict") else value
