"""JSON rows to Arrow arrays and back, and the check of a rollouts row before it is journaled.

Invariants: building is strict (an id that is 2.0, "2", true or null is refused, never rounded or dropped), an unknown
key is refused rather than lost, and ``to_rows`` of what was built gives the same rows. Token lists are moved through
flat buffers; nothing is boxed on the way out. A rollouts row that passes its check can be sealed, so nothing that was
sampled gets stuck in a journal; the check looks at keys, types and array dtypes, not at every element, and costs a few
microseconds.
"""

from __future__ import annotations

import datetime as dt
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import DataError, abridged, counted, foreign_row_hint, json_kind, json_value, plural
from gymdata.rollouts.messages import TableRow
from gymdata.rollouts.ragged import Columns, Ragged, Runs, list_parts
from gymdata.rollouts.schema import HASHES, MESSAGE, NAMED_VALUE, ROLLOUTS, TABLES, TURN, Table
from gymdata.store.formats import ANSWERED, TASK
from gymdata.store.lines import NON_FINITE


class _MismatchError(Exception):
    """A value does not fit its field; ``path`` is the one inside the column."""

    def __init__(self, path: str, actual: str, expected: str) -> None:
        super().__init__(path)
        self.path, self.actual, self.expected = path, actual, expected


_FAULTS = (_MismatchError, pa.ArrowException, ValueError, TypeError, AttributeError, OverflowError)


def build(
    rows: Sequence[Any], table: Table, columns: Sequence[str], where: str, lines: Sequence[int]
) -> pa.RecordBatch:
    """A batch with ``columns`` of ``table`` from parsed JSON rows.

    ``lines`` has the 1-based line of each row. Raises DataError naming the line and the field of the first row that
    does not fit.
    """
    fields = [table.schema.field(name) for name in columns]
    try:
        _check_keys(rows, table)
        arrays = [_build(f, [row.get(f.name) for row in rows]) for f in fields]
        hashed = HASHES if table.name == ROLLOUTS.name else ()
        # Hashes are computed where rows lack them.
        if lacking := [name for name in hashed if name in columns and arrays[columns.index(name)].null_count]:
            if "turns" in columns:
                turns = arrays[columns.index("turns")]
            else:
                turns = _build(ROLLOUTS.schema.field("turns"), [row.get("turns") for row in rows])
            for name, hashes in content_hashes(turns).items():
                if name in lacking:
                    index = columns.index(name)
                    arrays[index] = pc.coalesce(arrays[index], hashes.combine_chunks())
    except _FAULTS as error:
        read = [*columns, *(["turns"] if table.name == ROLLOUTS.name and "turns" in table.schema.names else [])]
        raise _first_fault(rows, table, read, where, lines) or DataError.unreadable(where, repr(error)) from error
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields, metadata=table.metadata))


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


