"""Expressions of ``gymdata filter`` and ``view``: DuckDB's, over the view ``rollouts`` of ``columns``.

Missing values have three-valued logic: a comparison with one is neither true nor false, and a row is kept only where its
condition is true. A stored NaN is missing, and so is what is divided by 0; an expression that makes another NaN, which
DuckDB holds to be above all numbers, is refused.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from gymdata.commands.query.views import error_message, lock
from gymdata.errors import UsageError, short

#: How columns are named whose names are no columns of files.
_HINT = "a field of tasks is task.NAME, text is in single quotes, a group has mean_reward, n_scored …"
#: Characters of an expression in an error, whose other words say what is wrong with it.
_SHOWN = 40
#: What may be no number where its parts are numbers, in DuckDB's tree of a statement; and below which keys there is what is
#: not evaluated for each row: the branches of a CASE, subqueries and the bodies of lambdas.
_COMPUTED = ("FUNCTION", "CAST", "CASE", "OPERATOR")
_INNER = ("then_expr", "else_expr", "subquery", "expr")


def finite(sql: str) -> str:
    """SQL of a number, null where it is not finite."""
    return f"CASE WHEN isfinite({sql}::DOUBLE) THEN {sql}::DOUBLE END"


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression as it was written. ``where``: its name in errors; ``kind``: what it is to be."""

    text: str
    where: str
    kind: Literal["condition", "number", "value"] = "condition"

    @property
    def sql(self) -> str:
        # On a line of its own the bracket is in no comment.
        sql = f"(\n{self.text}\n)"
        return finite(sql) if self.kind == "number" else sql

    @property
    def line(self) -> str:
        return " ".join(self.text.split("\n")).strip()

    @property
    def subject(self) -> str:
        return f"{self.where}: {short(self.line, _SHOWN)!r}"

    def names(self) -> list[str]:
        """The columns that it names, of tasks with their field (``task.level``); none where it cannot be read."""
        tree = self._tree()
        parameters = [path for node in _nodes(tree) if node["class"] == "LAMBDA" for path in _paths(node["lhs"])]
        paths = [path[path[0] == "rollouts" and len(path) > 1 :] for path in _paths(tree) if path[:1] not in parameters]
        return list(dict.fromkeys(".".join(path) if path[0] == "task" else path[0] for path in paths))

    def check(self, con: Any) -> str:
        """SQL of whether it computes with NaN. Raises UsageError for what is no expression over one row of ``rollouts``, or
        of another kind."""
        import duckdb

        with about(self.subject):
            duckdb.SQLExpression(self.text)  # it is one
            parts = list(self._parts())
            # Also as a condition of rows, in which there are no aggregates.
            columns = ", ".join([self.sql, *parts])
            kind, *kinds = con.sql(f"SELECT {columns} FROM rollouts WHERE {self.sql} IS NULL").types
        if self.kind == "condition" and kind.id != "boolean":
            expected = f'a condition, such as "reward > 0.5"; this is {str(kind).lower()}'
            raise UsageError.bad_value(self.where, self.text, expected)
        floats = [part for part, kind in zip(parts, kinds, strict=True) if kind.id in ("float", "double")]
        return " OR ".join(f"coalesce(isnan(TRY({part})), false)" for part in floats) or "false"

    def _tree(self) -> Any:
        """DuckDB's tree of a statement that selects it."""
        with connection() as con, about(self.subject):
            return json.loads(con.execute("SELECT json_serialize_sql(?)", [f"SELECT {self.sql}"]).fetchall()[0][0])

    def _parts(self) -> Iterator[str]:
        """What is computed in it for each row, part by part, as SQL."""
        tree = self._tree()
        select = tree["statements"][0]["node"]
        with connection() as con:
            for node in [n for n in _nodes(select["select_list"], but=_INNER) if n["class"] in _COMPUTED]:
                select["select_list"] = [{**node, "alias": ""}]
                sql = con.execute("SELECT json_deserialize_sql(?)", [json.dumps(tree)]).fetchall()[0][0]
                yield sql.removeprefix("SELECT ")


def _nodes(tree: Any, but: Collection[str] = ()) -> Iterator[Any]:
    """The nodes of DuckDB's tree of a statement, ``but`` those below these keys."""
    if isinstance(tree, dict):
        if "class" in tree:
            yield tree
        tree = [child for key, child in tree.items() if key not in but]
    for child in tree if isinstance(tree, list) else ():
        yield from _nodes(child, but)


def _paths(tree: Any) -> Iterator[list[str]]:
    """The names of columns and lambda parameters, each with its fields."""
    return (node["column_names"] for node in _nodes(tree) if node["class"] == "COLUMN_REF")


@functools.cache
def _database() -> Any:
    """DuckDB without files and settings, whose connections share nothing but this."""
    import duckdb

    # Division by 0 has no result, and is no error.
    off = ["ieee_floating_point_ops", "error_on_division_by_zero"]
    off += ["python_enable_replacements", "autoload_known_extensions", "autoinstall_known_extensions"]
    con = duckdb.connect(config=dict.fromkeys(off, False))
    con.execute("SET GLOBAL TimeZone = 'UTC'")
    lock(con)
    return con


def connection() -> Any:
    """A connection to nothing, to be closed."""
    return _database().cursor()


@contextlib.contextmanager
def about(subject: str) -> Iterator[None]:
    """DuckDB's errors as UsageError about ``subject``."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        hint = _HINT if isinstance(error, duckdb.BinderException) else None
        raise UsageError(f"{subject}: {error_message(error)}", hint=hint) from error
