"""Conditions evaluated by DuckDB, column by column.

Invariants: the statement is built from a checked tree, never from a user's text. Columns have names of ours
(``c0``, ``c1``, …) and every value is a bound parameter, so nothing that anyone wrote becomes SQL; the connection can
read no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gymdata.filter.conditions import Column, Expression, Node, Value

_INFIX = {"==": "=", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">=", "+": "+", "-": "-", "*": "*"}
_FUNCTIONS = {
    "abs": "abs",
    "floor": "floor",
    "ceil": "ceil",
    "len": "length",
    "lower": "lower",
    "upper": "upper",
    "contains": "contains",
    "startswith": "starts_with",
    "endswith": "ends_with",
    "matches": "regexp_matches",
    "coalesce": "coalesce",
}


def evaluate(expression: Expression, columns: Mapping[str, pa.Array], rows: int) -> pa.Array:
    """One value a row, null where it is not known. ``expression`` has passed ``conditions.check``.

    ``columns``: those that it names, each of ``rows`` values: double, string or bool. Raises UsageError for a regular
    expression that is none.
    """
    import duckdb

    from gymdata.errors import UsageError

    names = {name: f"c{k}" for k, name in enumerate(expression.names)}
    arrays: dict[str, Any] = {names[name]: columns[name] for name in expression.names}
    writer = _Writer(names)
    body = writer.write(expression.node)
    connection = duckdb.connect(":memory:")
    try:
        connection.execute("SET enable_external_access=false")
        # One thread: the rows stay in order, and there is little to do.
        connection.execute("SET threads=1")
        connection.register("given", pa.table({"i": pa.array(np.arange(rows)), **arrays}))
        sql = f"SELECT {body} AS answer FROM given ORDER BY i"
        answer = connection.sql(sql, params=writer.values).to_arrow_table()
    except duckdb.Error as error:
        message = str(error).splitlines()[0]
        raise UsageError(f"{expression.text!r}: {message}") from error
    finally:
        connection.close()
    return answer["answer"].combine_chunks()


def is_true(answer: pa.Array) -> npt.NDArray[np.bool_]:
    """Where a condition's answer is true; unknown is not."""
    return np.asarray(answer.fill_null(False).to_numpy(zero_copy_only=False), bool)


class _Writer:
    """A tree as SQL over our own column names, with its values aside."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self.values: list[Any] = []

    def write(self, node: Node) -> str:
        if isinstance(node, Column):
            return self._names[node.name]
        if isinstance(node, Value):
            kind = {bool: "BOOLEAN", str: "VARCHAR"}.get(type(node.value), "DOUBLE")
            self.values.append(node.value)
            return f"CAST(${len(self.values)} AS {kind})"
        return f"({self._operation(node.operator, [self.write(part) for part in node.parts])})"

    def _operation(self, operator: str, parts: list[str]) -> str:
        match operator:
            case "and" | "or":
                return f" {operator.upper()} ".join(parts)
            case "not":
                return f"NOT {parts[0]}"
            case "negative":
                return f"- {parts[0]}"
            case "is null":
                return f"{parts[0]} IS NULL"
            case "in":
                return f"{parts[0]} IN ({', '.join(parts[1:])})"
            case "/":
                return f"{parts[0]} / nullif({parts[1]}, 0)"
            case "//":
                return f"floor({parts[0]} / nullif({parts[1]}, 0))"
            case "%":
                # As in Python, the result has the sign of the divisor.
                return self._fold(parts, "((a % nullif(b, 0)) + b) % b")
            case "min" | "max":
                # DuckDB's least and greatest pass over nulls; here a missing value makes the result missing.
                pick = "least" if operator == "min" else "greatest"
                return self._fold(parts, f"CASE WHEN a IS NULL OR b IS NULL THEN NULL ELSE {pick}(a, b) END")
        if operator in _INFIX:
            return f"{parts[0]} {_INFIX[operator]} {parts[1]}"
        called = f"{_FUNCTIONS[operator]}({', '.join(parts)})"
        return f"CAST({called} AS DOUBLE)" if operator == "len" else called

    def _fold(self, parts: list[str], step: str) -> str:
        """``step`` over a and b from the left; each part is written once, so that nesting does not multiply the text."""
        return f"list_reduce([{', '.join(parts)}], lambda a, b: {step})"