def reshape(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """``array`` cast to ``kind``: another writer's types of the same column (large lists, nullable fields) become
    gymdata's. Raises pa.ArrowInvalid when a value does not fit, or for a null where none is allowed.
    """
    if array.type == kind:
        return array
    if pa.types.is_dictionary(array.type):
        return reshape(array.dictionary_decode(), kind)
    if pa.types.is_struct(kind) and pa.types.is_struct(array.type):
        names = {field.name for field in array.type}
        if extra := names - {f.name for f in kind}:
            raise pa.ArrowInvalid(_unknown_fields(extra))
        children = []
        flat = dict(zip([f.name for f in array.type], array.flatten(), strict=True))
        for f in kind:
            child = reshape(flat[f.name], f.type) if f.name in flat else pa.nulls(len(array), f.type)
            if not f.nullable and child.null_count > array.null_count:
                raise pa.ArrowInvalid(f"field {f.name!r} has {counted(child.null_count, 'null value')}")
            children.append(child)
        mask = array.is_null() if array.null_count else None
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
    is_list = pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
    if pa.types.is_list(kind) and is_list:
        offsets = array.offsets
        start, stop = offsets[0].as_py(), offsets[-1].as_py()
        values = reshape(array.values.slice(start, stop - start), kind.value_type)
        moved = pa.array(offsets.to_numpy() - start, pa.int32())
        return pa.ListArray.from_arrays(moved, values, type=kind, mask=array.is_null() if array.null_count else None)
    return array.cast(kind)


def _check_keys(rows: Iterable[Any], table: Table) -> None:
    names = frozenset(table.schema.names)
    for row in rows:
        if type(row) is not dict:
            raise _MismatchError("", _describe(row), "an object")
        if row.keys() >= {"pair_id", "run_id"} and "pair_id" not in names:
            raise _MismatchError("", "a pair, which train-dpo and train-reward take", f"a row of {table.name}")
        if not row.keys() <= names:
            extra = sorted(row.keys() - names)
            raise _MismatchError("", _unknown_fields(extra), f"the columns of {table.name}")
        for name in table.required():
            if name not in row and not table.schema.field(name).nullable:
                raise _MismatchError(name, "nothing", "a value")


def _build(f: pa.Field, values: list[Any]) -> pa.Array:
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
        _demand(values, (dict, list) if kind.value_type == NAMED_VALUE else (list,), f)
        if kind.value_type == NAMED_VALUE:
            # JSON lines write them as an object.
            values = [[{"name": k, "value": x} for k, x in v.items()] if type(v) is dict else v for v in values]
        nulls = None in values
        filled = [v or () for v in values] if nulls else values
        inner = pa.field("item", kind.value_type, nullable=False)
        try:
            child = _build(inner, list(chain.from_iterable(filled)))
        except _MismatchError as fault:
            raise _MismatchError(f"[]{fault.path}", fault.actual, fault.expected) from None
        mask = pa.array([v is None for v in values]) if nulls else None
        return _list_array(kind, list(map(len, filled)), child, mask)
    if pa.types.is_struct(kind):
        _demand(values, (dict,), f)
        return _build_struct(kind, values)
    if pa.types.is_timestamp(kind):
        _demand(values, (str,), f)
        return pa.array(values, pa.string()).cast(kind)
    if pa.types.is_floating(kind):
        kinds = set(map(type, values))
        if str in kinds:  # the strings for non-finite numbers
            values = [NON_FINITE.get(v, v) if type(v) is str else v for v in values]
        if not kinds <= {float}:
            _demand(values, (int, float), f)
        values = [float(v) if type(v) is int else v for v in values] if int in kinds else values
    else:
        _demand(values, (bool,) if pa.types.is_boolean(kind) else (int,) if pa.types.is_integer(kind) else (str,), f)
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, ValueError, OverflowError) as error:
        # A number too large for its type, or text that is not Unicode.
        raise _MismatchError("", str(error), _expected(kind)) from None


def _numbers(kind: pa.DataType, arrays: Sequence[np.ndarray]) -> pa.Array:
    return pa.array(np.concatenate(arrays)).cast(kind, safe=pa.types.is_integer(kind))


def _list_array(kind: pa.ListType, lengths: Sequence[int], child: pa.Array, mask: pa.Array | None = None) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), child, type=kind, mask=mask)


def _build_columns(kind: pa.StructType, values: Sequence[Columns]) -> pa.Array:
    """The objects of all ``values``, one after the other."""
    names = set().union(*(columns.of for columns in values))
    if unknown := names - {f.name for f in kind}:
        raise _MismatchError("[]", _unknown_fields(unknown), "those of the schema")
    children = []
    for f in kind:
        name = f.name
        parts = [columns.of.get(name, [None] * len(columns)) for columns in values]
        runs = [part for part in parts if isinstance(part, Runs)]
        try:
            if len(runs) == len(parts):
                lengths = list(chain.from_iterable(part.lengths for part in runs))
                numbers = _numbers(f.type.value_type, [part.values for part in runs])
                children.append(_list_array(f.type, lengths, numbers))
            else:
                children.append(_build(f, list(chain.from_iterable(parts))))
        except _MismatchError as fault:
            raise _MismatchError(f"[].{name}{fault.path}", fault.actual, fault.expected) from None
    return pa.StructArray.from_arrays(children, fields=list(kind))


def _build_struct(kind: pa.StructType, values: list[Any]) -> pa.Array:
    names = frozenset(f.name for f in kind)
    if not set().union(*values) <= names:
        wrong = next(value for value in values if not value.keys() <= names)
        raise _MismatchError("", _unknown_fields(wrong.keys() - names), abridged(sorted(names)))
    children = []
    for f in kind:
        # Arrow creates the name at each access.
        name = f.name
        try:
            children.append(_build(f, [value.get(name) for value in values]))
        except _MismatchError as fault:
            raise _MismatchError(f".{name}{fault.path}", fault.actual, fault.expected) from None
    return pa.StructArray.from_arrays(children, fields=list(kind))


def _demand(values: list[Any], types: tuple[type, ...], f: pa.Field) -> None:
    """Python's own types, exactly: Arrow would take 2.5 for an int and True for a float."""
    accepted = {*types, type(None)} if f.nullable else {*types}
    if not set(map(type, values)) <= accepted:
        wrong = next(v for v in values if type(v) not in accepted)
        raise _MismatchError("", _describe(wrong), _expected(f.type))


#: Keys that only rows of one table have.
_IDS = {"rollout_id", "pair_id", "comparison_id"}


