"""Results of every DuckDB type as text, JSON and CSV.

Invariants: a type that JSON has no form for (INTERVAL, BLOB, BIT, UNION, VARIANT …) is DuckDB's own text for it, also
inside lists, structs and maps; a whole number is a number as far as 64 bits hold it, and text beyond; a time that Python
has no form for (infinity, the year 294247) is text.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

_NUMBERS = frozenset(
    ("boolean", "tinyint", "smallint", "integer", "bigint", "hugeint", "utinyint", "usmallint", "uinteger", "ubigint",
     "uhugeint", "float", "double", "decimal")
)  # fmt: skip
_TEXTS = frozenset(["varchar", "enum", "uuid", "null", '"null"'])
_TIMES = frozenset(
    ["date", "time", "timestamp", "timestamp_s", "timestamp_ms", "timestamp_ns", "timestamp with time zone"]
)
_TEXT = "VARCHAR"
_WRITABLE = frozenset([type(None), bool, int, float, str, dt.datetime, dt.date, dt.time])


def printable(types: Sequence[duckdb.sqltypes.DuckDBPyType]) -> list[str | None]:
    """For each type the one to cast to before printing, or None where it can stay as it is."""
    return [None if (cast := _cast(sql_type)) == str(sql_type) else cast for sql_type in types]


def _cast(sql_type: Any) -> str:
    kind = str(sql_type.id)
    if kind in _NUMBERS or kind in _TEXTS or kind in _TIMES:
        return str(sql_type)
    if kind in ("list", "array", "map", "struct"):
        children = sql_type.children
        if kind == "struct":
            fields = [(name, _cast(child)) for name, child in children]
            quoted = ", ".join('"' + name.replace('"', '""') + f'" {cast}' for name, cast in fields)
            same = all(cast == str(child) for (_, cast), (_, child) in zip(fields, children, strict=True))
            return _TEXT if not fields else str(sql_type) if same else f"STRUCT({quoted})"
        casts = [_cast(child) for name, child in children if name != "size"]
        if all(cast == str(child) for cast, (_, child) in zip(casts, children, strict=False)):
            return str(sql_type)
        if kind == "map":
            return f"MAP({casts[0]}, {casts[1]})"
        return casts[0] + ("[]" if kind == "list" else f"[{dict(children)['size']}]")
    return _TEXT


def python_values(column: pa.Array) -> list[Any]:
    """``column.to_pylist()``, with text for the times that Python has no form for."""
    import pyarrow as pa

    try:
        return list(column.to_pylist())
    except (OverflowError, ValueError, pa.ArrowException):
        return [_python_value(scalar) for scalar in column]


def _python_value(scalar: Any) -> Any:
    import pyarrow as pa

    if not scalar.is_valid:
        return None
    try:
        return scalar.as_py()
    except (OverflowError, ValueError, pa.ArrowException):
        if pa.types.is_map(scalar.type):
            return [(_python_value(pair["key"]), _python_value(pair["value"])) for pair in scalar.values]
        if pa.types.is_nested(scalar.type) and not pa.types.is_struct(scalar.type):
            return [_python_value(item) for item in scalar.values]
        if pa.types.is_struct(scalar.type):
            return {name: _python_value(item) for name, item in scalar.items()}
        with contextlib.suppress(pa.ArrowException):
            if not (text := str(scalar.cast(pa.string()).as_py())).startswith("<"):
                return text
        return str(scalar.value)  # beyond what Arrow writes as a time: units since 1970


def json_value(value: Any) -> Any:
    """A value as JSON has it: exact numbers that 64 bits cannot hold are text. Times are left to the writers."""
    if isinstance(value, decimal.Decimal):
        is_int64 = value.is_finite() and value.as_tuple().exponent == 0 and -(1 << 63) <= value < (1 << 63)
        return int(value) if is_int64 else str(value)
    if isinstance(value, int) and not -(1 << 63) <= value < (1 << 64):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    return value if type(value) in _WRITABLE else str(value)
