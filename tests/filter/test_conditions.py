"""The language of filters: what it takes, what it refuses, and that Polars answers what Python would."""

from __future__ import annotations

import math
import re
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given, settings

from gymdata.errors import UsageError
from gymdata.filter.conditions import Column, Expression, Node, Operation, Value, check, parse
from gymdata.filter.expressions import evaluate, is_true

KINDS: dict[str, Any] = {"reward": "number", "n_turns": "number", "status": "text", "good": "boolean"}
TYPES = {"number": pa.float64(), "text": pa.string(), "boolean": pa.bool_()}


def answers(text: str, rows: list[dict[str, Any]], wanted: Any = "boolean") -> list[Any]:
    expression = parse(text, "--where")
    check(expression, KINDS, "--where", wanted)
    columns = {name: pa.array([row[name] for row in rows], TYPES[KINDS[name]]) for name in KINDS}
    return evaluate(expression, columns, len(rows)).to_pylist()


def row(reward: float | None = None, n_turns: float | None = None, status: str | None = None, good: bool | None = None):
    return {"reward": reward, "n_turns": n_turns, "status": status, "good": good}


number, text = st.integers(-4, 4) | st.sampled_from([0.5, -1.25]), st.sampled_from(["", "a", "ab", "b'; DROP", "é"])
rows_of = st.lists(
    st.builds(row, st.none() | number, st.none() | number, st.none() | text, st.none() | st.booleans()),
    min_size=1, max_size=6,
)  # fmt: skip


def _joined(parts: st.SearchStrategy[str], operators: list[str]) -> st.SearchStrategy[str]:
    return st.builds(lambda a, op, b: f"({a} {op} {b})", parts, st.sampled_from(operators), parts)


numbers = st.recursive(
    st.sampled_from(["reward", "n_turns"]) | number.map(lambda n: f"({n})"),
    lambda inner: (
        _joined(inner, ["+", "-", "*", "/", "//"])
        | inner.map(lambda a: f"(-{a})")
        | inner.map(lambda a: f"abs({a})")
        | st.builds("min({}, {})".format, inner, inner)
        | st.builds("max({}, {})".format, inner, inner)
    ),
    max_leaves=4,
)
texts = st.just("status") | text.map(repr)
compared = ["==", "!=", "<", "<=", ">", ">="]
plain = (
    _joined(numbers, compared)
    | _joined(texts, compared)
    | st.builds(
        lambda a, x, b, y, c: f"{a} {x} {b} {y} {c}",
        numbers, st.sampled_from(compared), numbers, st.sampled_from(compared), numbers,
    )
    | st.builds("{} in (1, {}, 0.5)".format, numbers, number)
    | st.builds("{} not in ('a', {})".format, texts, texts)
    | st.builds("{} is null".format, st.sampled_from(list(KINDS)))
    | st.builds("{} is not null".format, st.sampled_from(list(KINDS)))
    | st.sampled_from(["good", "good == true", "startswith(status, 'a')", "contains(status, 'b')", "len(status) > 1"])
)  # fmt: skip
conditions = st.recursive(
    plain.map(lambda a: f"({a})"),
    lambda inner: _joined(inner, ["and", "or"]) | inner.map(lambda a: f"(not {a})"),
    max_leaves=5,
)


class Unknown:
    """A missing value in Python: whatever is computed from one is missing, and logic is three-valued."""


