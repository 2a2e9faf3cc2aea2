"""The steps of a filter on plain arrays: what stays, and that the order of rows does not matter."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
from hypothesis import given

from gymdata.commands.filter.columns import evaluate
from gymdata.commands.filter.conditions import Expression, connection
from gymdata.commands.filter.steps import Funnel, Step

rewards = st.sampled_from([0.0, 0.1, 0.5, 1.0, math.nan, math.inf])
STATISTICS = ("mean", "min", "max", "std", "sum")
rows = st.lists(
    st.tuples(st.integers(0, 3), rewards, st.sampled_from(["a", "b", None]), st.integers(0, 2)), min_size=1, max_size=12
)


def table_of(con: Any, given_rows: list[Any], order: list[int]) -> Funnel:
    """A funnel over (group, reward, category, key), in this order; a reward that is not finite and key 0 are none."""
    picked = [(k, *given_rows[k]) for k in order]
    columns = {
        "row": pa.array(range(len(order))),
        "rollout_id": pa.array([f"r{k}" for k in order], pa.string()),
        "rollout_index": pa.array(order, pa.int32()),
        "group_id": pa.array([group for _, group, *_ in picked], pa.int32()),
        "score": pa.array([r if math.isfinite(r) else None for _, _, r, _, _ in picked], pa.float64()),
        "category": pa.array([category for *_, category, _ in picked], pa.string()),
        "key": pa.array([key or None for *_, key in picked], pa.int64()),
    }
    con.register("given", pa.table(columns))
    con.execute("CREATE TEMP TABLE rows AS FROM given")
    return Funnel(con)


def ids_left(con: Any) -> set[str]:
    return {rollout_id for (rollout_id,) in con.execute("SELECT rollout_id FROM rows WHERE is_left").fetchall()}


def kept(given_rows: list[Any], order: list[int], step: str) -> tuple[set[str], list[Step]]:
    with connection() as con:
        funnel = table_of(con, given_rows, order)
        if step == "dedupe":
            funnel.dedupe(ranked=False)
        elif step == "best of doubles":
            funnel.dedupe(ranked=True)
        elif step == "best":
            funnel.best(2, "reward")
        else:
            funnel.balance("category", seed=3)
        return ids_left(con), funnel.steps


STEPS = ["dedupe", "best of doubles", "best", "balance"]


@given(rows, st.randoms(use_true_random=False), st.sampled_from(STEPS))
def test_the_order_of_rows_changes_nothing(given_rows: list[Any], random: Any, step: str) -> None:
    """Each step keeps the same rollouts, and counts the same reasons, whatever the order of the rows."""
    plain = list(range(len(given_rows)))
    shuffled = random.sample(plain, len(plain))
    (first, a), (second, b) = kept(given_rows, plain, step), kept(given_rows, shuffled, step)
    assert first == second
    assert a == b


@given(rows, st.sampled_from(STEPS))
def test_every_row_is_kept_or_counted_once(given_rows: list[Any], step: str) -> None:
    """What goes in comes out, or is counted under one reason."""
    _, (account,) = kept(given_rows, list(range(len(given_rows))), step)
    assert account.rows_in == len(given_rows) == account.rows_out + sum(account.dropped.values())


@given(rows)
def test_the_best_of_a_group_stay(given_rows: list[Any]) -> None:
    """A group keeps its two highest finite rewards, and no rollout without one."""
    names, _ = kept(given_rows, list(range(len(given_rows))), "best")
    for group in {g for g, *_ in given_rows}:
        finite = sorted((r for g, r, *_ in given_rows if g == group and math.isfinite(r)), reverse=True)
        left = sorted((r for k, (g, r, *_) in enumerate(given_rows) if g == group and f"r{k}" in names), reverse=True)
        assert left == finite[:2]


@given(rows)
def test_every_category_has_the_same_number(given_rows: list[Any]) -> None:
    """After balancing each category has as many rollouts as the rarest had; those without one are gone."""
    names, _ = kept(given_rows, list(range(len(given_rows))), "balance")
    had = [c for _, _, c, _ in given_rows if c is not None]
    left = [c for k, (_, _, c, _) in enumerate(given_rows) if f"r{k}" in names]
    least = min((had.count(c) for c in set(had)), default=0)
    assert sorted(left) == sorted(c for c in set(had) for _ in range(least))


def test_ids_tell_apart_what_is_equal_otherwise() -> None:
    """Of rollouts of one group with one score and one index, which two runs have, the first ids stay."""
    columns = {"rollout_id": ["c", "a", "x", "b", "d"], "group_id": [0, 0, 1, 0, 0], "score": [1.0, 1.0, 0.0, 1.0, 0.5]}
    with connection() as con:
        con.register("given", pa.table({"row": range(5), **columns, "rollout_index": [0] * 5}))
        con.execute("CREATE TEMP TABLE rows AS FROM given")
        funnel = Funnel(con)
        funnel.best(2, "reward")
        assert ids_left(con) == {"a", "b", "x"}


@given(rows)
def test_one_of_equal_generations_stays(given_rows: list[Any]) -> None:
    """Of each (group, generation) the lowest index stays; a rollout that generated nothing is nobody's double."""
    names, _ = kept(given_rows, list(range(len(given_rows))), "dedupe")
    seen: set[tuple[int, int]] = set()
    expected = set()
    for k, (group, _, _, key) in enumerate(given_rows):
        if key == 0 or (group, key) not in seen:
            expected.add(f"r{k}")
        seen.add((group, key))
    assert names == expected


