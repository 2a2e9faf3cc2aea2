"""Conditions of ``gymdata filter`` and ``view``: DuckDB expressions over the columns of one rollout and its group.

Missing values have three-valued logic: a comparison with one is neither true nor false, and a row is kept only where its
condition is true. A stored NaN is missing, and so is what is divided by 0; an expression that makes another NaN, which
DuckDB holds to be above all numbers, is refused. Subqueries, windows and aggregates are refused: what a group has in
common are columns (``mean_reward``, ``n_scored``).
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gymdata.commands.query.guard import check_statement, lock
from gymdata.errors import UsageError, abridged, counted

#: Each is checked for NaN with all that is inside of it.
_MOST_OPERATIONS = 100
_REFUSED = ("SUBQUERY", "WINDOW", "STAR", "PARAMETER", "POSITIONAL_REFERENCE")
#: What may be no number where its parts are numbers; and through which functions NaN stays NaN.
_COMPUTED, _ARITHMETIC = ("FUNCTION", "CAST", "CASE", "OPERATOR"), ("+", "-", "*", "/")


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition as it was written, and the columns that it reads. ``sql``: the same over the columns ``c0``, ``c1``, … in
    the order of ``names``; ``parts``: what in it is computed. ``number``: it ranks. ``where``: its name in errors."""

    text: str
    where: str
    number: bool
    sql: str
    names: tuple[str, ...]
    parts: tuple[str, ...]


def parse(text: str, where: str, *, number: bool = False) -> Condition:
    """Read ``text``. Raises UsageError for what is no expression over columns of one rollout and its group."""
    if not text.strip():
        raise UsageError.bad_value(where, text, 'a condition, such as "reward > 0.5"')
    with connection(f"{where}: {text!r}") as con:

        def tree_of(expression: str) -> Any:
            # On a line of its own the bracket is in no comment.
            statement = f"SELECT (\n{expression}\n)"
            check_statement(con, statement)
            return json.loads(_one(con, "SELECT json_serialize_sql(?)", statement))

        def sql_of(node: Any) -> str:
            select["select_list"] = [node]
            return str(_one(con, "SELECT json_deserialize_sql(?)", json.dumps(tree))).removeprefix("SELECT ")

        tree = tree_of(text)
        select, plain = (statement["statements"][0]["node"] for statement in (tree, tree_of("1")))
        if plain | {"select_list": select["select_list"]} != select or len(select["select_list"]) != 1:
            raise UsageError.bad_value(where, text, "one expression")
        (root,) = select["select_list"]
        nodes = list(_nodes(root))
        if refused := next((node["class"] for node, _ in nodes if node["class"] in _REFUSED), None):
            got = refused.lower().replace("_", " ")
            raise UsageError(
                f"{where}: {text!r}: got a {got}, expected an expression over one rollout",
                hint="what its group has in common are columns, such as mean_reward",
            )
        parameters = {path[0] for node, _ in nodes if node["class"] == "LAMBDA" for path in _paths(node["lhs"])}
        columns = [path for path in _paths(root) if path[0] not in parameters]
        # Inside a list, NaN is found where it comes out of it.
        computed = [
            node
            for node, inside in nodes
            if node["class"] in _COMPUTED and not inside and not parameters.intersection(p[0] for p in _paths(node))
        ]
        if len(computed) > _MOST_OPERATIONS:
            raise UsageError(f"{where}: {text!r}: more than {_MOST_OPERATIONS} operations")
        names = dict[str, str]()
        for path in columns:
            name = ".".join(path[1:] if path[0] == "rollouts" and len(path) > 1 else path)
            path[:] = [names.setdefault(name, f"c{len(names)}")]
        parts = tuple(map(sql_of, computed))
        return Condition(" ".join(text.split("\n")).strip(), where, number, sql_of(root), tuple(names), parts)


def _nodes(tree: Any, inside: bool = False) -> Iterator[tuple[Any, bool]]:
    """The nodes of DuckDB's tree of a statement, each with whether it is inside one that only passes its NaN on."""
    if isinstance(tree, list):
        for child in tree:
            yield from _nodes(child, inside)
    elif isinstance(tree, dict):
        if "class" in tree:
            yield tree, inside
            inside = tree.get("function_name") in _ARITHMETIC
        for child in tree.values():
            yield from _nodes(child, inside)


def _paths(tree: Any) -> list[list[str]]:
    return [node["column_names"] for node, _ in _nodes(tree) if node["class"] == "COLUMN_REF"]


