"""Reading rollouts from JSON lines for validation: rows of the rollouts table as text, sealed or not.

Invariants: every line is either in a batch or named by a violation (S101 unreadable, S102 wrong type, S103 missing);
one bad row never hides another; non-finite numbers are read in every form that Python or gymdata writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from gymdata.checks.violations import UnknownKey, Violation
from gymdata.errors import DataError, json_kind, json_value
from gymdata.formats.nemo_gym.rows import BadRow
from gymdata.rollouts.messages import JsonObject
from gymdata.rollouts.schema import MESSAGE, ROLLOUTS, TURN
from gymdata.rollouts.turn_columns import Evidence, from_arrow
from gymdata.store.columns import build, misfit
from gymdata.store.journal import Line, lines_of
from gymdata.store.lines import RepeatedKeyError, decode, decode_row
from gymdata.store.paths import Source
from gymdata.store.tables import PARSE_BYTES

_BATCH_ROWS = 20_000
_STATUS = ("completed", "truncated")
_TOKEN_LISTS = ("prompt_delta_ids", "generation_token_ids", "generation_log_probs")
#: Without a list of tokens a turn is a row still: T205 and L301 name it.
_TURN = pa.struct([f.with_nullable(f.nullable or f.name in _TOKEN_LISTS) for f in TURN])
_FIELDS = {f.name: f.with_type(pa.list_(_TURN)) if f.name == "turns" else f for f in ROLLOUTS.schema}
_KNOWN_KEYS = {
    "": _FIELDS.keys(),
    "turns[].": {f.name for f in TURN},
    "messages[].": {f.name for f in MESSAGE},
}

#: The number of a row in its file, and its value.
_Row = tuple[int, JsonObject]


def scan(source: Source, unknown: dict[str, UnknownKey]) -> Iterator[Evidence | Violation]:
    """The batches of one file of JSON lines, and violations for the rows that are in none. Keys that nothing reads are
    counted in ``unknown``."""
    rows: list[_Row] = []
    columns: list[str] = []
    size = 0
    try:
        for number, line in enumerate(lines_of(source)):
            if line.body is None:
                yield _damage(number, line)
                continue
            try:
                row = _row(line.body)
            except BadRow as bad:
                yield Violation(bad.code, number, detail=bad.detail, **bad.more)
                continue
            for key in sorted(take_unknown(row)):
                unknown.setdefault(key, UnknownKey(number)).rows += 1
            present = [name for name in _FIELDS if name in row or name not in ROLLOUTS.optional]
            if present != columns or size >= PARSE_BYTES or len(rows) >= _BATCH_ROWS:
                yield from _checked(rows, columns)
                rows, columns, size = [], present, 0
            rows.append((number, row))
            size += len(line.body)
    except DataError as error:
        yield Violation("S101", rows[-1][0] + 1 if rows else 0, detail=error.message)
    yield from _checked(rows, columns)


def take_unknown(row: JsonObject) -> set[str]:
    """Take the keys that the table does not have out of ``row``."""
    keys = set()
    for where, items in (("", [row]), ("turns[].", row.get("turns")), ("messages[].", row.get("messages"))):
        for item in items if isinstance(items, list) else ():
            if isinstance(item, dict) and not item.keys() <= _KNOWN_KEYS[where]:
                for key in item.keys() - _KNOWN_KEYS[where]:
                    keys.add(where + key)
                    del item[key]
    return keys


def _damage(number: int, line: Line) -> Violation:
    where = "" if line.offset is None else f" at byte {line.offset}"
    if line.closed:
        return Violation("S101", number, detail=f"damaged line{where}: its checksum does not match")
    # A writer was killed, or is writing now; resuming cuts it off. Nothing that was whole is lost.
    return Violation("S101", number, detail=f"torn last line{where}; resuming the run cuts it off", severity="warning")


def _row(line: bytes) -> JsonObject:
    """The value of a line. Raises BadRow for what is not an object of JSON, a key given twice, an unknown status."""
    try:
        row = decode_row(line)
    except RepeatedKeyError as error:
        raise BadRow("S102", f"the key {error.args[0]!r} is given twice", rollout_id=_id_of(decode(line))) from error
    except (ValueError, RecursionError) as error:
        raise BadRow("S101", f"not JSON: {str(error)[:200]}") from error
    if not isinstance(row, dict):
        raise BadRow("S101", f"got {json_kind(row)}, expected an object")
    if row.get("status", "completed") not in _STATUS:
        got = json_value(row["status"])
        raise BadRow("S102", "status", expected=" or ".join(_STATUS), got=got, rollout_id=_id_of(row))
    if row.get("turns", []) is None:
        row["turns"] = []
    return row


def _id_of(row: JsonObject) -> str | None:
    return row["rollout_id"] if isinstance(row.get("rollout_id"), str) else None


def _checked(rows: Sequence[_Row], columns: Sequence[str]) -> Iterator[Evidence | Violation]:
    """The rows as a batch; where one does not fit, each half of them alone, down to the violation of a single row."""
    if not rows:
        return
    numbers, values = zip(*rows, strict=True)
    table = replace(ROLLOUTS, schema=pa.schema([_FIELDS[name] for name in columns]))
    try:
        batch = build(values, table, columns, "rows", numbers)
    except DataError:
        if len(rows) == 1:
            yield _fault(*rows[0], columns)
            return
        middle = len(rows) // 2
        yield from _checked(rows[:middle], columns)
        yield from _checked(rows[middle:], columns)
        return
    evidence = from_arrow(batch, 0)
    evidence.rows[:] = numbers
    yield evidence


def _fault(number: int, row: JsonObject, columns: Sequence[str]) -> Violation:
    """The first value of the row that does not fit the table, named by its turn and position."""
    faults = ((name, misfit(_FIELDS[name], row.get(name))) for name in columns)
    steps, expected = next(([name, *fault[0]], fault[1]) for name, fault in faults if fault is not None)
    path: list[Any] = steps
    turn = position = None
    if path[0] == "turns":
        turn = path[1] if len(path) > 1 else None
        position = path[3] if len(path) > 3 and path[2] in _TOKEN_LISTS else None
        path = path[: 3 if position is None else 4]
        name = str(path[2]) if len(path) > 2 else "turns" if turn is None else "a turn"
    elif path[0] == "messages":
        path = path[:3]
        name = "messages" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path[1:])
    else:
        path = path[:1]
        name = str(path[0])
    parent: Any = row
    for step in path[:-1]:
        parent = parent[step]
    if isinstance(parent, dict) and path[-1] not in parent:
        owner = "row" if len(path) == 1 else path[0][:-1]
        return Violation("S103", number, _id_of(row), turn, expected=name, detail=f"the {owner} has no {path[-1]}")
    got = json_value(parent[path[-1]])
    return Violation("S102", number, _id_of(row), turn, position, expected=expected, got=got, detail=name)