def other_rows(row: Any, table: Table, where: str) -> DataError | None:
    """Why the JSON row cannot be of ``table``, where it is a task or of another one; None where that is not known."""
    if not isinstance(row, Mapping) or row.keys() <= frozenset(table.schema.names):
        return None
    if not row.keys() & _IDS and row.keys() & TASK and not row.keys() & ANSWERED:
        return DataError.tasks(where, table.name)
    for other in TABLES.values():
        needed = {name for name in other.required() if not other.schema.field(name).nullable}
        if needed <= row.keys() <= frozenset(other.schema.names):
            return DataError.other_table(where, other.name, table.name)
    return None


def _first_fault(
    rows: Sequence[Any], table: Table, columns: Sequence[str], where: str, lines: Sequence[int]
) -> DataError | None:
    """The first row and field that do not fit, found by building each row alone."""
    is_file = table is ROLLOUTS and Path(where).is_file()
    every_row = f"`gymdata validate {where}` names every such row, and repairs a copy" if is_file else None
    for row, line in zip(rows, lines, strict=True):
        try:
            _check_keys([row], table)
        except _MismatchError as fault:
            hint = every_row
            if (other := other_rows(row, table, where)) is not None:
                return other
            if isinstance(row, Mapping) and row and not row.keys() & _IDS:
                hint = foreign_row_hint([*row], table.name)
            return DataError.bad_row(where, line, fault.path or None, fault.actual, fault.expected, hint)
        for name in columns:
            f = table.schema.field(name)
            try:
                _build(f, [row.get(name)])
            except _MismatchError as fault:
                return DataError.bad_row(where, line, name + fault.path, fault.actual, fault.expected, every_row)
            except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
                return DataError.bad_row(where, line, name, str(error), _expected(f.type), every_row)
    return None


def misfit(f: pa.Field, value: Any) -> tuple[list[str | int], str] | None:
    """Where the JSON value does not fit the field, as keys and positions inside it, and what is expected there; None
    where it fits."""
    if _fits(f, value):
        return None
    kind = f.type
    if pa.types.is_list(kind) and type(value) is list:
        item = pa.field("item", kind.value_type, nullable=False)
        items = pa.field("items", kind, nullable=False)
        position = bisect_left(range(len(value)), True, key=lambda last: not _fits(items, value[: last + 1]))
        path, expected = misfit(item, value[position]) or ([], _expected(kind.value_type))
        return [position, *path], expected
    if pa.types.is_struct(kind) and type(value) is dict:
        for child in kind:
            if (fault := misfit(child, value.get(child.name))) is not None:
                return [child.name, *fault[0]], fault[1]
    return [], _expected(kind)


def _fits(f: pa.Field, value: Any) -> bool:
    try:
        _build(f, [value])
    except _FAULTS:
        return False
    return True


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


def _describe(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json_value(value)
    text = repr(value)
    return f"{json_kind(value)} {text if len(text) <= 60 else text[:57] + '…'}"


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


def check_rollout(row: TableRow) -> None:
    """Raise DataError naming the field when ``row`` is not a rollouts row."""
    if not row.keys() <= _KNOWN or not row.keys() >= _REQUIRED:
        missing, extra = sorted(_REQUIRED - row.keys()), sorted(row.keys() - _KNOWN)
        got = f"missing {abridged(missing) or 'none'}, unknown {abridged(extra) or 'none'}"
        raise _fault(row, abridged(missing + extra), got, "the columns of rollouts")
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
            raise _fault(row, f"messages[{i}]", abridged(message), abridged(sorted(_MESSAGE_KEYS)))
        for name, accepted in _MESSAGE:
            if not isinstance(message.get(name), accepted):
                raise _fault(row, f"messages[{i}].{name}", repr(message.get(name))[:60], accepted[0].__name__)
    for i, turn in enumerate(row["turns"]):
        if not turn.keys() <= _TURN_KEYS or not turn.keys() >= _TURN_REQUIRED:
            raise _fault(row, f"turns[{i}]", abridged(turn), abridged(sorted(_TURN_KEYS)))
        for name, kind in _ARRAYS:
            values = turn[name]
            if not isinstance(values, np.ndarray):
                raise _fault(row, f"turns[{i}].{name}", type(values).__name__, "a numpy array")
            if values.dtype.kind != kind or values.ndim != 1:
                raise _fault(row, f"turns[{i}].{name}", f"{values.ndim}-dimensional {values.dtype}", "a flat array")
        if len(turn["generation_token_ids"]) != len(turn["generation_log_probs"]):
            actual = f"{len(turn['generation_log_probs'])} for {len(turn['generation_token_ids'])} tokens"
            raise _fault(row, f"turns[{i}].generation_log_probs", actual, "one log-probability a token")


def _fault(row: TableRow, field: str, actual: str, expected: str) -> DataError:
    return DataError(f"rollout {row.get('rollout_id')!r}, field {field!r}: got {actual}, expected {expected}")
