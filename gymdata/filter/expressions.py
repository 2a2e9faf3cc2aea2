"""Conditions as Polars expressions, evaluated column by column.

Invariant: the expressions are built from a checked tree, never from a user's text. Columns get neutral names (``c0``,
``c1``, …), because Polars reads ``*`` and ``^…$`` in a name as patterns, and every value is a literal of its own type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import UsageError
from gymdata.filter.conditions import Column, Expression, Node, Operation, Value

if TYPE_CHECKING:
    import polars as pl


def evaluate(expression: Expression, columns: Mapping[str, pa.Array], rows: int) -> pa.Array:
    """One value per row, null where it is not known. ``expression`` has passed ``conditions.check``. ``columns``: those
    that it names, each with ``rows`` values: double, string or bool. Raises UsageError for an invalid regular
    expression.
    """
    import polars as pl

    names = {name: f"c{k}" for k, name in enumerate(expression.names)}
    # A constant condition names no column; the row numbers give it its length.
    arrays = {"row": pa.array(np.arange(rows)), **{names[name]: columns[name] for name in expression.names}}
    given = pl.DataFrame(pl.from_arrow(pa.table(arrays)))
    compiler = _Compiler(given.lazy(), names)
    body = compiler.compile(expression.node)
    try:
        answer = compiler.frame.select(pl.col("row"), body.alias("answer")).collect()["answer"]
    except (pl.exceptions.PolarsError, pa.ArrowInvalid) as error:
        raise UsageError(f"{expression.text!r}: {str(error).splitlines()[0]}") from error
    return answer.to_arrow()


def is_true(answer: pa.Array) -> npt.NDArray[np.bool_]:
    """Where a condition's answer is true; unknown is not."""
    return np.asarray(answer.fill_null(False).to_numpy(zero_copy_only=False), bool)


class _Compiler:
    """A tree as an expression over the columns of ``frame``. A part that an operation reads several times becomes a column
    of ``frame`` first: written out each time, nested operations would double the work at every level."""

    def __init__(self, frame: pl.LazyFrame, names: Mapping[str, str]) -> None:
        self.frame = frame
        self._names = names
        self._shared = 0

    def compile(self, node: Node) -> pl.Expr:
        import polars as pl

        if isinstance(node, Column):
            return pl.col(self._names[node.name])
        if isinstance(node, Value):
            return pl.lit(node.value, {bool: pl.Boolean(), str: pl.String()}.get(type(node.value), pl.Float64()))
        match node.operator:
            case "/" | "//" | "%" | "min" | "max" | "in":
                return self._reread(node.operator, [self._once(part) for part in node.parts])
        return _read_once(node.operator, [self.compile(part) for part in node.parts])

    def _once(self, node: Node) -> pl.Expr:
        compiled = self.compile(node)
        return self._keep(compiled) if isinstance(node, Operation) else compiled

    def _keep(self, expression: pl.Expr) -> pl.Expr:
        import polars as pl

        name = f"s{self._shared}"
        self._shared += 1
        self.frame = self.frame.with_columns(expression.alias(name))
        return pl.col(name)

    def _reread(self, operator: str, parts: Sequence[pl.Expr]) -> pl.Expr:
        import polars as pl

        first, *others = parts
        match operator:
            case "in":
                return pl.any_horizontal([first == option for option in others])
            case "/" | "//" | "%":
                known = first.is_not_null() & (others[0] != 0)
                work = _modulo if operator == "%" else _divided
                result = pl.when(known).then(pl.map_batches([first, others[0]], work, pl.Float64))
                return result.floor() if operator == "//" else result
        for other in others:
            before = first <= other if operator == "min" else first >= other
            after = first > other if operator == "min" else first < other
            # Neither holds where a value is missing, and then the result is missing too.
            first = self._keep(pl.when(before).then(first).when(after).then(other))
        return first


def _read_once(operator: str, parts: Sequence[pl.Expr]) -> pl.Expr:
    import polars as pl

    one, other = parts[0], parts[-1]
    match operator:
        case "and":
            return pl.all_horizontal(parts)
        case "or":
            return pl.any_horizontal(parts)
        case "not":
            return ~one
        case "negative":
            return -one
        case "is null":
            return one.is_null()
        case "==":
            return one == other
        case "!=":
            return one != other
        case "<":
            return one < other
        case "<=":
            return one <= other
        case ">":
            return one > other
        case ">=":
            return one >= other
        case "+":
            return one + other
        case "-":
            return one - other
        case "*":
            return one * other
        case "abs":
            return one.abs()
        case "floor":
            return one.floor()
        case "ceil":
            return one.ceil()
        case "len":
            return one.str.len_chars().cast(pl.Float64)
        case "lower":
            return one.str.to_lowercase()
        case "upper":
            return one.str.to_uppercase()
        case "contains":
            return one.str.contains(other, literal=True)
        case "startswith":
            return one.str.starts_with(other)
        case "endswith":
            return one.str.ends_with(other)
        case "matches":
            return pl.map_batches([one, other], _matches, pl.Boolean)
        case "coalesce":
            return pl.coalesce(parts)
    raise AssertionError(operator)


def _divided(parts: Sequence[pl.Series]) -> pl.Series:
    """The nearest quotient; Polars multiplies by the reciprocal of a number that is the same for all rows, which rounds
    twice."""
    import polars as pl

    a, b = (part.to_numpy() for part in parts)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return pl.Series(a / b)


def _modulo(parts: Sequence[pl.Series]) -> pl.Series:
    """The exact remainder with the sign of the divisor; Polars' own is a − ⌊a / b⌋·b, which rounds."""
    import polars as pl

    a, b = (part.to_numpy() for part in parts)
    with np.errstate(invalid="ignore", divide="ignore"):
        return pl.Series(np.fmod(np.fmod(a, b) + b, b))


def _matches(parts: Sequence[pl.Series]) -> pl.Series:
    """Where a text has a match of its pattern, by RE2 (Polars' regular expressions are others)."""
    import polars as pl

    texts, patterns = parts
    distinct = patterns.unique().drop_nulls().to_list()
    if patterns.null_count() == 0 and len(distinct) == 1:
        return pl.Series(pc.match_substring_regex(texts.to_arrow(), distinct[0]))
    rows = max(len(texts), len(patterns))
    texts, patterns = (part if len(part) == rows else part.new_from_index(0, rows) for part in parts)
    found = np.zeros(rows, np.bool_)
    for pattern in distinct:
        here = (patterns == pattern).fill_null(False).to_numpy()
        matched: Any = pc.match_substring_regex(texts.filter(pl.Series(here)).to_arrow(), pattern)
        found[here] = matched.fill_null(False).to_numpy(zero_copy_only=False)
    return pl.select(pl.when(texts.is_not_null() & patterns.is_not_null()).then(pl.Series(found))).to_series()