def check(condition: Condition, columns: Mapping[str, pa.Array]) -> None:
    """Raises UsageError unless every name is one of ``columns`` and the value is true or false, or a number."""
    for name in condition.names:
        if name not in columns:
            raise unknown_column(name, columns, condition.where)
    with _over(condition, {name: columns[name].slice(0, 0) for name in condition.names}, 0) as con:
        # As a condition of rows, in which there are no aggregates.
        con.sql(f"SELECT 1 FROM given WHERE ({condition.sql}) IS NULL")
        kind = con.sql(f"SELECT {condition.sql} FROM given").to_arrow_table().schema.types[0]
    numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if not (numeric if condition.number else pa.types.is_boolean(kind)):
        expected = "a number" if condition.number else 'a condition, such as "reward > 0.5"'
        raise UsageError.bad_value(condition.where, condition.text, f"{expected}; this is {kind}")


def evaluate(condition: Condition, columns: Mapping[str, pa.Array], rows: int) -> pa.Array:
    """One value per row, null where it is not known. ``condition`` has passed ``check``; ``columns``: those that it names,
    each with ``rows`` values. Raises UsageError for what DuckDB cannot evaluate, and for NaN."""
    with _over(condition, columns, rows) as con:
        for part in condition.parts:
            if con.sql(f"SELECT {part} FROM given").types[0].id not in ("float", "double"):
                continue
            if nan := _one(con, f"SELECT count(*) FROM given WHERE isnan(TRY({part}))"):
                raise UsageError(
                    f"{condition.where}: {condition.text!r}: computes with NaN for {counted(nan, 'rollout')}",
                    hint="CASE WHEN … THEN … END leaves these out",
                )
        return con.sql(f"SELECT {condition.sql} AS answer FROM given").to_arrow_table()["answer"].combine_chunks()


def is_true(answer: pa.Array) -> npt.NDArray[np.bool_]:
    """Where a condition's answer is true; unknown is not."""
    return np.asarray(answer.fill_null(False).to_numpy(zero_copy_only=False), bool)


def unknown_column(
    name: str, columns: Sequence[str] | Mapping[str, Any], where: str, shown: Sequence[str] = ()
) -> UsageError:
    """The error for a column that is not there, naming the nearest one. ``shown``: what to list, when not all."""
    names = list(columns)
    # A field of the task that is written without its "task." is the likeliest slip.
    near = [f"task.{name}"] if f"task.{name}" in names else difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    lead = f"did you mean {near[0]!r}? " if near else "a text is in single quotes; "
    return UsageError(f"{where}: unknown column {name!r}", hint=f"{lead}there are: {abridged(shown or names)}")


@functools.cache
def _database() -> Any:
    """DuckDB without files and settings, whose connections share nothing but this."""
    import duckdb

    # Division by 0 has no result, and is no error.
    off = ["ieee_floating_point_ops", "error_on_division_by_zero"]
    off += ["python_enable_replacements", "autoload_known_extensions", "autoinstall_known_extensions"]
    con = duckdb.connect(config=dict.fromkeys(off, False))
    con.execute("SET GLOBAL TimeZone = 'UTC'")
    # Texts of more than 2 GiB.
    con.execute("SET GLOBAL arrow_large_buffer_size = true")
    lock(con)
    return con


@contextlib.contextmanager
def connection(subject: str) -> Iterator[Any]:
    """A connection to nothing; its errors are about ``subject``."""
    import duckdb

    try:
        with _database().cursor() as con:
            yield con
    except duckdb.Error as error:
        message = " ".join(str(error).partition("\n\nLINE")[0].split())
        aggregate = "cannot contain aggregates" in message
        hint = "name a column of its group: mean_reward, max_reward, n_rollouts, n_scored" if aggregate else None
        raise UsageError(f"{subject}: {message}", hint=hint) from error


@contextlib.contextmanager
def _over(condition: Condition, columns: Mapping[str, pa.Array], rows: int) -> Iterator[Any]:
    with connection(f"{condition.where}: {condition.text!r}") as con:
        # A constant condition names no column; the row numbers give it its length.
        values = [pa.array(np.arange(rows)), *(columns[name] for name in condition.names)]
        con.register("given", pa.table(values, names=["row", *(f"c{k}" for k in range(len(condition.names)))]))
        yield con


def _one(con: Any, sql: str, *values: str) -> Any:
    return con.execute(sql, values).fetchall()[0][0]
