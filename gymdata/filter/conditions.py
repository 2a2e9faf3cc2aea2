"""Conditions of ``gymdata filter`` and ``view``: SQL expressions over columns, read by ``polars.sql_expr``.

A condition names columns (``reward``, ``task.level``, ``rewards["a b"]``, which is ``reward_…``), values (``1``, ``0.5``,
``'text'``, ``true``), comparisons, ``AND OR NOT``, ``IN (…)``, ``BETWEEN``, ``LIKE``, ``IS NULL``, ``+ - * / %``, ``CASE``
and the functions listed below. Beyond SQL it may chain comparisons (``0 < mean_reward < 1``) and write ``==`` for ``=``
and "text" for 'text' where no column has that name.

Missing values have three-valued logic: a comparison with one is neither true nor false, and a row is kept only where its
condition is true. A result of arithmetic that is no finite number is missing, too: 0/0, 1/0, ``ln(0)``. Aggregates are
refused: what a group has in common are columns (``mean_reward``, ``n_scored``).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gymdata.errors import UsageError, abridged, first_line
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.stats import STATISTICS

if TYPE_CHECKING:
    import polars as pl

Kind = Literal["number", "text", "boolean"]
#: Polars' time grows with the third power of the operations inside one another.
_MOST_CHARACTERS, _MOST_OPERATIONS = 10_000, 100

SCALARS = [
    f.name for f in ROLLOUTS.schema if not pa.types.is_nested(f.type) and f.name not in ("tools", "task", "extra")
]
NUMBERS = [n for n in SCALARS if not (pa.types.is_string(ROLLOUTS.schema.field(n).type) or n == "started_at")]
COUNTS = ("n_rollouts", "n_scored")
#: What messages say.
TEXTS = ("prompt", "text", "tool_calls")
#: Which agents made its model calls, and what failed: both joined by commas, null where there is none.
RECORDED = ("agents", "errors")

FUNCTIONS = (
    "abs", "ceil", "coalesce", "concat", "contains", "ends_with", "exp", "floor", "greatest", "ifnull", "least", "length",
    "ln", "lower", "ltrim", "mod", "nullif", "pow", "regexp_like", "replace", "round", "rtrim", "sign", "sqrt",
    "starts_with", "strpos", "substr", "trim", "upper",
)  # fmt: skip
#: Other names of functions.
_ALIASES = {"len": "length", "startswith": "starts_with", "endswith": "ends_with", "matches": "regexp_like"}
#: Aggregate → the statistic of group columns that says the same.
_AGGREGATES = {
    "avg": "mean", "mean": "mean", "min": "min", "max": "max", "sum": "sum", "stddev": "std", "std": "std",
    "stddev_pop": "std", "stddev_samp": "std", "count": "", "median": "", "variance": "", "var": "", "first": "", "last": "",
}  # fmt: skip
#: Functions that may give NaN or an infinity for finite numbers.
_UNDEFINED_SOMEWHERE = frozenset(("exp", "ln", "mod", "pow", "sqrt"))
_BOUNDARIES = frozenset(("and", "or", "not", "in", "is", "like", "ilike", "between", "when", "then", "else"))
_WORDS = _BOUNDARIES | {"null", "true", "false", "case", "end"}
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<text>'(?:[^']|'')*')
      | (?P<quoted>"(?:[^"]|"")*")
      | rewards\s*\[\s*(?P<part>"[^"]*"|'[^']*')\s*\]
      | (?P<name>[^\W\d]\w*(?:\.\w+)*)
      | (?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)
      | (?P<comparison><=|>=|==|!=|<>|<|>|=)
      | (?P<other>\|\||::|//|\S)
    )""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition as it was written, and the columns that it reads. ``steps``: the same for Polars; step k may read the
    results of those before it as the columns ``#0`` to ``#k-1``, and the last is the answer."""

    text: str
    steps: tuple[str, ...]
    names: tuple[str, ...]

    def answer(self, frame: pl.DataFrame) -> pl.Series:
        """One value per row of ``frame``, which has the columns ``names``; null where it is not known."""
        import polars as pl

        for k, sql in enumerate(self.steps):
            frame = frame.with_columns(pl.sql_expr(sql).alias(f"#{k}"))
            if frame[f"#{k}"].dtype.is_float():
                # Polars' NaN is above all numbers, so that 0/0 > 0.5 would be true.
                frame = frame.with_columns(pl.when(pl.col(f"#{k}").is_finite()).then(f"#{k}").alias(f"#{k}"))
        return frame[f"#{len(self.steps) - 1}"]


def may_be_column(name: str) -> bool:
    """Whether ``name`` can be one of some rollouts."""
    if name in (*SCALARS, *COUNTS, *TEXTS, *RECORDED) or name.startswith(("reward_", "task.")):
        return True
    statistic, _, of = name.partition("_")
    return statistic in STATISTICS and is_number(of)


