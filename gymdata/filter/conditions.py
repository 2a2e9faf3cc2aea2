"""The small language of ``gymdata filter``: conditions over columns, read with Python's grammar and nothing of its power.

Invariants: only what is listed here can be written; a name that is not a known column is an error that names the
nearest; the whole condition is checked before any row is read. Nothing of the text is ever run: what comes out is a
tree that an evaluator turns into its own operations.

==================  ==========================================================================================
names               columns, as in ``reward``, ``task.level``, ``rewards["a b"]`` (the same as ``reward_…``)
values              ``1``, ``0.5``, ``"text"``, ``true``, ``false``
comparisons         ``==  !=  <  <=  >  >=``, chained as in Python: ``0 < mean_reward < 1``
lists               ``status in ("completed", "truncated")``, ``not in``
missing values      ``reward is null``, ``reward is not null``
logic               ``and``, ``or``, ``not``, brackets
numbers             ``+  -  *  /  //  %``
functions           abs, floor, ceil, min, max, len, lower, upper, contains, startswith, endswith, matches, coalesce
==================  ==========================================================================================

Missing values: whatever is computed from one is missing too, a comparison with one is neither true nor false, and a row
is kept only where its condition is true. So neither ``reward > 0.5`` nor ``not reward > 0.5`` keeps a rollout without
reward. Where the rest settles it, a missing part does not matter: ``reward > 0.5 or n_turns < 3``. Dividing by zero gives
a missing value.
"""

from __future__ import annotations

import ast
import difflib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gymdata.errors import UsageError, counted

Kind = Literal["number", "text", "boolean"]
_MOST_CHARACTERS = 10_000
_DEEPEST = 100
#: Integers up to here are exact as floats, as in every column.
_LARGEST = 2**53

_COMPARISONS: dict[type, str] = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_ARITHMETIC: dict[type, str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
}
_CONSTANTS: dict[str, bool | None] = {"true": True, "True": True, "false": False, "False": False, "null": None}

#: Function → kinds of its arguments and of its result. "any…": two or more of one kind, which is the result's too.
FUNCTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "abs": (("number",), "number"),
    "floor": (("number",), "number"),
    "ceil": (("number",), "number"),
    "len": (("text",), "number"),
    "lower": (("text",), "text"),
    "upper": (("text",), "text"),
    "contains": (("text", "text"), "boolean"),
    "startswith": (("text", "text"), "boolean"),
    "endswith": (("text", "text"), "boolean"),
    "matches": (("text", "text"), "boolean"),
    "min": (("number…",), "number"),
    "max": (("number…",), "number"),
    "coalesce": (("any…",), "any"),
}


@dataclass(frozen=True, slots=True)
class Value:
    """A number, text or boolean that was written down."""

    value: float | str | bool


@dataclass(frozen=True, slots=True)
class Column:
    """A column, by its whole name."""

    name: str


@dataclass(frozen=True, slots=True)
class Operation:
    """``operator`` over ``parts``: a comparison, arithmetic, ``and``, ``or``, ``not``, ``negative``, ``in``, ``is null``,
    or a function's name. ``in`` has its options after the first part; a chain of comparisons is an ``and`` of them."""

    operator: str
    parts: tuple[Node, ...]


