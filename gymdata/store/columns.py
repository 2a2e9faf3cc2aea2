"""Rows to Arrow batches and back, and the one model of a row: where one does not fit its table, what is expected there,
and what is there.

Invariants: building is strict (an id that is 2.0, "2", true or null is refused, never rounded or dropped), an unknown
key is refused rather than lost, and ``to_rows`` of what was built gives the same rows. Token lists are moved through
flat buffers; nothing is boxed on the way out. A row fits exactly when it can be built, so nothing that was sampled gets
stuck in a journal.
"""

from __future__ import annotations

import datetime as dt
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import DataError, abridged, json_value, plural
from gymdata.rollouts.messages import TableRow
from gymdata.rollouts.ragged import Columns, Ints, Ragged, Runs, list_parts
from gymdata.rollouts.schema import HASHES, NAMED_VALUE, ROLLOUTS, TABLES, Table
from gymdata.store.formats import ANSWERED, TASK
from gymdata.store.lines import NON_FINITE

#: What building raises for a row that does not fit.
_FAULTS = (pa.ArrowException, ValueError, TypeError, AttributeError, OverflowError)
_INTS: tuple[type, ...] = (int, np.int64, np.int32)
_NUMBERS: tuple[type, ...] = (int, float, np.float64, np.float32)


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

    @property
    def rollout_id(self) -> str | None:
        name = self.value.get("rollout_id") if isinstance(self.value, Mapping) else None
        return name if isinstance(name, str) else None

    def error(self) -> DataError:
        """The error of a reader that needs every row."""
        if self.raised is not None or self.misfit is None:
            return self.raised or DataError.unreadable(self.where, self.detail)
        if (other := other_rows(self.value, self.table, self.where)) is not None:
            return other
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
    except _FAULTS:
        batch = None
    if batch is not None:
        yield Batch(batch, np.array([row.number for row in rows], np.int64))
    elif strange := [fault for row in rows if (fault := _without_unknown(row, table, where)) is not None]:
        yield from strange
        yield from parts(rows, table, columns, where)
    elif len(rows) > 1:
        yield from parts(rows[: len(rows) // 2], table, columns, where)
        yield from parts(rows[len(rows) // 2 :], table, columns, where)
    else:
        (row,) = rows
        yield misfitting(row, misfit(row.value, table, columns), table, where)


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
    try:
        return _batch(rows, table, columns)
    except _FAULTS as error:
        numbered = [Row(n, line, row, 0) for n, (line, row) in enumerate(zip(lines, rows, strict=True))]
        found = (part for part in parts(numbered, table, columns, where) if isinstance(part, Fault))
        raise min(found, key=lambda fault: fault.row).error() from error


def misfit(row: Any, table: Table, columns: Sequence[str]) -> Misfit:
    """The first place at which a row that cannot be built does not fit ``table``, of which it needs ``columns``."""
    if type(row) is not dict:
        return Misfit((), "an object", json_value(row))
    if extra := row.keys() - set(table.schema.names):
        return Misfit((), f"the columns of {table.name}", _unknown_fields(extra))
    if lacking := [name for name in _keys(table) if name not in row]:
        return Misfit((lacking[0],), "a value", "nothing", missing=True)
    # Hashes that a row lacks are made of its turns.
    needed = [*columns, *(() if set(HASHES).isdisjoint(columns) else ("turns",))]
    for f in (table.schema.field(name) for name in needed):
        if (found := _misfit(f, row.get(f.name), (f.name,))) is not None:
            return found
    return Misfit((), f"a row of {table.name}", json_value(row))


def _misfit(f: pa.Field, value: Any, path: tuple[str | int, ...]) -> Misfit | None:
    if _fits(f, value):
        return None
    kind = f.type
    value = value.rows() if isinstance(value, Columns) else value
    if kind == _NAMED_VALUES and type(value) is dict:
        value = [{"name": name, "value": part} for name, part in value.items()]
    if pa.types.is_list(kind) and type(value) in (list, np.ndarray):
        item = pa.field("item", kind.value_type, nullable=False)
        first = bisect_left(range(len(value)), True, key=lambda last: not _fits(f, value[: last + 1]))
        below = (*path, first)
        return _misfit(item, value[first], below) or Misfit(below, _expected(item.type), json_value(value[first]))
    if pa.types.is_struct(kind) and type(value) is dict:
        names = [child.name for child in kind]
        if extra := value.keys() - set(names):
            return Misfit(path, abridged(names), _unknown_fields(extra))
        for child in kind:
            below = (*path, child.name)
            if child.name not in value and not child.nullable:
                return Misfit(below, "a value", "nothing", missing=True)
            if (found := _misfit(child, value.get(child.name), below)) is not None:
                return found
    expected = "text in Unicode" if isinstance(value, str) and pa.types.is_string(kind) else _expected(kind)
    return Misfit(path, expected, json_value(value))


def _fits(f: pa.Field, value: Any) -> bool:
    try:
        _build(f, [value])
    except _FAULTS:
        return False
    return True


def null_places(array: pa.Array, f: pa.Field) -> Iterator[tuple[int, tuple[str | int, ...]]]:
    """Where ``array`` has a null that ``f`` does not allow: the index, and the path from there on. A log-probability that
    is null is one that is not finite."""
    if array.null_count and not f.nullable:
        yield from ((int(index), ()) for index in np.flatnonzero(array.is_null()))
    if pa.types.is_list(f.type) and (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        offsets, values = list_parts(array)
        item = pa.field("item", f.type.value_type, nullable=pa.types.is_floating(f.type.value_type))
        for place, path in null_places(values, item):
            index = int(np.searchsorted(offsets, place, side="right")) - 1
            yield index, (place - int(offsets[index]), *path)
    elif pa.types.is_struct(f.type) and pa.types.is_struct(array.type):
        for child in f.type:
            if array.type.get_field_index(child.name) >= 0:
                below = null_places(array.field(child.name), child)
                yield from ((index, (child.name, *path)) for index, path in below)


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
    if before.keys() >= {"pair_id", "run_id"} and "pair_id" in keys:
        found = Misfit((), f"a row of {table.name}", "a pair, which train-dpo and train-reward take")
    place_of = (row.number, where, table, found.got, row.line)
    return Fault("unknown", "S102", *place_of, misfit=found, value=before, keys=tuple(sorted(keys)))


def _batch(rows: Sequence[Any], table: Table, columns: Sequence[str]) -> pa.RecordBatch:
    """A batch of rows that all fit; raises one of ``_FAULTS`` where one does not."""
    _check_keys(rows, table)
    fields = [table.schema.field(name) for name in columns]
    arrays = {f.name: _build(f, [row.get(f.name) for row in rows]) for f in fields}
    # Hashes are computed where rows lack them.
    if lacking := [name for name in HASHES if name in arrays and arrays[name].null_count]:
        turns = arrays.get("turns") or _build(table.schema.field("turns"), [row.get("turns") for row in rows])
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
    if isinstance(batch, pa.Table):
        batch = batch.combine_chunks()
        columns = [c.chunk(0) if c.num_chunks else pa.array([], c.type) for c in batch.columns]
    else:
        columns = batch.columns
    values = [_to_list(column) for column in columns]
    return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*values, strict=True)]


def unknown_fields(actual: pa.DataType, kind: pa.DataType, place: str) -> Iterator[str]:
    """The fields of objects in ``actual`` that ``kind`` does not have: a cast would lose them."""
    if pa.types.is_list(kind) and (pa.types.is_list(actual) or pa.types.is_large_list(actual)):
        yield from unknown_fields(actual.value_type, kind.value_type, f"{place}[]")
    elif pa.types.is_struct(kind) and pa.types.is_struct(actual):
        for child in actual:
            if kind.get_field_index(child.name) < 0:
                yield f"{place}.{child.name}"
            else:
                yield from unknown_fields(child.type, kind.field(child.name).type, f"{place}.{child.name}")


def _keys(table: Table) -> list[str]:
    """The keys that each row must have, even where a looser form of the table allows a null."""
    strict = TABLES.get(table.name, table)
    return [f.name for f in strict.schema if not f.nullable and f.name not in strict.optional]


def _check_keys(rows: Sequence[Any], table: Table) -> None:
    names, required = frozenset(table.schema.names), frozenset(_keys(table))
    if not all(type(row) is dict and required <= row.keys() <= names for row in rows):
        raise TypeError("a row is no object, or has other keys than the table")


def _build(f: pa.Field, values: list[Any]) -> pa.Array:
    """The column of ``values``; raises one of ``_FAULTS`` where one does not fit."""
    kind = f.type
    if pa.types.is_list(kind):
        # Lists of numbers may be parsed into arrays; rows with non-finite numbers (as strings) are lists.
        kinds = set(map(type, values))
        if kinds == {np.ndarray}:
            return _list_array(kind, list(map(len, values)), _numbers(kind.value_type, values))
        if np.ndarray in kinds:
            return _build(f, [v.tolist() if isinstance(v, np.ndarray) else v for v in values])
        if kinds == {Columns}:
            return _list_array(kind, list(map(len, values)), _build_columns(kind.value_type, values))
        if Columns in kinds:
            values = [v.rows() if isinstance(v, Columns) else v for v in values]
        if kind == _NAMED_VALUES:
            # JSON lines write them as an object.
            values = [[{"name": k, "value": x} for k, x in v.items()] if type(v) is dict else v for v in values]
        _demand(values, (list,), f)
        nulls = None in values
        filled = [v or () for v in values] if nulls else values
        child = _build(pa.field("item", kind.value_type, nullable=False), list(chain.from_iterable(filled)))
        mask = pa.array([v is None for v in values]) if nulls else None
        return _list_array(kind, list(map(len, filled)), child, mask)
    if pa.types.is_struct(kind):
        _demand(values, (dict,), f)
        names = [child.name for child in kind]
        if not set().union(*values) <= set(names):
            raise TypeError("an unknown field")
        children = [_build(child, [v.get(name) for v in values]) for child, name in zip(kind, names, strict=True)]
        return pa.StructArray.from_arrays(children, fields=list(kind))
    if pa.types.is_timestamp(kind):
        _demand(values, (str, dt.datetime), f)
        return pa.array([v.isoformat() if isinstance(v, dt.datetime) else v for v in values], pa.string()).cast(kind)
    if pa.types.is_floating(kind):
        if str in set(map(type, values)):  # the strings for non-finite numbers
            values = [NON_FINITE.get(v, v) if type(v) is str else v for v in values]
        kinds = set(map(type, values))
        if kinds != {float}:
            _demand(values, _NUMBERS, f)
        values = [float(v) if type(v) is int else v for v in values] if int in kinds else values
    else:
        _demand(values, (bool,) if pa.types.is_boolean(kind) else _INTS if pa.types.is_integer(kind) else (str,), f)
    return pa.array(values, kind)


def _numbers(kind: pa.DataType, arrays: Sequence[np.ndarray]) -> pa.Array:
    return pa.array(np.concatenate(arrays)).cast(kind, safe=pa.types.is_integer(kind))


def _list_array(kind: pa.ListType, lengths: Sequence[int], child: pa.Array, mask: pa.Array | None = None) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), child, type=kind, mask=mask)


def _build_columns(kind: pa.StructType, values: Sequence[Columns]) -> pa.Array:
    """The objects of all ``values``, one after the other."""
    if not set().union(*(columns.of for columns in values)) <= {f.name for f in kind}:
        raise TypeError("an unknown field")
    children = []
    for f in kind:
        parts = [columns.of.get(f.name, [None] * len(columns)) for columns in values]
        runs = [part for part in parts if isinstance(part, Runs)]
        if len(runs) == len(parts):
            lengths = list(chain.from_iterable(part.lengths for part in runs))
            numbers = _numbers(f.type.value_type, [part.values for part in runs])
            children.append(_list_array(f.type, lengths, numbers))
        else:
            children.append(_build(f, list(chain.from_iterable(parts))))
    return pa.StructArray.from_arrays(children, fields=list(kind))


def _demand(values: list[Any], types: tuple[type, ...], f: pa.Field) -> None:
    """Python's own types, exactly: Arrow would take 2.5 for an int and True for a float."""
    if not set(map(type, values)) <= ({*types, type(None)} if f.nullable else {*types}):
        raise TypeError("a value of another type")


_NAMED_VALUES = pa.list_(NAMED_VALUE)
#: Keys that only rows of one table have.
_IDS = {"rollout_id", "pair_id", "comparison_id"}


def other_rows(row: Any, table: Table, where: str) -> DataError | None:
    """Why the JSON row cannot be of ``table``, where it is a task or of another one; None where that is not known."""
    if not isinstance(row, Mapping) or row.keys() <= frozenset(table.schema.names):
        return None
    if not row.keys() & _IDS and row.keys() & TASK and not row.keys() & ANSWERED:
        return DataError.other_table(where, "tasks", table.name)
    for other in TABLES.values():
        needed = {name for name in other.required() if not other.schema.field(name).nullable}
        if needed <= row.keys() <= frozenset(other.schema.names):
            return DataError.other_table(where, other.name, table.name)
    return None


def _to_list(array: pa.Array) -> list[Any]:
    kind, plain = array.type, _is_plain(array.type)
    if not plain and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        kind = array.type.value_type
        offsets = array.offsets.to_numpy()
        start = int(offsets[0]) if len(offsets) else 0
        flat = array.values.slice(start, int(offsets[-1]) - start if len(offsets) else 0)
        bounds = (offsets - start).tolist()
        items: Any = (
            flat.to_numpy(zero_copy_only=False)
            if (pa.types.is_integer(kind) or pa.types.is_floating(kind)) and not flat.null_count
            else _to_list(flat)
        )
        slices: list[Any] = [items[a:b] for a, b in pairwise(bounds)]
        if kind == NAMED_VALUE:
            for index, parts in enumerate(slices):
                slices[index] = {part["name"]: part["value"] for part in parts}
                if len(slices[index]) != len(parts):
                    named = ", ".join(part["name"] for part in parts)
                    raise DataError(
                        f"two parts of one reward have the same name ({named}); JSON lines need distinct names"
                    )
        return slices if not array.null_count else _hide_nulls(slices, array)
    if not plain and pa.types.is_struct(kind):
        names = [f.name for f in kind]
        columns = [_to_list(child) for child in array.flatten()]
        rows: list[Any] = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        return rows if not array.null_count else _hide_nulls(rows, array)
    values: list[Any] = array.to_pylist()
    # Numpy scalars are written with the digits of a float32.
    return [None if v is None else np.float32(v) for v in values] if pa.types.is_float32(kind) else values


def _is_plain(kind: pa.DataType) -> bool:
    """Whether Arrow's own values are those of ``to_rows``: it has no list of numbers, no float32 and no named value."""
    if pa.types.is_struct(kind):
        return kind != NAMED_VALUE and all(_is_plain(f.type) for f in kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return (pa.types.is_struct(kind.value_type) or pa.types.is_string(kind.value_type)) and _is_plain(
            kind.value_type
        )
    return not pa.types.is_float32(kind)


def _hide_nulls(values: list[Any], array: pa.Array) -> list[Any]:
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return [v if ok else None for v, ok in zip(values, valid, strict=True)]


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


def _sure(kind: pa.DataType, nullable: bool) -> Callable[[Any], bool]:
    """Whether a value, as gymdata makes it, is sure to fit: known in microseconds, where building takes milliseconds."""
    check: Callable[[Any], bool]
    if pa.types.is_list(kind) and not pa.types.is_nested(kind.value_type):
        dtype = np.dtype(kind.value_type.to_pandas_dtype())
        check = lambda v: type(v) is np.ndarray and v.dtype == dtype and v.ndim == 1  # noqa: E731 - one of several
    elif pa.types.is_list(kind):
        item = _sure(kind.value_type, False)
        check = lambda v: type(v) is list and all(map(item, v))  # noqa: E731 - one of several
    elif pa.types.is_struct(kind):
        of = {f.name: _sure(f.type, f.nullable) for f in kind}
        check = lambda v: v.keys() <= of.keys() and all(one(v.get(k)) for k, one in of.items())  # noqa: E731 - as above
    elif pa.types.is_integer(kind):
        most = 1 << (kind.bit_width - 1)
        check = lambda v: type(v) is int and -most <= v < most  # noqa: E731 - one of several
    elif pa.types.is_timestamp(kind):
        check = lambda v: type(v) is dt.datetime and v.tzinfo is not None  # noqa: E731 - one of several
    else:
        python = float if pa.types.is_floating(kind) else bool if pa.types.is_boolean(kind) else str
        check = lambda v: type(v) is python  # noqa: E731 - one of several
    return (lambda v: v is None or check(v)) if nullable else check


_is_sure = _sure(pa.struct(list(ROLLOUTS.schema)), False)


def check_rollout(row: TableRow) -> None:
    """Raise DataError naming the field when ``row`` is not a rollouts row, or could not be written as one."""
    where = f"rollout {row.get('rollout_id')!r}"
    try:
        if not _is_sure(row):
            _batch([row], ROLLOUTS, ROLLOUTS.schema.names)
    except _FAULTS as error:
        found = misfit(row, ROLLOUTS, ROLLOUTS.schema.names)
        raise DataError(f"{where}, field {found.field!r}: got {found.got}, expected {found.expected}") from error
    names = [part["name"] for part in row["rewards"]]
    if len(set(names)) != len(names):
        raise DataError(f"{where}, field 'rewards': got the names {names}, expected distinct names")
    for i, turn in enumerate(row["turns"]):
        tokens, log_probs = len(turn["generation_token_ids"]), len(turn["generation_log_probs"])
        if tokens != log_probs:
            field = f"turns[{i}].generation_log_probs"
            raise DataError(f"{where}, field {field!r}: got {log_probs} for {tokens} tokens, expected one a token")