def is_number(name: str) -> bool:
    return name in NUMBERS or name.startswith("reward_")


def parse(text: str, where: str) -> Condition:
    """Read ``text``. ``where`` names it in errors. Raises UsageError for what is no expression, or has an aggregate."""
    import polars as pl

    if not text.strip():
        raise UsageError.bad_value(where, text, 'a condition, such as "reward > 0.5"')
    if len(text) > _MOST_CHARACTERS:
        raise UsageError(f"{where}: got {len(text):,} characters, expected at most {_MOST_CHARACTERS:,}")
    reader = _Reader(text, where)
    try:
        text.encode()
        answer = reader.read()
        steps = (*reader.steps, answer)
        condition = Condition(" ".join(text.split("\n")).strip(), steps, tuple(dict.fromkeys(reader.names)))
        for sql in steps:
            pl.sql_expr(sql)
    except (pl.exceptions.PolarsError, ValueError) as error:
        hint = 'write a condition, such as "reward > 0.5 AND n_turns < 4"'
        raise UsageError(f"{where}: {text!r}: {first_line(error)}", hint=hint) from error
    return condition


def _signed(sql: str) -> str:
    """A count as a number that may become negative: those of Polars have no sign, and 3 − 4 is 4,294,967,295."""
    return f"CAST({sql} AS BIGINT)"


def _literal(sql: str) -> str:
    """A text expression for ``strpos``, which Polars reads as a regular expression, so that it is found as it is written."""
    if re.fullmatch(r"'(?:[^']|'')*'", sql):
        return re.sub(r"([\\.+*?()|\[\]{}^$#&~-])", r"\\\1", sql)
    for mark in "\\.+*?()|[]{}^$#&~-":
        sql = f"replace({sql}, '{mark}', '\\{mark}')"
    return sql


class _Reader:
    """Writes a condition as the SQL that Polars reads: names quoted, chains of comparisons as pairs."""

    def __init__(self, text: str, where: str) -> None:
        self._text, self._where = text, where
        words = [(match.lastgroup or "", match[match.lastgroup or 0]) for match in _TOKEN.finditer(text)]
        self._tokens = [(kind, {"[": "(", "]": ")"}.get(word, word)) for kind, word in words]
        self._next = self._operations = 0
        self.names: list[str] = []
        self.steps: list[str] = []

    def read(self) -> str:
        sql = " ".join(self._clauses())
        if self._next < len(self._tokens):
            raise self._refused("a bracket is closed that was not opened")
        return sql

    def _clauses(self, closing: str = ")") -> list[str]:
        """The clauses, and the words between them, up to the end, or to the bracket or the word that closes."""
        clauses, operands, operators = [], [list[str]()], list[str]()
        while self._next < len(self._tokens) and self._tokens[self._next][1].lower() not in (")", closing):
            kind, word = self._tokens[self._next]
            self._next += 1
            if kind == "comparison":
                operators.append("=" if word == "==" else word)
                operands.append([])
            elif (kind == "name" and word.lower() in _BOUNDARIES) or word == ",":
                clauses += [self._clause(operands, operators), word]
                operands, operators = [[]], []
                self._count_operation(word != ",")
                if word.lower() in ("like", "ilike") and ("other", "%") in self._tokens[self._next : self._next + 2]:
                    raise self._refused(f"the pattern of {word} is no text", f"quote it, as in {word} '%12%'")
            else:
                operands[-1].append(self._operand(kind, word))
        return [*clauses, self._clause(operands, operators)]

    def _clause(self, operands: list[list[str]], operators: list[str]) -> str:
        sides = [self._computed(words) for words in operands]
        if operators and any(side.lower() in ("null", "none", '"none"') for side in sides):
            raise self._refused("null can only be tested", "write `… IS NULL` or `… IS NOT NULL`")
        pairs = [f"{a} {operator} {b}" for a, operator, b in zip(sides, operators, sides[1:], strict=False)]
        return sides[0] if not pairs else pairs[0] if len(pairs) == 1 else f"({' AND '.join(pairs)})"

    def _computed(self, words: list[str]) -> str:
        """The side of a comparison, or another clause: of arithmetic, its result; not of a number with its sign."""
        sql = " ".join(words)
        return sql if len(words) < 2 or re.fullmatch(r"[-+] [\d.]\S*", sql) else self._step(sql)

    def _step(self, sql: str) -> str:
        self.steps.append(sql)
        return f'"#{len(self.steps) - 1}"'

    def _operand(self, kind: str, word: str) -> str:
        if kind in ("text", "number"):
            return word
        if kind == "part":
            return self._column(f"reward_{word[1:-1]}")
        if kind == "quoted":
            name = word[1:-1].replace('""', '"')
            is_column = may_be_column(name) and name not in TEXTS
            return self._column(name) if is_column else "'" + name.replace("'", "''") + "'"
        if word == "(":
            return f"({' '.join(self._bracket())})"
        if kind == "name" and word.lower() == "case":
            return f"CASE {' '.join(self._bracket('end'))} END"
        if kind == "name" and word.lower() not in _WORDS:
            called = self._next < len(self._tokens) and self._tokens[self._next][1] == "("
            return self._called(word.lower()) if called else self._column(word)
        self._count_operation(kind == "other")
        return word

    def _column(self, name: str) -> str:
        self.names.append(name)
        return '"' + name.replace('"', '""') + '"'

    def _called(self, name: str) -> str:
        name = _ALIASES.get(name, name)
        self._next += 1
        arguments = self._bracket()
        joined = " ".join(arguments)
        if name in ("min", "max") and "," in arguments:
            return f"{'least' if name == 'min' else 'greatest'}({joined})"
        if name in _AGGREGATES:
            statistic = _AGGREGATES[name]
            column_hint = (
                f"{statistic}_reward is its group's" if statistic else "n_rollouts and n_scored are its group's counts"
            )
            raise self._refused(f"{name}(…) would be over all rollouts", f"name a column of its group: {column_hint}")
        if name not in FUNCTIONS:
            raise UsageError.unknown_choice(f"{self._where}: function", name, FUNCTIONS)
        if name in ("contains", "strpos") and "," in arguments:
            text, part = (" ".join(arguments[: arguments.index(",")]), " ".join(arguments[arguments.index(",") + 1 :]))
            position = _signed(f"strpos({text}, {_literal(part)})")
            if name == "strpos":
                return position
            return f"(CASE WHEN {text} IS NULL OR {part} IS NULL THEN NULL ELSE {position} > 0 END)"
        sql = _signed(f"length({joined})") if name == "length" else f"{name}({joined})"
        return self._step(sql) if name in _UNDEFINED_SOMEWHERE else sql

    def _bracket(self, closing: str = ")") -> list[str]:
        self._count_operation(True)
        inner = self._clauses(closing)
        if self._next == len(self._tokens) or self._tokens[self._next][1].lower() != closing:
            raise self._refused("a bracket is not closed" if closing == ")" else "CASE has no END")
        self._next += 1
        return inner

    def _count_operation(self, counts: bool) -> None:
        self._operations += counts
        if self._operations > _MOST_OPERATIONS:
            raise self._refused(f"more than {_MOST_OPERATIONS} operations")

    def _refused(self, why: str, hint: str | None = None) -> UsageError:
        return UsageError(f"{self._where}: {self._text!r}: {why}", hint=hint)


