"""Rows to Arrow batches and back, and the one model of a row: where one does not fit its table, what is expected there,
and what is there.

Invariants: building is strict (an id that is 2.0, "2", true or null is refused, never rounded or dropped), an unknown
key is refused rather than lost, and ``to_rows`` of what was built gives the same rows. Token lists are moved through
flat buffers; nothing is boxed on the way out. A row fits exactly when it can be built, so nothing that was sampled gets
stuck in a journal.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import DataError, abridged, json_value, plural
from gymdata.rollouts.messages import TableRow
from gymdata.rollouts.ragged import Ints, Ragged, list_parts, offsets_of
from gymdata.rollouts.schema import HASHES, NAMED_VALUE, ROLLOUTS, TABLES, Table
from gymdata.store.formats import is_task, table_with
from gymdata.store.lines import NON_FINITE

_INTS: tuple[type, ...] = (int, np.int64, np.int32)
_NUMBERS: tuple[type, ...] = (int, float, np.float64, np.float32)
#: What Arrow raises for a value of the right type: a number that is too large, text that is not Unicode, no date.
_ARROW_FAULTS = (pa.ArrowException, ValueError, TypeError, OverflowError)


@dataclass(frozen=True, slots=True)
class Misfit:
    """Where a row does not fit: keys and positions from the row on, what is expected there, and what is there."""

    path: tuple[str | int, ...]
    expected: str
    got: str
    missing: bool = False

    @property
    def field(self) -> str:
        """The path as text: ``turns[0].generation_token_ids[1]``."""
        return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path)[1:]


class Row(NamedTuple):
    """A row as it was read: its 0-based number, its 1-based line, its value, and its bytes."""

    number: int
    line: int
    value: Any
    size: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that fit, with the 0-based number of each in its file."""

    data: pa.RecordBatch
    rows: Ints

    @property
    def row(self) -> int:
        return int(self.rows[0])

    def slices(self, size: int) -> Iterator[Batch]:
        """Batches of at most ``size`` rows."""
        for start in range(0, len(self.rows), size):
            yield Batch(self.data.slice(start, size), self.rows[start : start + size])

    def only(self, wanted: Any) -> Batch:
        """The rows for which ``wanted`` is true."""
        return self if wanted.all() else Batch(self.data.filter(pa.array(wanted)), self.rows[wanted])


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a row, or with a file from ``row`` on.

    ``kind``: a ``row`` that does not fit; one with ``unknown`` keys, which are taken out of it; a line that is ``damaged``,
    or ``torn`` at the end of a file; a ``file`` that cannot be read further, whose error is ``raised``.
    """

    kind: Literal["row", "unknown", "damaged", "torn", "file"]
    code: str
    row: int
    where: str
    table: Table
    #: What is wrong, for a list of faults.
    detail: str
    line: int | None = None
    offset: int | None = None
    misfit: Misfit | None = None
    #: The row, as far as it could be read, and its unknown keys.
    value: Any = None
    keys: tuple[str, ...] = ()
    raised: DataError | None = None

    @classmethod
    def of_file(cls, error: DataError, row: int, where: str, table: Table, code: str = "S101") -> Fault:
        """What ends the reading of a file before ``row``. ``code``: where the error has none."""
        return cls("file", error.code or code, row, where, table, error.message, raised=error)

    @property
    def rollout_id(self) -> str | None:
        name = self.value.get("rollout_id") if isinstance(self.value, Mapping) else None
        return name if isinstance(name, str) else None

    def error(self) -> DataError:
        """The error of a reader that needs every row."""
        if self.raised is not None or self.misfit is None:
            return self.raised or DataError.unreadable(self.where, self.detail)
        if (other := _other_table(self.value, self.table)) is not None:
            return DataError.other_table(self.where, other, self.table.name)
        misfit, hint, field = self.misfit, None, self.misfit.field
        if self.line is None:
            place = f"{self.where}, row {self.row}, field {field!r}"
            return DataError(f"{place}: got {misfit.got}, expected {misfit.expected}")
        if self.table.name == ROLLOUTS.name and Path(self.where).is_file():
            hint = f"`gymdata validate {self.where}` names every such row, and repairs a copy"
        of_keys = misfit.missing or not misfit.path
        if of_keys and isinstance(self.value, Mapping) and self.value and not self.value.keys() & _IDS:
            keys = abridged([*self.value][:4])
            hint = f"its first keys are {keys}; `gymdata docs your-data` lists which rows of other systems are read"
        return DataError.bad_row(self.where, self.line, field or None, misfit.got, misfit.expected, hint)


def parts(rows: Sequence[Row], table: Table, columns: Sequence[str], where: str) -> Iterator[Batch | Fault]:
    """The rows in batches with ``columns``, and what is wrong with the others."""
    try:
        batch = _batch([row.value for row in rows], table, columns)
    except _MisfitError as error:
        if strange := [fault for row in rows if (fault := _without_unknown(row, table, where)) is not None]:
            yield from strange
            yield from parts(rows, table, columns, where)
        elif len(rows) > 1:
            yield from parts(rows[: len(rows) // 2], table, columns, where)
            yield from parts(rows[len(rows) // 2 :], table, columns, where)
        else:
            yield misfitting(rows[0], error.misfit, table, where)
    else:
        yield Batch(batch, np.array([row.number for row in rows], np.int64))


def misfitting(row: Row, found: Misfit, table: Table, where: str) -> Fault:
    """The fault of a row that does not fit."""
    code = "S103" if found.missing else "S102" if found.path else "S101"
    detail = (
        f"{found.field} is missing" if found.missing else found.field or f"got {found.got}, expected {found.expected}"
    )
    return Fault("row", code, row.number, where, table, detail, row.line, misfit=found, value=row.value)


def build(
    rows: Sequence[Any], table: Table, columns: Sequence[str], where: str, lines: Sequence[int]
) -> pa.RecordBatch:
    """A batch with ``columns`` of ``table`` from parsed JSON rows.

    ``lines`` has the 1-based line of each row. Raises DataError naming the line and the field of the first row that
    does not fit.
    """
    numbered = [Row(n, line, row, 0) for n, (line, row) in enumerate(zip(lines, rows, strict=True))]
    found = list(parts(numbered, table, columns, where))
    if faults := [part for part in found if isinstance(part, Fault)]:
        raise min(faults, key=lambda fault: fault.row).error()
    (batch,) = (part for part in found if isinstance(part, Batch))
    return batch.data


def _without_unknown(row: Row, table: Table, where: str) -> Fault | None:
    """Takes the keys that the table does not have out of the row and its objects. What is wrong with it, or None."""
    if not isinstance(row.value, dict):
        return None
    before, keys = dict(row.value), set[str]()
    lists = [f for f in table.schema if pa.types.is_list(f.type) and pa.types.is_struct(f.type.value_type)]
    known = {f"{f.name}[].": {child.name for child in f.type.value_type} for f in lists if f.type != _NAMED_VALUES}
    for place, names in {"": {*table.schema.names}, **known}.items():
        items = row.value.get(place[:-3]) if place else [row.value]
        for item in items if isinstance(items, list) else ():
            if isinstance(item, dict) and not item.keys() <= names:
                unknown = item.keys() - names
                keys |= {place + key for key in unknown}
                for key in unknown:
                    del item[key]
    if not keys:
        return None
    found = Misfit((), f"the columns of {table.name}", _unknown_fields(keys))
    place_of = (row.number, where, table, found.got, row.line)
    return Fault("unknown", "S102", *place_of, misfit=found, value=before, keys=tuple(sorted(keys)))


class _MisfitError(Exception):
    """A value of a column does not fit. ``index``: which one; ``misfit``: where in it, and why."""

    def __init__(self, index: int, misfit: Misfit) -> None:
        super().__init__(misfit)
        self.index, self.misfit = index, misfit

    def below(self, index: int, step: str | int) -> _MisfitError:
        """The same of the value at ``index`` that holds this one under ``step``."""
        return _MisfitError(index, replace(self.misfit, path=(step, *self.misfit.path)))


def _batch(rows: Sequence[Any], table: Table, columns: Sequence[str]) -> pa.RecordBatch:
    """A batch of rows that all fit; raises _MisfitError where one does not."""
    _check_keys(rows, table)
    fields = [table.schema.field(name) for name in columns]
    arrays = {f.name: _build_field(f, rows) for f in fields}
    # Hashes are computed where rows lack them.
    if lacking := [name for name in HASHES if name in arrays and arrays[name].null_count]:
        turns = arrays.get("turns") or _build_field(table.schema.field("turns"), rows)
        for name, hashes in content_hashes(turns).items():
            if name in lacking:
                arrays[name] = pc.coalesce(arrays[name], hashes.combine_chunks())
    return pa.RecordBatch.from_arrays(list(arrays.values()), schema=pa.schema(fields, metadata=table.metadata))


def content_hashes(turns: pa.ListArray | pa.ChunkedArray) -> dict[str, pa.ChunkedArray]:
    """The columns ``HASHES`` of a rollouts column ``turns``, by name: xxh3_64 of the first turn's prompt and of all sampled
    ids; null without turns."""
    columns: dict[str, list[Any]] = {name: [] for name in HASHES}
    for chunk in getattr(turns, "chunks", [turns]):
        offsets, struct = list_parts(chunk)
        empty = np.diff(offsets) == 0
        first = np.minimum(offsets[:-1], max(len(struct) - 1, 0))
        prompts = Ragged.of(struct.field("prompt_delta_ids")).take(first[~empty])
        generations = Ragged.of(struct.field("generation_token_ids")).grouped(offsets)
        for name, hashes in zip(HASHES, (prompts.hashes(), generations.hashes()[~empty]), strict=True):
            values = np.zeros(len(empty), np.int64)
            values[~empty] = hashes.view(np.int64)
            columns[name].append(pa.array(values, mask=empty))
    return {name: pa.chunked_array(chunks, pa.int64()) for name, chunks in columns.items()}


def to_rows(batch: pa.RecordBatch | pa.Table) -> list[TableRow]:
    """The rows of a batch as dicts that ``lines.encode`` writes; lists of numbers are numpy slices."""
    columns = (c.combine_chunks() if isinstance(c, pa.ChunkedArray) else c for c in batch.columns)
    values = map(_to_list, columns)
    return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*values, strict=True)]


def _check_keys(rows: Sequence[Any], table: Table) -> None:
    """Each row is an object with the keys that all must have, even where a looser form of the table allows a null."""
    strict = TABLES.get(table.name, table)
    required = [f.name for f in strict.schema if not f.nullable and f.name not in strict.optional]
    names, needed = frozenset(table.schema.names), frozenset(required)
    for index, row in enumerate(rows):
        if type(row) is not dict:
            raise _MisfitError(index, Misfit((), "an object", json_value(row)))
        if not row.keys() <= names:
            raise _MisfitError(index, Misfit((), f"the columns of {table.name}", _unknown_fields(row.keys() - names)))
        if not needed <= row.keys():
            lacking = next(name for name in required if name not in row)
            raise _MisfitError(index, Misfit((lacking,), "a value", "nothing", missing=True))


def _build_field(f: pa.Field, objects: Sequence[dict[str, Any]]) -> pa.Array:
    """The column of a field of objects; one that lacks it has a null. Raises _MisfitError, as all that builds."""
    try:
        return _build(f, [value.get(f.name) for value in objects])
    except _MisfitError as error:
        if not error.misfit.path and f.name not in objects[error.index]:
            missing = Misfit((f.name,), "a value", "nothing", missing=True)
            raise _MisfitError(error.index, missing) from error
        raise error.below(error.index, f.name) from error


def _build(f: pa.Field, values: list[Any]) -> pa.Array:
    """The column of ``values``."""
    kind = f.type
    if pa.types.is_list(kind):
        return _build_lists(f, values)
    if pa.types.is_struct(kind):
        _demand(values, (dict,), f)
        names = {child.name for child in kind}
        if not set().union(*values) <= names:
            index = next(index for index, value in enumerate(values) if not value.keys() <= names)
            found = Misfit((), abridged([child.name for child in kind]), _unknown_fields(values[index].keys() - names))
            raise _MisfitError(index, found)
        return pa.StructArray.from_arrays([_build_field(child, values) for child in kind], fields=list(kind))
    try:
        _demand(values, _types_of(kind), f)
    except _MisfitError:
        if not pa.types.is_floating(kind):
            raise
        # Texts name the numbers that are not finite.
        values = [NON_FINITE.get(v, v) if type(v) is str else v for v in values]
        _demand(values, _types_of(kind), f)
    try:
        return _plain(kind, values)
    except _ARROW_FAULTS as error:
        index = bisect_left(range(len(values)), True, key=lambda last: not _is_plain(kind, values[: last + 1]))
        raise _MisfitError(index, _misfit(kind, values[index])) from error


def _build_lists(f: pa.Field, values: list[Any]) -> pa.Array:
    """The column of ``values``, which are lists, or arrays of numbers."""
    item, child, mask = pa.field("item", f.type.value_type, nullable=False), None, None
    if set(map(type, values)) == {np.ndarray}:
        with contextlib.suppress(*_ARROW_FAULTS):
            child = pa.array(np.concatenate(values)).cast(item.type, safe=pa.types.is_integer(item.type))
    if child is None:
        values = [v.tolist() if isinstance(v, np.ndarray) else v for v in values]
        values = list(map(_named, values)) if item.type == NAMED_VALUE else values
        _demand(values, (list,), f)
        if f.nullable:
            mask = pa.array([v is None for v in values], pa.bool_())
            values = [v or [] for v in values]
    offsets = offsets_of(list(map(len, values)))
    if child is None:
        try:
            child = _build(item, list(chain.from_iterable(values)))
        except _MisfitError as error:
            index = int(np.searchsorted(offsets, error.index, side="right")) - 1
            raise error.below(index, error.index - int(offsets[index])) from error
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), child, type=f.type, mask=mask)


def _plain(kind: pa.DataType, values: list[Any]) -> pa.Array:
    if pa.types.is_timestamp(kind):
        return pa.array([v.isoformat() if isinstance(v, dt.datetime) else v for v in values], pa.string()).cast(kind)
    try:
        return pa.array(values, kind)
    except pa.ArrowInvalid:
        if not pa.types.is_floating(kind):
            raise
        # Arrow takes no large integer for a float.
        return pa.array([float(v) if type(v) is int else v for v in values], kind)


def _is_plain(kind: pa.DataType, values: list[Any]) -> bool:
    try:
        _plain(kind, values)
    except _ARROW_FAULTS:
        return False
    return True


def _named(value: Any) -> Any:
    """Named values as the list of a table: JSON lines write them as an object."""
    return [{"name": name, "value": part} for name, part in value.items()] if type(value) is dict else value


def _types_of(kind: pa.DataType) -> tuple[type, ...]:
    """Python's own types, exactly: Arrow would take 2.0 for an int and True for a float."""
    if pa.types.is_timestamp(kind):
        return str, dt.datetime
    if pa.types.is_floating(kind):
        return _NUMBERS
    return _INTS if pa.types.is_integer(kind) else (bool,) if pa.types.is_boolean(kind) else (str,)


