"""The conditions of filters: what they mean, what is missing, and what is refused."""

from __future__ import annotations

import json
from typing import Any, Literal

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given

from gymdata.commands.filter.columns import evaluate
from gymdata.commands.filter.conditions import Expression, connection
from gymdata.errors import UsageError
from gymdata.rollouts.schema import ROLLOUTS

SCHEMA = pa.schema([field.with_nullable(True) for field in ROLLOUTS.schema])


def evaluated(con: Any, rows: list[dict[str, Any]], *expressions: Expression) -> list[tuple[Any, ...]]:
    """The answers to ``expressions`` for each row, with what it lacks missing."""
    table = pa.Table.from_pylist([{"group_id": "g", **row} for row in rows], schema=SCHEMA)
    names = {f"answer_{k}": expression for k, expression in enumerate(expressions)}
    evaluate(con, names, [], lambda columns: table.select(columns).to_batches())
    return list(con.execute(f"SELECT {', '.join(names)} FROM rows ORDER BY row").fetchall())


def answers(
    text: str, rows: list[dict[str, Any]], kind: Literal["condition", "number", "value"] = "condition"
) -> list[Any]:
    with connection() as con:
        return [answer for (answer,) in evaluated(con, rows, Expression(text, "--where", kind))]


def row(
    reward: float | None, n_turns: int, status: str | None, duration_s: float | None, **task: Any
) -> dict[str, Any]:
    return {
        "reward": reward, "n_turns": n_turns, "status": status, "duration_s": duration_s, "task": json.dumps(task),
    }  # fmt: skip


ROWS = [
    row(1.0, 2, "completed", 0.5, good=True, level=2),
    row(0.25, 2, "truncated", 1.0, good=False, level=3, meta={"kind": "a"}),
    row(None, 4, None, None, good=None),
]


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("reward > 0.5", [True, False, None]),
        ("not reward > 0.5", [False, True, None]),
        ("reward is null", [False, False, True]),
        ("reward > 0.5 and n_turns > 3", [False, False, None]),
        ("true", [True, True, True]),
        ("task.good", [True, False, None]),
        ("status == 'completed'", [True, False, None]),
        ("status != 'completed'", [False, True, None]),
        ("contains(status, status)", [True, True, None]),
        ("task.level > 2", [False, True, None]),
        ("task.meta.kind is null", [True, False, True]),
        ("case when reward > 0.5 then task.good else true end", [True, True, True]),
        ("rollouts.reward = 1", [True, False, None]),
        ("reward = 1 -- the best", [True, False, None]),
        ("list_sum(list_transform([n_turns, 1], lambda n: n + reward)) > 4", [True, False, None]),
        ('"reward" is null', [False, False, True]),
        ("mean_reward = 0.625 and n_rollouts = 3 and n_scored = 2", [True, True, True]),
        ("reward = max_reward", [True, False, None]),
        ("reward > (select avg(reward) from rollouts)", [True, False, None]),
        ("task->>'level' = '3'", [False, True, None]),
    ],
)
def test_a_missing_value_is_neither_true_nor_false(condition: str, kept: list[bool | None]) -> None:
    """A comparison with a missing value is unknown, both ways round."""
    assert answers(condition, ROWS) == kept


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("0/0 > 0.5", [None, None, None]),
        ("reward / duration_s > 0.5", [None, None, True]),
        ("(reward - 1) / duration_s > 0.5 and task.good", [None, False, False]),
        ("reward / duration_s is null", [True, True, False]),
        ("reward % duration_s = 0", [None, None, True]),
        ("coalesce(reward / duration_s, 5) = 5", [True, True, False]),
        ("case when reward / duration_s > 0 then true else false end", [False, False, True]),
        ("n_turns // 0 > 0.5", [None, None, None]),
        ("try(ln(reward)) < 5", [None, True, True]),
        ("try(sqrt(-reward)) >= 0", [True, None, None]),
        ("abs(exp(reward * 1000)) > 1", [False, True, True]),
    ],
)
def test_a_result_that_is_no_number_is_missing(condition: str, kept: list[bool | None]) -> None:
    """0/0 and x/0 are unknown wherever they stand, and what TRY makes of errors: ln(0), the root of a negative number."""
    rows = [row(0.0, 2, None, 0.0, good=True), row(1.0, 2, None, 0.0, good=False), row(2.0, 4, None, 1.0, good=False)]
    assert answers(condition, rows) == kept


def test_a_rank_that_is_no_number_is_missing() -> None:
    """A number that is ranked by is null where its arithmetic has no result."""
    rows = [{"reward": 0.0, "duration_s": 0.0}, {"reward": 1.0}]
    assert answers("reward / duration_s", rows, "number") == [None] * 2