def python(text: str, given_row: dict[str, Any]) -> bool | None:
    """What Python's own eval makes of a condition, with missing values carried by exceptions at every operation."""
    import ast

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=constant):
                return constant
            case ast.Name(id=name):
                return {"true": True, "false": False}.get(name, given_row.get(name))
            case ast.BoolOp(op=op, values=parts):
                known = [value(part) for part in parts]
                decisive = isinstance(op, ast.Or)
                return decisive if decisive in known else None if None in known else not decisive
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = value(operand)
                return None if inner is None else not inner
            case ast.Compare(left=left, ops=ops, comparators=right):
                nodes = [left, *right]
                each = [one(a, op, b) for a, op, b in zip(nodes, ops, nodes[1:], strict=False)]
                return False if False in each else None if None in each else True
        inside = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        if isinstance(node, ast.Call):
            inside = node.args
        known = [value(child) for child in inside]
        if None in known:
            return None
        names = {f"v{k}": v for k, v in enumerate(known)}
        try:
            return eval(shape(node), {"startswith": str.startswith, "contains": lambda a, b: b in a}, names)
        except ZeroDivisionError:
            return None

    def one(left: ast.expr, op: ast.cmpop, right: ast.expr) -> bool | None:
        if isinstance(op, (ast.Is, ast.IsNot)):
            return (value(left) is None) == isinstance(op, ast.Is)
        a = value(left)
        if isinstance(op, (ast.In, ast.NotIn)):
            # The right side of `in` is a list.
            options = [value(option) for option in right.elts]  # type: ignore[attr-defined]
            found = None if a is None else True if a in options else None if None in options else False
            return None if found is None else found == isinstance(op, ast.In)
        b = value(right)
        if a is None or b is None:
            return None
        compare = ast.Compare(ast.Name("a"), [op], [ast.Name("b")])
        return eval(ast.unparse(ast.fix_missing_locations(compare)), {}, {"a": a, "b": b})

    def shape(node: ast.expr) -> str:
        match node:
            case ast.BinOp(op=op):
                made: ast.expr = ast.BinOp(ast.Name("v0"), op, ast.Name("v1"))
            case ast.UnaryOp(op=op):
                made = ast.UnaryOp(op, ast.Name("v0"))
            case ast.Call(func=func, args=args):
                made = ast.Call(func, [ast.Name(f"v{k}") for k in range(len(args))], [])
            case _:
                raise TypeError(ast.dump(node))
        return ast.unparse(ast.fix_missing_locations(made))

    return value(ast.parse(text, mode="eval").body)


@given(conditions, rows_of)
@settings(max_examples=300)
def test_a_condition_means_what_it_means_in_python(condition: str, rows: list[dict[str, Any]]) -> None:
    """Every condition answers row by row what Python answers, and is unknown where a missing value leaves it open."""
    assert answers(condition, rows) == [python(condition, one) for one in rows]


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("reward > 0.5", [True, False, None]),
        ("not reward > 0.5", [False, True, None]),
        ("reward is null", [False, False, True]),
        ("reward > 0.5 or n_turns < 3", [True, True, True]),
        ("reward > 0.5 and n_turns > 3", [False, False, False]),
        ("0 < reward < 1", [False, True, None]),
        ("coalesce(reward, 0) < 0.5", [False, True, True]),
        ("n_turns / (n_turns - n_turns) > 0", [None, None, None]),
        ("n_turns % 2 == 0", [True, True, True]),
        ("(0 - n_turns) % 3 == 1", [True, True, True]),
        ("matches(status, '^c.*d$')", [True, True, None]),
        ("max(n_turns, reward) == 2", [True, True, None]),
        ("true", [True, True, True]),
    ],
)
def test_a_missing_value_is_not_true(condition: str, kept: list[bool | None]) -> None:
    """A comparison with a missing value is unknown, both ways round, and unknown rows are not kept."""
    rows = [row(1.0, 2, "completed"), row(0.25, 2, "completed"), row(None, 2, None)]
    assert answers(condition, rows) == kept
    assert list(is_true(pa.array(kept, pa.bool_()))) == [one is True for one in kept]