def _demand(values: list[Any], types: tuple[type, ...], f: pa.Field) -> None:
    allowed = {*types, type(None)} if f.nullable else {*types}
    if not set(map(type, values)) <= allowed:
        index = next(index for index, value in enumerate(values) if type(value) not in allowed)
        raise _MisfitError(index, _misfit(f.type, values[index]))


def _misfit(kind: pa.DataType, value: Any) -> Misfit:
    expected = "text in Unicode" if isinstance(value, str) and pa.types.is_string(kind) else _expected(kind)
    return Misfit((), expected, json_value(value))


_NAMED_VALUES = pa.list_(NAMED_VALUE)
#: Keys that only rows of one table have.
_IDS = {"rollout_id", "pair_id", "comparison_id"}


def _other_table(row: Any, table: Table) -> str | None:
    """What a JSON row is that cannot be of ``table``: a task, or a row of another one; None where that is not known."""
    if not isinstance(row, Mapping) or row.keys() <= frozenset(table.schema.names):
        return None
    other = "tasks" if is_task(row) else table_with(row.keys())
    return None if other == table.name else other


def _to_list(array: pa.Array) -> list[Any]:
    kind = array.type
    values: list[Any]
    if _has_arrow_values(kind):
        values = array.to_pylist()
        return values
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        offsets, items = list_parts(array)
        numeric = pa.types.is_integer(items.type) or pa.types.is_floating(items.type)
        flat: Any = items.to_numpy(zero_copy_only=False) if numeric and not items.null_count else _to_list(items)
        values = [flat[a:b] for a, b in pairwise(offsets.tolist())]
        values = list(map(_by_name, values)) if kind.value_type == NAMED_VALUE else values
    elif pa.types.is_struct(kind):
        columns = map(_to_list, array.flatten())
        values = [dict(zip([f.name for f in kind], row, strict=True)) for row in zip(*columns, strict=True)]
    else:
        # Numpy scalars are written with the digits of a float32.
        return [None if v is None else np.float32(v) for v in array.to_pylist()]
    if not array.null_count:
        return values
    return [value if valid else None for value, valid in zip(values, array.is_valid().to_pylist(), strict=True)]


