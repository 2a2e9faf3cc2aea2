"""Expressions of ``gymdata filter`` and ``view``: DuckDB's, over the columns of one rollout and its group.

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
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gymdata.commands.query.guard import check_statement, lock
from gymdata.errors import UsageError, abridged, counted

#: Each is checked for NaN with all that is inside of it.
_MOST_OPERATIONS = 100
_REFUSED = ("SUBQUERY", "WINDOW", "STAR", "PARAMETER", "POSITIONAL_REFERENCE")
#: What may be no number where its parts are numbers; and through which functions NaN stays NaN.
_COMPUTED, _ARITHMETIC = ("FUNCTION", "CAST", "CASE", "OPERATOR"), ("+", "-", "*", "/")
_FLOATS = ("float", "double")
_NUMBERS = (*_FLOATS, "decimal", "tinyint", "smallint", "integer", "bigint", "hugeint")
Kind = Literal["condition", "number", "value"]


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression as it was written, and the columns that it reads. ``where``: its name in errors; ``kind``: what it is
    to be; ``sql``: the same over columns that are called as ``column_of`` says; ``parts``: what in it is computed."""

    text: str
    where: str
    kind: Kind
    sql: str
    names: tuple[str, ...]
    parts: tuple[str, ...]


def column_of(name: str) -> str:
    """What SQL calls the column ``name``: SQL ignores case, and the names of scores do not."""
    return f"column_{name.encode().hex()}"


def parse(text: str, where: str, kind: Kind = "condition") -> Expression:
    """Read ``text``. Raises UsageError for what is no expression over columns of one rollout and its group."""
    if not text.strip():
        raise UsageError.bad_value(where, text, 'a condition, such as "reward > 0.5"')
    subject = f"{where}: {text!r}"
    with connection() as con, about(subject):

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
                f"{subject}: got a {got}, expected an expression over one rollout",
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
            raise UsageError(f"{subject}: more than {_MOST_OPERATIONS} operations")
        names = dict[str, None]()
        for path in columns:
            name = ".".join(path[1:] if path[0] == "rollouts" and len(path) > 1 else path)
            names[name] = None
            path[:] = [column_of(name)]
        parts = tuple(map(sql_of, computed))
        return Expression(" ".join(text.split("\n")).strip(), where, kind, sql_of(root), tuple(names), parts)


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


def evaluate(con: Any, expressions: Mapping[str, Expression], source: str, keep: str = "row") -> None:
    """Make the table ``rows`` of the columns ``keep`` of ``source``, a SELECT, and of ``expressions`` (name → expression):
    conditions are true, false or null, numbers null where they are not finite. All are checked before a row is read.

    Raises UsageError for an expression that is of another kind, that DuckDB cannot evaluate, or that computes with NaN.
    """
    checked = {name: _checked(con, expression, source) for name, expression in expressions.items()}
    made = "".join(f", {sql} AS {name}, {nan} AS nan_{name}" for name, (sql, nan) in checked.items())
    with about("; ".join(f"{e.where}: {e.text!r}" for e in expressions.values())):
        con.execute(f"CREATE TEMP TABLE rows AS SELECT {keep}{made} FROM ({source})")
    for name in (name for name, (_, nan) in checked.items() if nan != "false"):
        if n := _one(con, f"SELECT count(*) FROM rows WHERE nan_{name}"):
            raise UsageError(
                f"{expressions[name].where}: {expressions[name].text!r}: computes with NaN for {counted(n, 'rollout')}",
                hint="CASE WHEN … THEN … END leaves these out",
            )


def _checked(con: Any, expression: Expression, source: str) -> tuple[str, str]:
    """SQL of the answer to an expression, and of whether it computes with NaN."""
    sql, parts = f"({expression.sql})", expression.parts
    with about(f"{expression.where}: {expression.text!r}"):
        # Also as a condition of rows, in which there are no aggregates.
        kind, *kinds = con.sql(f"SELECT {', '.join([sql, *parts])} FROM ({source}) WHERE {sql} IS NULL").types
    accepted = {"condition": ("boolean",), "number": _NUMBERS, "value": (kind.id,)}[expression.kind]
    if kind.id not in accepted and kind.id.removeprefix("u") not in accepted:
        expected = "a number" if expression.kind == "number" else 'a condition, such as "reward > 0.5"'
        raise UsageError.bad_value(expression.where, expression.text, f"{expected}; this is {str(kind).lower()}")
    if expression.kind == "number":
        sql = f"CASE WHEN isfinite({sql}::DOUBLE) THEN {sql}::DOUBLE END"
    if kind.id in _FLOATS:
        sql += " + 0.0"  # which 0.0 and -0.0 are alike with
    nan = (f"isnan(TRY({part}))" for part, kind in zip(parts, kinds, strict=True) if kind.id in _FLOATS)
    return sql, " OR ".join(nan) or "false"


def unknown_column(name: str, columns: Sequence[str], where: str, shown: Sequence[str] = ()) -> UsageError:
    """The error for a column that is not there, naming the nearest one. ``shown``: what to list, when not all."""
    # A field of the task that is written without its "task." is the likeliest slip.
    near = [f"task.{name}"] if f"task.{name}" in columns else difflib.get_close_matches(name, columns, n=1, cutoff=0.6)
    lead = f"did you mean {near[0]!r}? " if near else "a text is in single quotes; "
    return UsageError(f"{where}: unknown column {name!r}", hint=f"{lead}there are: {abridged(shown or columns)}")


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
def connection() -> Iterator[Any]:
    """A connection to nothing."""
    with _database().cursor() as con:
        yield con


@contextlib.contextmanager
def about(subject: str) -> Iterator[None]:
    """DuckDB's errors as UsageError about ``subject``."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        message = " ".join(str(error).partition("\n\nLINE")[0].split())
        message = re.sub(r"column_([0-9a-f]+)", lambda found: bytes.fromhex(found[1]).decode(), message)
        aggregate = "cannot contain aggregates" in message
        hint = "name a column of its group: mean_reward, max_reward, n_rollouts, n_scored" if aggregate else None
        raise UsageError(f"{subject}: {message}", hint=hint) from error


def _one(con: Any, sql: str, *values: str) -> Any:
    return con.execute(sql, values).fetchall()[0][0]