Node = Value | Column | Operation


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed text. ``names``: the columns that it reads, in order of appearance."""

    text: str
    node: Node
    names: tuple[str, ...]


def parse(text: str, where: str) -> Expression:
    """Parse ``text``. ``where`` names it in errors. Raises UsageError for anything not listed above."""
    if not text.strip():
        raise UsageError.bad_value(where, text, 'a condition, such as "reward > 0.5"')
    if len(text) > _MOST_CHARACTERS:
        raise UsageError(f"{where}: got {len(text):,} characters, expected at most {_MOST_CHARACTERS:,}")
    plain = " ".join(text.split("\n")).strip()
    try:
        plain.encode()
        with warnings.catch_warnings():
            # Python warns about "\d", which is just what a pattern needs.
            warnings.simplefilter("ignore")
            tree = ast.parse(plain, mode="eval")
        node = _Reader(where, plain).read(tree.body)
    except SyntaxError as error:
        raise UsageError(f"{where}: {text!r}: {error.msg}{_at(error.offset)}", hint=_foreign_habits(text)) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{where}: cannot be read: {str(error) or 'too deeply nested'}") from error
    return Expression(plain, node, tuple(dict.fromkeys(_names(node))))


def check(expression: Expression, columns: Mapping[str, Kind], where: str, wanted: Kind = "boolean") -> None:
    """Raises UsageError unless every name is one of ``columns`` and every operation gets what it works on."""
    for name in expression.names:
        if name not in columns:
            raise unknown_column(name, columns, where)
    got = _kind(expression.node, columns, where)
    if got != wanted:
        meant = 'a condition, such as "reward > 0.5"' if wanted == "boolean" else f"a {wanted}"
        raise UsageError.bad_value(where, expression.text, f"{meant}; this is a {got}")


def unknown_column(
    name: str, columns: Sequence[str] | Mapping[str, Any], where: str, shown: Sequence[str] = ()
) -> UsageError:
    """The error for a column that is not there, naming the nearest one. ``shown``: what to list, when not all."""
    known = list(columns)
    # A field of the task that is written without its "task." is the likeliest slip.
    near = [f"task.{name}"] if f"task.{name}" in known else difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    lead = f"did you mean {near[0]!r}? " if near else ""
    return UsageError(f"{where}: unknown column {name!r}", hint=f"{lead}there are: {', '.join(shown or known)}")


class _Reader:
    """Converts Python's syntax tree to conditions; anything not listed is refused, with its position."""

    def __init__(self, where: str, text: str) -> None:
        self._where = where
        self._text = text
        self._depth = 0

    def read(self, node: ast.expr) -> Node:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._refuse(node, f"more than {_DEEPEST} operations inside one another", None)
        read = self._read(node)
        self._depth -= 1
        return read

    def _read(self, node: ast.expr) -> Node:
        match node:
            case ast.Constant(value=value):
                return self._constant(node, value)
            case ast.Name(id=name) if name in _CONSTANTS:
                value = _CONSTANTS[name]
                if value is None:
                    raise self._refuse(node, "null can only be tested", "write `… is null` or `… is not null`")
                return Value(value)
            case ast.Name() | ast.Attribute() | ast.Subscript():
                return Column(self._name(node))
            case ast.BoolOp(op=op, values=values):
                return Operation("and" if isinstance(op, ast.And) else "or", tuple(map(self.read, values)))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return Operation("not", (self.read(operand),))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return Operation("negative", (self.read(operand),))
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.read(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return Operation(_ARITHMETIC[type(op)], (self.read(left), self.read(right)))
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr()):
                raise self._refuse(node, "& and | are not logic here", "write `and`, `or`")
            case ast.Compare():
                return self._compare(node)
            case ast.Call():
                return self._call(node)
        can = "comparisons, and, or, not, + - * /, in, is null, and functions"
        raise self._refuse(node, f"this is not part of the language: it has {can}", None)

    def _constant(self, node: ast.expr, value: Any) -> Value:
        if isinstance(value, bool):
            return Value(value)
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise self._refuse(node, "the number is too large to be counted exactly", None)
        if isinstance(value, (int, float)) and math.isfinite(value):
            return Value(float(value))
        if isinstance(value, str):
            value.encode()
            return Value(value)
        if value is None:
            raise self._refuse(node, "None can only be tested", "write `… is null` or `… is not null`")
        raise self._refuse(node, f"{value!r} is neither a finite number nor text", None)

    def _name(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name):
                return name
            case ast.Attribute(value=value, attr=name):
                return f"{self._name(value)}.{name}"
            case ast.Subscript(value=value, slice=ast.Constant(value=str(key))):
                base = self._name(value)
                return f"reward_{key}" if base == "rewards" else f"{base}.{key}"
        raise self._refuse(node, "this is no column's name", 'write `name`, `task.field` or `rewards["name"]`')

    def _compare(self, node: ast.Compare) -> Node:
        parts: list[Node] = []
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            parts.append(self._comparison(left, operator, right))
            left = right
        return parts[0] if len(parts) == 1 else Operation("and", tuple(parts))

    def _comparison(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Node:
        if isinstance(operator, (ast.Is, ast.IsNot)):
            if not (isinstance(right, ast.Name) and right.id == "null") and not (
                isinstance(right, ast.Constant) and right.value is None
            ):
                raise self._refuse(right, "`is` only asks for null", "compare with `==`")
            is_null = Operation("is null", (self.read(left),))
            return Operation("not", (is_null,)) if isinstance(operator, ast.IsNot) else is_null
        if isinstance(operator, (ast.In, ast.NotIn)):
            if not isinstance(right, (ast.Tuple, ast.List, ast.Set)) or not right.elts:
                raise self._refuse(right, "`in` needs a list", 'write `status in ("completed", "truncated")`')
            is_in = Operation("in", (self.read(left), *map(self.read, right.elts)))
            return Operation("not", (is_in,)) if isinstance(operator, ast.NotIn) else is_in
        return Operation(_COMPARISONS[type(operator)], (self.read(left), self.read(right)))

    def _call(self, node: ast.Call) -> Node:
        name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
        if name not in FUNCTIONS:
            raise UsageError.unknown_choice(f"{self._where}: function", name, FUNCTIONS)
        kinds, _ = FUNCTIONS[name]
        open_ended = kinds[-1].endswith("…")
        if node.keywords or (len(node.args) < 2 if open_ended else len(node.args) != len(kinds)):
            expected = "two or more values" if open_ended else counted(len(kinds), "value")
            raise self._refuse(node, f"{name} takes {expected}", None)
        return Operation(name, tuple(map(self.read, node.args)))

    def _refuse(self, node: ast.expr, why: str, hint: str | None) -> UsageError:
        shown = ast.get_source_segment(self._text, node) or self._text
        return UsageError(f"{self._where}: {shown!r}: {why}{_at(node.col_offset + 1)}", hint=hint)


def _names(node: Node) -> Iterator[str]:
    if isinstance(node, Column):
        yield node.name
    elif isinstance(node, Operation):
        for part in node.parts:
            yield from _names(part)


def _kind(node: Node, columns: Mapping[str, Kind], where: str) -> Kind:
    """What a node gives, after checking what it takes."""
    if isinstance(node, Column):
        return columns[node.name]
    if isinstance(node, Value):
        return "boolean" if isinstance(node.value, bool) else "text" if isinstance(node.value, str) else "number"
    kinds = [_kind(part, columns, where) for part in node.parts]
    match node.operator:
        case "and" | "or" | "not":
            _demand(node, kinds, "boolean", where)
            return "boolean"
        case "is null":
            return "boolean"
        case "+" | "-" | "*" | "/" | "//" | "%" | "negative":
            _demand(node, kinds, "number", where)
            return "number"
        case "<" | "<=" | ">" | ">=":
            if "boolean" in kinds:
                raise UsageError(f"{where}: {show(node)}: booleans have no order", hint="compare them with `==`")
            _demand(node, kinds, kinds[0], where)
            return "boolean"
        case "==" | "!=" | "in":
            _demand(node, kinds, kinds[0], where)
            return "boolean"
    takes, gives = FUNCTIONS[node.operator]
    if takes[-1].endswith("…"):
        wanted = kinds[0] if takes[0] == "any…" else "number"
        _demand(node, kinds, wanted, where)
        return wanted
    for got, expected in zip(kinds, takes, strict=True):
        if got != expected:
            raise UsageError(f"{where}: {show(node)}: got a {got}, expected a {expected}")
    return "number" if gives == "number" else "text" if gives == "text" else "boolean"


def _demand(node: Operation, kinds: Sequence[Kind], wanted: Kind, where: str) -> None:
    for got, part in zip(kinds, node.parts, strict=True):
        if got != wanted:
            text = f"{where}: {show(node)}: {show(part)} is a {got}, expected a {wanted}"
            raise UsageError(text, hint=_quote(part, got, wanted))


def _quote(part: Node, got: Kind, wanted: Kind) -> str | None:
    if wanted == "text" and isinstance(part, Value):
        return f'text is quoted: "{show(part)}"'
    return "numbers are not quoted" if wanted == "number" and got == "text" and isinstance(part, Value) else None


def show(node: Node) -> str:
    """A node as text, for messages."""
    if isinstance(node, Column):
        return node.name
    if isinstance(node, Value):
        if isinstance(node.value, float):
            return f"{node.value:g}"
        return str(node.value).lower() if isinstance(node.value, bool) else f'"{node.value}"'
    parts = [show(part) for part in node.parts]
    match node.operator:
        case "not" | "negative":
            return f"{'not ' if node.operator == 'not' else '-'}{parts[0]}"
        case "is null":
            return f"{parts[0]} is null"
        case "in":
            return f"{parts[0]} in ({', '.join(parts[1:])})"
        case name if name in FUNCTIONS:
            return f"{name}({', '.join(parts)})"
    return f" {node.operator} ".join(parts)


def _at(offset: int | None) -> str:
    return f" (at character {offset})" if offset else ""


def _foreign_habits(text: str) -> str | None:
    """Hints for habits from SQL or C."""
    words = text.split()
    if any(word in ("AND", "OR", "NOT", "IN", "IS", "NULL") for word in words):
        return "and, or, not, in, is null are written in small letters"
    if "&&" in text or "||" in text or "!" in text.replace("!=", ""):
        return "write `and`, `or`, `not`"
    if "<>" in text:
        return "write `!=`"
    if "=" in text.replace("==", "").replace("!=", "").replace("<=", "").replace(">=", ""):
        return "equality is written `==`"
    return None