@pytest.mark.parametrize(
    ("condition", "told"),
    [
        ("rewrd > 0.5", "unknown column 'rewrd'.*did you mean 'reward'"),
        ("reward > 'high'", '"high" is a text, expected a number'),
        ("status == completed", "unknown column 'completed'"),
        ("reward", "this is a number"),
        ("reward = 1", "=="),
        ("reward > 0 AND n_turns < 3", "small letters"),
        ("reward > 0 && n_turns < 3", "write `and`"),
        ("(reward > 0) & (n_turns < 3)", "write `and`"),
        ("reward == null", "is null"),
        ("reward == None", "is null"),
        ("reward is 1", "only asks for null"),
        ("reward in 1", "needs a list"),
        ("reward in ()", "needs a list"),
        ("reward in (1, 'a')", '"a" is a text'),
        ("good < true", "no order"),
        ("lenn(status) > 1", "did you mean 'len'"),
        ("len(status, 1) > 1", "takes 1 value"),
        ("__import__('os').system('true')", "function.*__import__"),
        ("(lambda: 1)() == 1", "function"),
        ("[x for x in (1,)] == 1", "not part of the language: it has comparisons"),
        ("reward.__class__ == 1", "unknown column 'reward.__class__'"),
        ("reward ** 2 > 1", "this is not part of the language"),
        ("reward > 1e999", "neither a finite number nor text"),
        ("reward > 9007199254740993", "too large"),
        ("reward > 1j", "neither a finite number nor text"),
        ("status == b'a'", "neither a finite number nor text"),
        ("1; DROP TABLE given", "invalid syntax"),
        ("reward > 1 -- x", "unknown column 'x'"),
        ("matches(status, '(')", "missing"),
        ("", "a condition"),
        ("(" * 300 + "good" + ")" * 300, "nested"),
        ("not " * 1000 + "good", "100 operations|nested"),
        ("-" * 150 + "reward > 1", "100 operations"),
        ("good or " * 2000 + "good", "at most"),
        ("status == '\ud800'", "cannot be read"),
        ("a\x00b", "cannot be read|null"),
    ],
)
def test_what_is_not_the_language_is_refused(condition: str, told: str) -> None:
    """A mistake is told with what was meant, and nothing beyond the language is run."""
    with pytest.raises(UsageError, match=f"(?s){told}"):
        answers(condition, [row(1.0, 2, "completed", True)])


def test_nesting_does_not_multiply_the_work() -> None:
    """Functions inside functions are written once each."""
    inner = "reward"
    for _ in range(40):
        inner = f"min({inner}, n_turns)"
    assert answers(f"{inner} == 1", [row(1.0, 2)]) == [True]


