"""What gymdata's rollouts have beyond the fields of other formats.

Invariants: ``from_own(own_columns(row))`` gives the columns back; facts of a message are exactly what reading its
foreign form would get wrong.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import cache
from typing import Any

import numpy as np

from gymdata.errors import DataError, json_value
from gymdata.interop.importing import BadItem
from gymdata.interop.rows import message_fields, number_or_none
from gymdata.interop.words import as_float
from gymdata.rollouts.messages import JsonObject, Message, RolloutRow
from gymdata.rollouts.turns import Call, Floats, Ids, Turn, TurnEncoder
from gymdata.store.lines import NON_FINITE

#: The key of gymdata's own facts in another format's objects.
OWN = "gymdata"
#: Held by other fields, or computed from the turns when a row is written.
_ELSEWHERE = ("messages", "turns", "n_turns", "n_breaks", "n_context_tokens", "n_generated_tokens")
_INT32 = 2**31


@cache
def _columns() -> dict[str, int | None]:
    """The columns besides messages and turns, with the bits of those that are whole numbers."""
    from gymdata.rollouts.schema import HASHES, ROLLOUTS  # loads pyarrow

    fields = [field for field in ROLLOUTS.schema if field.name not in (*_ELSEWHERE, *HASHES)]
    return {field.name: field.type.bit_width if str(field.type).startswith("int") else None for field in fields}


def own_columns(row: RolloutRow) -> RolloutRow:
    """The columns of a row (as ``store.columns.to_rows`` gives it) besides messages and turns, as JSON values."""
    columns = {name: row[name] for name in _columns()}
    when = row["started_at"]
    columns["started_at"] = when if isinstance(when, str) else when.isoformat()
    columns["temperature"] = shortest(row["temperature"])
    return columns


def from_own(facts: Any) -> RolloutRow | None:
    """The columns of ``own_columns``; None when it does not have them all."""
    names = _columns()
    return {name: facts[name] for name in names} if isinstance(facts, dict) and names.keys() <= facts.keys() else None


def whole_row(columns: RolloutRow, messages: list[Message], encoder: TurnEncoder) -> RolloutRow:
    """A row as ``Run.append`` takes it. Raises BadItem when the columns are not of their types."""
    from gymdata.store.columns import check_rollout

    row = columns | {"messages": messages, **encoder.columns()}
    # What ``check_rollout`` takes by its type and no column can hold is refused first.
    for name, bits in _columns().items():
        value = columns[name]
        if bits is not None and type(value) is int and not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            raise BadItem("S102", f"{name}: got {value}, expected a {bits}-bit integer")
    rewards = columns["rewards"]
    if not isinstance(rewards, dict):
        raise BadItem("S102", f"rewards: got {rewards!r:.60}, expected an object of numbers")
    for part, value in rewards.items():
        if value is not None and type(value) not in (int, float) and value not in ("NaN", "Infinity", "-Infinity"):
            raise BadItem("S102", f"rewards.{part}: got {value!r:.60}, expected a number or null")
    when = columns["started_at"]
    try:
        datetime.fromisoformat(when).astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        raise BadItem("S102", f"started_at: got {when!r:.60}, expected an ISO 8601 time with offset") from None
    try:
        extra = json.loads(columns["extra"])
    except (TypeError, ValueError, RecursionError):
        extra = None
    if not isinstance(extra, dict):
        raise BadItem("S102", f"extra: got {columns['extra']!r:.60}, expected the JSON text of an object")
    try:
        parts = [{"name": name, "value": value} for name, value in row["rewards"].items()]
        check_rollout(row | {"rewards": parts, "started_at": datetime.fromisoformat(row["started_at"])})
    except (DataError, AttributeError, TypeError, ValueError) as error:
        raise BadItem("S102", str(error)) from error
    return row


def facts_beyond(message: Message, read: JsonObject) -> JsonObject:
    """The fields of ``message`` that reading its foreign form, which gave ``read``, would get wrong."""
    return {name: message.get(name) for name in message_fields() if message.get(name) != read.get(name)}


def with_facts(read: JsonObject, facts: Any) -> JsonObject:
    """``read`` as ``facts_beyond`` corrects it. Raises BadItem for invalid facts."""
    if not isinstance(facts, dict):
        return read
    message = read | {name: facts[name] for name in message_fields() if name in facts}
    for name, value in message.items():
        expected = "number" if name == "turn" else "text"
        if type(value) is not (int if name == "turn" else str) and not (value is None and name != "role"):
            raise BadItem("S102", f"gymdata.{name} of a message: got {json_value(value)}, expected {expected}")
    if message["turn"] is not None and not -_INT32 <= message["turn"] < _INT32:
        raise BadItem("S102", f"gymdata.turn of a message: got {message['turn']}, expected a 32-bit integer")
    return message


def turn_facts(turn: Turn) -> JsonObject:
    """The fields of a turn besides ids and log-probabilities."""
    facts: JsonObject = {"finish_reason": turn["finish_reason"]}
    facts |= {
        name: turn[name] for name in ("agent", "reward", "server", "weight_versions") if turn.get(name) is not None
    }
    facts |= {"rendered": True} if turn.get("rendered") else {}
    if (top := turn.get("top_log_probs")) is not None:
        facts["top_log_probs"] = [
            [{"id": int(entry["id"]), "log_prob": shortest(entry["log_prob"])} for entry in token] for token in top
        ]
    return facts


def sampled_by(facts: JsonObject) -> JsonObject:
    """server and weight_versions of ``turn_facts``, for a ``Call``; what is not of their types is left out."""
    server, spans = facts.get("server"), facts.get("weight_versions")
    sampler: JsonObject = {"server": server} if isinstance(server, str) and server.isprintable() else {}
    if not isinstance(spans, list) or not spans:
        return sampler
    for span in spans:
        if (
            not isinstance(span, dict)
            or not isinstance(version := span.get("version"), str)
            or not version.isprintable()
        ):
            break
        if not all(type(position := span.get(end)) is int and 0 <= position < _INT32 for end in ("start", "end")):
            break
    else:
        sampler["weight_versions"] = [{name: span[name] for name in ("version", "start", "end")} for span in spans]
    return sampler


def call_of(facts: JsonObject, prompt: Ids, generation: Ids, log_probs: Floats, top: Any, agent: Any = None) -> Call:
    """The call of these lists with the ``turn_facts`` of its source, where it has them. ``agent``: whose it is otherwise."""
    finish, agent = facts.get("finish_reason", "stop"), facts.get("agent", agent)
    return Call(
        prompt,
        generation,
        log_probs,
        finish if isinstance(finish, str) else "stop",
        agent if isinstance(agent, str) else None,
        number_or_none(facts.get("reward")),
        top,
        facts.get("rendered") is True or None,
        **sampled_by(facts),
    )


def ids_of(values: Any, where: str) -> np.ndarray | None:
    """A list of token ids as int32; None when it is no list or empty. Raises BadItem for what is no id."""
    if not isinstance(values, list) or not values:
        return None
    for position, value in enumerate(values):
        if type(value) is not int or not -_INT32 <= value < _INT32:
            raise BadItem("S102", f"{where}: position {position}: got {value!r:.60}, expected a 32-bit integer")
    return np.array(values, np.int32)


def id_of(value: Any) -> int:
    """One token id. Raises ValueError for anything else."""
    if type(value) is not int or not -_INT32 <= value < _INT32:
        raise ValueError(value)
    return value


def log_probs_of(values: Any, length: int) -> np.ndarray:
    """Log-probabilities as float32; NaN for all when they are not one per token."""
    if isinstance(values, list) and len(values) == length:
        numbers: list[Any] = [NON_FINITE.get(v, v) if isinstance(v, str) else v for v in values]
        if all(type(v) in (int, float) for v in numbers):
            with np.errstate(over="ignore"):
                return np.array([as_float(v) for v in numbers], np.float32)
    return np.full(length, np.nan, np.float32)


def shortest(value: Any) -> float:
    """A float32 as the shortest number that reads back as the same float32."""
    return float(str(np.float32(NON_FINITE[value] if isinstance(value, str) else value)))


def list_of(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def named_turns(row: RolloutRow) -> set[int]:
    """The turns that an answer of the messages names."""
    named = {message.get("turn") for message in row["messages"] if message["role"] == "assistant"}
    return {turn for turn in named if turn is not None and 0 <= turn < len(row["turns"])}
