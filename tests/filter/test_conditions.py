"""The conditions of filters: what they mean, what is missing, and what is refused."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given

from gymdata.commands.filter.conditions import Kind, column_of, connection, evaluate, parse
from gymdata.errors import UsageError

KINDS: dict[str, Any] = {
    "reward": "number", "n_turns": "number", "status": "text", "good": "boolean", "task.level": "number",
    "task.meta.kind": "text", "mean_reward": "number", "reward_a b": "number", "task_id": "text",
}  # fmt: skip
TYPES = {"number": pa.float64(), "text": pa.string(), "boolean": pa.bool_()}


def answers(text: str, rows: list[dict[str, Any]], kind: Kind = "condition") -> list[Any]:
    columns = {column_of(name): pa.array([row.get(name) for row in rows], TYPES[KINDS[name]]) for name in KINDS}
    return evaluated(text, columns, len(rows), kind)


def evaluated(text: str, columns: dict[str, pa.Array], rows: int, kind: Kind = "condition") -> list[Any]:
    expression = parse(text, "--where", kind)
    with connection() as con:
        con.register("given", pa.table({"row": pa.array(range(rows)), **columns}))
        evaluate(con, {"answer": expression}, "FROM given")
        return [answer for (answer,) in con.execute("SELECT answer FROM rows ORDER BY row").fetchall()]


ROWS = [
    {"reward": 1.0, "n_turns": 2, "status": "completed", "good": True, "task.level": 2, "mean_reward": 0.5},
    {"reward": 0.25, "n_turns": 2, "status": "truncated", "good": False, "task.level": 3, "mean_reward": 1.0},
    {"reward": None, "n_turns": 4, "status": None, "good": None, "task.level": None, "mean_reward": None},
]


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("reward > 0.5", [True, False, None]),
        ("not reward > 0.5", [False, True, None]),
        ("NOT reward > 0.5", [False, True, None]),
        ("reward is null", [False, False, True]),
        ("reward IS NOT NULL AND n_turns = 2", [True, True, False]),
        ("reward > 0.5 or n_turns > 3", [True, False, True]),
        ("reward > 0.5 and n_turns > 3", [False, False, None]),
        ("coalesce(reward, 0) < 0.5", [False, True, True]),
        ("n_turns % 2 == 0", [True, True, True]),
        ("reward + 1 = 2", [True, False, None]),
        ("reward BETWEEN 0 AND 0.5", [False, True, None]),
        ("true", [True, True, True]),
        ("good", [True, False, None]),
        ("status = 'completed'", [True, False, None]),
        ("status == 'completed'", [True, False, None]),
        ("status != 'completed'", [False, True, None]),
        ("status not in ('completed')", [False, True, None]),
        ("status LIKE 'comp%'", [True, False, None]),
        ("contains(status, 'unc')", [False, True, None]),
        ("contains(status, 'un.')", [False, False, None]),
        ("contains(status, status)", [True, True, None]),
        ("abs(length(status) - 10) < 2 and -length(status) < 0", [True, True, None]),
        ("status is not null and strpos(status, 'trunc') - 1 < 0", [True, False, False]),
        ("task.level > 2", [False, True, None]),
        ("task.meta.kind is null", [True, True, True]),
        ("case when reward > 0.5 then good else true end", [True, True, True]),
        ("status in ('completed', 'x')", [True, False, None]),
        ("status in ['completed', 'x']", [True, False, None]),
        ("strpos(status, 't.uncated') > 0", [False, False, None]),
        ("starts_with(status, 'c') and len(status) > 3", [True, False, None]),
        ("regexp_matches(status, '^c.*d$')", [True, False, None]),
        ("rollouts.reward = 1", [True, False, None]),
        ("reward = 1 -- the best", [True, False, None]),
        ("list_sum(list_transform([n_turns, 1], lambda n: n + reward)) > 4", [True, False, None]),
        ('"reward_a b" is null', [True, True, True]),
        ("0 < mean_reward and mean_reward < 1", [True, False, None]),
        ("mean_reward between 0.1 and 1 and not 2 < n_turns", [True, True, False]),
        ("greatest(n_turns, reward) == 2", [True, True, False]),
    ],
)
def test_a_missing_value_is_neither_true_nor_false(condition: str, kept: list[bool | None]) -> None:
    """A comparison with a missing value is unknown, both ways round."""
    assert answers(condition, ROWS) == kept


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("0/0 > 0.5", [None, None, None]),
        ("reward / mean_reward > 0.5", [None, None, True]),
        ("not reward / mean_reward < 0.5", [None, None, True]),
        ("0.5 > reward / mean_reward or good", [True, None, False]),
        ("(reward - 1) / mean_reward > 0.5 and good", [None, False, False]),
        ("reward / mean_reward is null", [True, True, False]),
        ("1 / (1 / mean_reward) >= 0", [None, None, True]),
        ("-reward / (mean_reward * 2) < 0", [None, None, True]),
        ("reward % mean_reward = 0", [None, None, True]),
        ("mod(reward, mean_reward) = 0", [None, None, True]),
        ("coalesce(reward / mean_reward, 5) = 5", [True, True, False]),
        ("case when reward / mean_reward > 0 then true else false end", [False, False, True]),
        ("CASE WHEN mean_reward = 0 THEN reward / mean_reward ELSE 1 END + 1 = 2", [None, None, True]),
        ("reward / mean_reward in (1, 2)", [None, None, True]),
        ("reward / mean_reward between 0 and 9", [None, None, True]),
        ("greatest(reward / mean_reward, 0) = 0", [True, True, False]),
        ("n_turns // 0 > 0.5", [None, None, None]),
        ("try(ln(reward)) < 5", [None, True, True]),
        ("try(sqrt(-reward)) >= 0", [True, None, None]),
        ("abs(exp(reward * 1000)) > 1", [False, True, True]),
        ("try(pow(mean_reward, -1)) > 0", [None, None, True]),
        ("coalesce(try(ln(reward)), 5) = 5", [True, False, False]),
    ],
)
def test_a_result_that_is_no_number_is_missing(condition: str, kept: list[bool | None]) -> None:
    """0/0 and x/0 are unknown wherever they stand, and what TRY makes of errors: ln(0), the root of a negative number."""
    rows = [
        {"reward": 0.0, "mean_reward": 0.0, "good": True},
        {"reward": 1.0, "mean_reward": 0.0, "good": False},
        {"reward": 2.0, "mean_reward": 1.0, "good": False},
    ]
    assert answers(condition, rows) == kept


def test_a_rank_that_is_no_number_is_missing() -> None:
    """A number that is ranked by is null where its arithmetic has no result."""
    rows = [{"reward": 0.0, "mean_reward": 0.0}, {"reward": 1.0}]
    assert answers("reward / mean_reward", rows, "number") == [None] * 2


@pytest.mark.parametrize(
    ("condition", "told"),
    [
        ("", "a condition"),
        ("a\x00b", "--where"),
        ("reward > 'high'", "Could not convert string 'high'"),
        ("reward", "this is double"),
        ("(reward, 1)", "expected a condition"),
        ("avg(reward) > 0.3", "cannot contain aggregates.*mean_reward"),
        ("max(reward) > 0.3", "cannot contain aggregates.*max_reward"),
        ("count(*) > 1", "cannot contain aggregates.*n_rollouts"),
        ("median(reward) > 1", "cannot contain aggregates"),
        ("0 < mean_reward < 1", "use AND to combine comparisons"),
        ("lengt(status) > 1", 'Did you mean "length"'),
        ("ln(reward - 1) > 1", "cannot take logarithm of zero"),
        ("row_number() over () > 1", "got a window"),
        ("reward in (select 1)", "got a subquery"),
        ("reward > (select min(a) from read_csv('/etc/passwd'))", "got a subquery"),
        ("read_text('/etc/passwd') is null", "table function"),
        ("columns(*) > 1", "got a star"),
        ("$1 > reward", "got a parameter"),
        ("#1 > 1", "got a positional reference"),
        ("random() > 0.5", "volatile"),
        ("__import__('os').system('true')", "--where"),
        ("reward > 1; drop", "--where"),
        ("reward > 1); drop table x; select (1", "3 statements"),
        ("reward > 1) from x where (true", "expected one expression"),
        ("reward > 1), (true", "expected one expression"),
        ("regexp_matches(status, '(')", "missing"),
        ("status LIKE %12%", "--where"),
        ("(reward > 1", "--where"),
        ("reward > 1)", "--where"),
        ("case when good then good", "--where"),
        ("good end", "--where"),
        ("(" * 3000 + "good" + ")" * 3000, "depth"),
        ("not " * 1000 + "good", "depth"),
        ("coalesce(" * 150 + "reward" + ", 1)" * 150 + " > 0", "more than 100"),
        ("status == '\ud800'", "UTF-8"),
    ],
)
def test_what_is_no_condition_is_refused(condition: str, told: str) -> None:
    """A mistake is told with what was meant."""
    with pytest.raises(UsageError, match=f"(?s){told}"):
        answers(condition, ROWS)


@pytest.mark.parametrize(
    "condition",
    ["reward * 1e308 * 10 - reward * 1e308 * 10 > 0", "'nan'::double > n_turns", "list_sum([reward, 'nan']) > 0"],
)
def test_nan_that_is_computed_is_refused(condition: str) -> None:
    """DuckDB holds it to be above all numbers."""
    with pytest.raises(UsageError, match=r"computes with NaN for \d rollout"):
        answers(condition, ROWS)


def test_equal_names_in_other_letters_are_other_columns() -> None:
    """SQL ignores case, the names of scores do not."""
    columns = {column_of("reward_A"): pa.array([1.0]), column_of("reward_a"): pa.array([2.0])}
    assert evaluated("reward_A < reward_a", columns, 1) == [True]


def test_an_error_of_duckdb_names_the_column_as_it_was_written() -> None:
    """Not as the database calls it."""
    with pytest.raises(UsageError, match=r"--where: 'task\.level LIKE 3 \|\| good': .*BOOLEAN") as refused:
        answers("task.level LIKE 3 || good", ROWS)
    assert "column_" not in str(refused.value)


def test_every_expression_is_checked_before_the_first_row_is_read() -> None:
    """A mistake in the second is told, though the first cannot be evaluated."""
    expressions = {"one": parse("ln(0) > 1", "--where"), "other": parse("reward", "--group-where")}
    with connection() as con:
        con.register("given", pa.table({"row": [0], column_of("reward"): [1.0]}))
        with pytest.raises(UsageError, match="--group-where"):
            evaluate(con, expressions, "FROM given")


def test_a_long_condition_is_evaluated() -> None:
    assert answers(" or ".join(["good"] * 100), ROWS) == [True, False, None]
    assert answers(f"task_id in ({', '.join(map(repr, map(str, range(800))))})", [{"task_id": "7"}]) == [True]


@given(st.text(max_size=20))
def test_a_quoted_text_equals_itself(value: str) -> None:
    """Whatever is in it."""
    if "\x00" in value or any("\ud800" <= c <= "\udfff" for c in value):
        return
    quoted = "'" + value.replace("'", "''") + "'"
    assert answers(f"status = {quoted}", [{"status": value}, {"status": value + "x"}]) == [True, False]