@given(st.text(max_size=20))
def test_text_is_never_sql(value: str) -> None:
    """A quoted text equals itself, whatever is in it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return
    if "\x00" in value:
        return
    assert answers(f"status == {value!r}", [row(status=value), row(status=value + "x")]) == [True, False]


def ordered(value: Any) -> Any:
    """What values are compared by: a number that is not one equals itself and is above all others."""
    return (math.isnan(value), 0.0 if math.isnan(value) else value) if isinstance(value, float) else value


def floor_of(a: float) -> float:
    return float(math.floor(a)) if math.isfinite(a) else a


def modulo(a: float, b: float) -> float:
    try:
        return math.fmod(math.fmod(a, b) + b, b)
    except ValueError:
        return math.nan


def divided(a: float, b: float) -> float | None:
    return a / b if b else None


OPERATIONS: dict[str, Any] = {
    "==": lambda a, b: ordered(a) == ordered(b),
    "!=": lambda a, b: ordered(a) != ordered(b),
    "<": lambda a, b: ordered(a) < ordered(b),
    "<=": lambda a, b: ordered(a) <= ordered(b),
    ">": lambda a, b: ordered(a) > ordered(b),
    ">=": lambda a, b: ordered(a) >= ordered(b),
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": divided,
    "//": lambda a, b: None if b == 0 else floor_of(a / b),
    "%": lambda a, b: None if b == 0 else modulo(a, b),
    "not": lambda a: not a,
    "negative": lambda a: -a,
    "abs": abs,
    "floor": floor_of,
    "ceil": lambda a: -floor_of(-a),
    "min": lambda *a: min(a, key=ordered),
    "max": lambda *a: max(a, key=ordered),
    "len": lambda a: float(len(a)),
    "lower": str.lower,
    "upper": str.upper,
    "contains": lambda a, b: b in a,
    "startswith": str.startswith,
    "endswith": str.endswith,
    "matches": lambda a, b: re.search(b, a) is not None,
}


def interpreted(node: Node, one_row: dict[str, Any]) -> Any:
    """What a node gives for one row, read off its tree."""
    if isinstance(node, Value):
        return node.value
    if isinstance(node, Column):
        return one_row[node.name]
    parts = [interpreted(part, one_row) for part in node.parts]
    match node.operator:
        case "is null":
            return parts[0] is None
        case "coalesce":
            return next((part for part in parts if part is not None), None)
        case "and" | "or":
            decisive = node.operator == "or"
            return decisive if decisive in parts else None if None in parts else not decisive
        case "in":
            each = [None if parts[0] is None or o is None else ordered(parts[0]) == ordered(o) for o in parts[1:]]
            return True if True in each else None if None in each else False
    return None if None in parts else OPERATIONS[node.operator](*parts)


floats = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.1, 0.7, 5.3, -1e-20, 3e307, 1e308, 2.0**53, math.inf, -math.inf])
words = st.sampled_from(["", "a", "ab", "B", "ß", "É", "ΑΣ", "a\nb", "*", "^c.*$", "'; DROP", "\U0001f600"])
patterns = st.sampled_from(["a", "^a", "b$", "a.b", "^.?$", "[A-Z]", "(?i)AB"])
open_rows = st.lists(
    st.builds(row, st.none() | floats, st.none() | floats, st.none() | words, st.none() | st.booleans()),
    min_size=1, max_size=6,
)  # fmt: skip


def operation(operator: str, *parts: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    return st.tuples(*parts).map(lambda made: Operation(operator, made))


def one_of(operators: list[str], *parts: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    return st.sampled_from(operators).flatmap(lambda operator: operation(operator, *parts))


def grown(leaves: st.SearchStrategy[Node], grow: Any) -> st.SearchStrategy[Node]:
    return st.recursive(leaves, grow, max_leaves=5)


text_nodes = grown(
    words.map(Value) | st.just(Column("status")),
    lambda t: one_of(["lower", "upper"], t) | operation("coalesce", t, t),
)
number_nodes = grown(
    floats.filter(math.isfinite).map(Value) | st.sampled_from(["reward", "n_turns"]).map(Column),
    lambda n: (
        one_of(["+", "-", "*", "/", "//", "%", "min", "max", "coalesce"], n, n)
        | one_of(["min", "max"], n, n, n)
        | one_of(["negative", "abs", "floor", "ceil"], n)
        | operation("len", text_nodes)
    ),
)
boolean_nodes = grown(
    one_of(compared, number_nodes, number_nodes)
    | one_of([*compared, "contains", "startswith", "endswith"], text_nodes, text_nodes)
    | operation("in", number_nodes, number_nodes, number_nodes)
    | operation("in", text_nodes, text_nodes)
    | operation("matches", text_nodes, patterns.map(Value))
    | operation("is null", number_nodes)
    | st.booleans().map(Value)
    | st.just(Column("good")),
    lambda t: one_of(["and", "or", "==", "!=", "coalesce"], t, t) | operation("and", t, t, t) | operation("not", t),
)


@given(st.one_of(boolean_nodes, number_nodes, text_nodes), open_rows)
@settings(max_examples=500)
def test_an_expression_gives_what_its_tree_says_row_by_row(node: Node, rows: list[dict[str, Any]]) -> None:
    """The compiled expression equals an interpreter of single rows: every operation, any nesting, missing values,
    infinities, and what comes of them."""
    columns = {name: pa.array([one[name] for one in rows], TYPES[KINDS[name]]) for name in KINDS}
    got = evaluate(Expression("", node, tuple(KINDS)), columns, len(rows)).to_pylist()
    expected = [interpreted(node, one) for one in rows]
    assert [ordered(value) for value in got] == [ordered(value) for value in expected]


def test_a_quotient_is_the_nearest_number() -> None:
    """0.7 / 0.1 is 6.999999999999999 as everywhere else: a divisor that is the same for all rows changes nothing."""
    rows = [row(reward=0.7), row(reward=0.3)]
    assert answers("reward / 0.1 < 7", rows) == [True, True]
    assert answers("reward // 0.1 == 6", rows) == [True, False]


def test_a_pattern_may_differ_from_row_to_row() -> None:
    """``matches`` reads its pattern in each row; a missing text or pattern leaves the answer open."""
    rows = [row(status="a"), row(status="^b"), row(status=None)]
    assert answers("matches('a', status)", rows) == [True, False, None]
    assert answers("matches(status, lower('A')) or 5 % 3 == 2", rows) == [True, True, True]
    assert answers("matches(status, '[a-c]')", rows) == [True, True, None]


@given(st.sampled_from(["*", "^r.*$", "c0", "row", "answer", "s0", "a b", "é"]))
def test_a_columns_name_is_only_a_name(name: str) -> None:
    """What Polars would read as a pattern in a name, or names that the compiler uses itself, stand for their column."""
    expression = Expression("", Operation("==", (Operation("%", (Column(name), Value(3.0))), Value(1.0))), (name,))
    columns = {name: pa.array([4.0, 5.0, None]), "reward": pa.array([1.0, 1.0, 1.0])}
    assert evaluate(expression, columns, 3).to_pylist() == [True, False, None]