def _has_arrow_values(kind: pa.DataType) -> bool:
    """Whether a row has the values that Arrow makes, many times faster: no array of numbers, float32 or named value."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.types.is_struct(kind.value_type) and _has_arrow_values(kind.value_type)
    if pa.types.is_struct(kind):
        return kind != NAMED_VALUE and all(_has_arrow_values(f.type) for f in kind)
    return not pa.types.is_float32(kind)


def _by_name(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Named values as JSON lines write them. Raises DataError for a name that is there twice."""
    named = {part["name"]: part["value"] for part in parts}
    if len(named) != len(parts):
        names = ", ".join(part["name"] for part in parts)
        raise DataError(f"two parts of one reward have the same name ({names}); JSON lines need distinct names")
    return named


def _unknown_fields(names: Collection[str]) -> str:
    return f"unknown {plural(len(names), 'field')} {abridged(sorted(names))}"


def _expected(kind: pa.DataType) -> str:
    if pa.types.is_integer(kind):
        return f"a whole number ({kind})"
    if pa.types.is_floating(kind):
        return f'a number ({kind}), or "NaN", "Infinity", "-Infinity"'
    if pa.types.is_boolean(kind):
        return "true or false"
    if pa.types.is_timestamp(kind):
        return "an ISO 8601 time with offset"
    if pa.types.is_list(kind):
        return "a list"
    return "an object" if pa.types.is_struct(kind) else "text"


def check_rollout(row: TableRow) -> None:
    """Raise DataError naming the field when ``row`` is not a rollouts row, or could not be written as one."""
    where = f"rollout {row.get('rollout_id')!r}"
    try:
        _batch([row], ROLLOUTS, ROLLOUTS.schema.names)
    except _MisfitError as error:
        found = error.misfit
        raise DataError(f"{where}, field {found.field!r}: got {found.got}, expected {found.expected}") from error
    names = [part["name"] for part in row["rewards"]]
    if len(set(names)) != len(names):
        raise DataError(f"{where}, field 'rewards': got the names {names}, expected distinct names")
    for i, turn in enumerate(row["turns"]):
        tokens, log_probs = len(turn["generation_token_ids"]), len(turn["generation_log_probs"])
        if tokens != log_probs:
            field = f"turns[{i}].generation_log_probs"
            raise DataError(f"{where}, field {field!r}: got {log_probs} for {tokens} tokens, expected one a token")