def check(condition: Condition, columns: Mapping[str, Kind], where: str, expected: Kind = "boolean") -> None:
    """Raises UsageError unless every name is one of ``columns`` and the value is of kind ``expected``."""
    import polars as pl

    for name in condition.names:
        if name not in columns:
            raise unknown_column(name, columns, where)
    types = {"number": pl.Float64(), "text": pl.String(), "boolean": pl.Boolean()}
    frame = pl.DataFrame({name: pl.Series([None], dtype=types[columns[name]]) for name in condition.names})
    try:
        dtype = condition.answer(frame).dtype
    except pl.exceptions.PolarsError as error:
        raise UsageError(f"{where}: {condition.text!r}: {first_line(error)}") from error
    kind = "number" if dtype.is_numeric() else "boolean" if dtype == pl.Boolean() else "text"
    if kind != expected:
        wording = 'a condition, such as "reward > 0.5"' if expected == "boolean" else f"a {expected}"
        raise UsageError.bad_value(where, condition.text, f"{wording}; this is a {kind}")


def evaluate(condition: Condition, columns: Mapping[str, pa.Array], rows: int) -> pa.Array:
    """One value per row, null where it is not known. ``condition`` has passed ``check``; ``columns``: those that it names,
    each with ``rows`` values. Raises UsageError for what Polars cannot evaluate."""
    import polars as pl

    # A constant condition names no column; the row numbers give it its length.
    arrays = {"": pa.array(np.arange(rows)), **{name: columns[name] for name in condition.names}}
    frame = pl.DataFrame(pl.from_arrow(pa.table(arrays)))
    try:
        return condition.answer(frame).to_arrow()
    except pl.exceptions.PolarsError as error:
        raise UsageError(f"{condition.text!r}: {first_line(error)}") from error


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
    lead = f"did you mean {near[0]!r}? " if near else ""
    return UsageError(f"{where}: unknown column {name!r}", hint=f"{lead}there are: {abridged(shown or names)}")