@pytest.mark.parametrize(
    ("condition", "told"),
    [
        ("", "--where"),
        ("a\x00b", "--where"),
        ("reward > 'high'", "Could not convert string 'high'"),
        ("reward", "this is double"),
        ("(reward, 1)", "expected a condition"),
        ("avg(reward) > 0.3", "cannot contain aggregates.*mean_reward"),
        ("0 < mean_reward < 1", "use AND to combine comparisons"),
        ("lengt(status) > 1", 'Did you mean "length"'),
        ("ln(reward - 1) > 1", "cannot take logarithm of zero"),
        ("row_number() over () > 1", "cannot contain window"),
        ("reward > (select min(a) from read_csv('/etc/passwd'))", "disabled by configuration"),
        ("read_text('/etc/passwd') is null", "has to be called in a FROM clause"),
        ("$1 > reward", "not provided"),
        ("reward > 1; drop", "--where"),
        ("reward > 1) from x where (true", "syntax error"),
        ("reward > 1), (true", "syntax error"),
        ("(" * 3000 + "true" + ")" * 3000, "depth"),
        ("status == '\ud800'", "UTF-8"),
    ],
)
def test_what_is_no_condition_is_refused(condition: str, told: str) -> None:
    """A mistake is told with what was meant."""
    with pytest.raises(UsageError, match=f"(?s){told}"):
        answers(condition, ROWS)


@pytest.mark.parametrize(
    "condition",
    [
        "reward * 1e308 * 10 - reward * 1e308 * 10 > 0",
        "'nan'::double > n_turns",
        "list_sum([reward, 'nan']) > 0",
        "not pow(reward - 2, 0.5) < 1",
        "list_contains([k FOR k IN [1.0] IF k > 0], pow(-reward, 0.5))",
    ],
)
def test_nan_that_is_computed_is_refused(condition: str) -> None:
    """DuckDB holds it to be above all numbers."""
    with pytest.raises(UsageError, match=r"computes with NaN for \d rollout"):
        answers(condition, ROWS)


def test_a_case_leaves_out_rollouts_whose_result_would_be_nan() -> None:
    """What does not come out of it is not looked at."""
    rows = [{"reward": 4.0}, {"reward": -4.0}]
    assert answers("CASE WHEN reward > 0 THEN pow(reward, 0.5) END > 1", rows) == [True, None]


def test_an_error_of_duckdb_is_about_the_expression() -> None:
    """As it was written, without where in a statement it stands."""
    with pytest.raises(UsageError, match=r"--where: 'length\(n_turns\) > 1': .*No function matches") as refused:
        answers("length(n_turns) > 1", ROWS)
    assert "LINE 1" not in str(refused.value)


def test_a_long_expression_leaves_room_for_the_error() -> None:
    """Its beginning and its end are shown, and what is wrong with it is whole."""
    with pytest.raises(UsageError) as refused:
        answers(" AND ".join(["rewardd > 0.5", *("n_turns > 3" for _ in range(20))]), ROWS)
    assert "--where: 'rewardd > 0.5 AND" in str(refused.value)
    assert 'Referenced column "rewardd" not found' in str(refused.value)


def test_every_expression_is_checked_before_the_first_row_is_evaluated() -> None:
    """A mistake in the second is told, though the first cannot be evaluated."""
    with connection() as con, pytest.raises(UsageError, match="--group-where"):
        evaluated(con, ROWS, Expression("ln(0) > 1", "--where"), Expression("reward", "--group-where"))


def test_a_long_condition_is_evaluated() -> None:
    assert answers(" or ".join(["task.good"] * 100), ROWS) == [True, False, None]
    assert answers(f"status in ({', '.join(map(repr, map(str, range(800))))})", [{"status": "7"}]) == [True]


def test_a_field_of_several_kinds_is_text() -> None:
    """A number as it is written, a text without quotes, and what holds others as JSON; also with fields that are null."""
    rows = [{"task": json.dumps({"answer": answer, "none": None})} for answer in (5, "5", "a", {"b": 1}, None)]
    assert answers("task.answer = '5' and task.none is null", rows) == [True, True, False, False, None]
    assert answers("task.answer", rows, "value") == ["5", "5", "a", '{"b":1}', None]


@given(st.text(max_size=20))
def test_a_quoted_text_equals_itself(value: str) -> None:
    """Whatever is in it."""
    if "\x00" in value or any("\ud800" <= c <= "\udfff" for c in value):
        return
    quoted = "'" + value.replace("'", "''") + "'"
    assert answers(f"status = {quoted}", [{"status": value}, {"status": value + "x"}]) == [True, False]