@given(rows)
def test_the_best_of_equal_generations_stays(given_rows: list[Any]) -> None:
    """With a score, of each (group, generation) the highest finite one stays, of equal ones the lowest index."""
    names, _ = kept(given_rows, list(range(len(given_rows))), "best of doubles")
    expected = {f"r{k}" for k, (*_, key) in enumerate(given_rows) if key == 0}
    for double in {(group, key) for group, _, _, key in given_rows if key}:
        mine = [
            (r if math.isfinite(r) else -1, -k) for k, (g, r, _, key) in enumerate(given_rows) if (g, key) == double
        ]
        expected.add(f"r{-max(mine)[1]}")
    assert names == expected


def statistics(given_rows: list[tuple[int, float]], order: list[int], what: str) -> list[Any]:
    """Of the group of each row, by the rows' numbers in ``given_rows``."""
    table = pa.table(
        {
            "rollout_id": [f"r{k}" for k in order], "task_id": ["t"] * len(order),
            "rollout_index": pa.array(order, pa.int32()),
            "group_id": [f"g{given_rows[k][0]}" for k in order], "reward": [given_rows[k][1] for k in order],
        }
    )  # fmt: skip
    expression = Expression(f"{what}_reward", "--where", "value")
    with connection() as con:
        evaluate(con, {"answer": expression}, [], lambda names: table.select(names).to_batches())
        found = con.execute("SELECT rollout_index, answer FROM rows").fetchall()
    return [value for _, value in sorted(found)]


@given(rows, st.sampled_from(STATISTICS))
def test_group_columns_are_of_what_is_known(given_rows: list[Any], what: str) -> None:
    """Statistics are over finite values: none is NaN, equal values have their own mean and a deviation of exactly 0, and
    one value has none."""
    pairs = [(group, reward) for group, reward, *_ in given_rows]
    for (group, _), value in zip(pairs, statistics(pairs, list(range(len(pairs))), what), strict=True):
        known = sorted(v for g, v in pairs if g == group and math.isfinite(v))
        if not known or (what == "std" and len(known) == 1):
            assert value is None
            continue
        same = len(set(known)) == 1
        expected = {
            "mean": known[0] if same else np.mean(known), "min": known[0], "max": known[-1],
            "std": 0.0 if same else np.std(known, ddof=1) if len(known) > 1 else math.nan, "sum": np.sum(known),
        }[what]  # fmt: skip
        assert math.isclose(value, expected, rel_tol=1e-12, abs_tol=0.0)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(allow_nan=True)), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
    st.sampled_from(STATISTICS),
)
def test_the_order_of_rows_cannot_change_the_last_bit(values: list[Any], random: Any, what: str) -> None:
    """A column of groups is the same number, bit for bit, in whatever order the rows come."""
    plain = list(range(len(values)))
    assert statistics(values, plain, what) == statistics(values, random.sample(plain, len(plain)), what)
