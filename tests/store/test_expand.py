"""Prompts rebuilt for a whole table."""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gymdata
from gymdata.errors import DataError
from gymdata.rollouts import turn_columns as expand
from gymdata.rollouts.schema import ROLLOUTS, TURN
from gymdata.rollouts.turn_columns import with_prompts
from gymdata.rollouts.turns import Call, encode_turns
from gymdata.store.columns import build
from gymdata.store.lines import decode, encode

IDS = st.lists(st.integers(0, 3), max_size=6)
CALLS = st.lists(st.tuples(IDS, IDS), max_size=5)


def column(rollouts: list[list[tuple[list[int], list[int]]]]) -> pa.ListArray:
    turns = [
        encode_turns(
            [Call(np.array(p, np.int32), np.array(g, np.int32), np.zeros(len(g), np.float32), "stop") for p, g in calls]
        )
        for calls in rollouts
    ]
    rows = [decode(encode(t)) for t in turns]
    return pa.array(rows, pa.list_(TURN))


@settings(deadline=None)
@given(st.lists(CALLS, max_size=4), st.integers(0, 2), st.sampled_from([1 << 30, 8]))
def test_expanding_what_was_encoded_gives_the_prompts(rollouts, skip: int, chunk: int):
    """Any calls (growing, branching, breaking, empty) come back with exactly their prompts, also from a sliced table and
    when one chunk cannot hold all of them."""
    whole = column(rollouts).slice(skip)
    ids = pa.chunked_array([pa.array([str(i) for i in range(len(whole))], pa.string())])
    before, expand.CHUNK_TOKENS = expand.CHUNK_TOKENS, chunk
    try:
        got = with_prompts(pa.chunked_array([whole, whole]), pa.chunked_array([*ids.chunks, *ids.chunks], pa.string()))
    finally:
        expand.CHUNK_TOKENS = before
    expected = [[p for p, _ in calls] for calls in rollouts[skip:]]
    assert [[t["prompt_token_ids"] for t in turns] for turns in got.to_pylist()] == expected * 2
    kept = [[{k: v for k, v in t.items() if k != "prompt_token_ids"} for t in turns] for turns in got.to_pylist()]
    assert kept == whole.to_pylist() * 2


@pytest.fixture
def table(row) -> pa.Table:
    rows = [decode(encode(row(i))) for i in range(3)]
    return pa.Table.from_batches([build(rows, ROLLOUTS, ROLLOUTS.schema.names, "rows", range(3))])


def test_both_kinds_of_table_are_taken_and_given(table: pa.Table):
    """pyarrow in, pyarrow out; polars in, polars out; nothing else changes."""
    expected = [[1, 2, 4], [1, 2, 4, 40, 51, 2, 9, 21]]
    arrow = gymdata.expand_turns(table)
    assert [t["prompt_token_ids"] for t in arrow["turns"][1].as_py()] == expected
    assert arrow.drop_columns(["turns"]).equals(table.drop_columns(["turns"]))
    frame = gymdata.expand_turns(pl.from_arrow(table))
    assert [t["prompt_token_ids"] for t in frame["turns"].to_list()[1]] == expected
    assert frame.columns == table.column_names


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt_delta_ids", [1, 2, 5], "T209: rollout 1, turn 0"),
        ("generation_log_probs", [-0.1, -2.5, -0.5], "T209: rollout 1, turn 0"),
        ("parent", 0, "T210: rollout 1, turn 0: got parent 0"),
        ("prefix_length", -1, "T210: rollout 1, turn 0: got prefix_length -1, expected prefix_length 0 to 0"),
        ("prefix_length", 1, "T210: rollout 1, turn 0: got prefix_length 1, expected prefix_length 0 to 0"),
    ],
)
def test_changed_turns_are_refused(table: pa.Table, field: str, value, message: str):
    """One changed id, log-probability or length stops expansion and names the rollout and the turn."""
    rows = table["turns"].to_pylist()
    rows[1][0][field] = value
    ids = pa.array(["0", "1", "2"])
    changed = pa.table({"rollout_id": ids, "turns": pa.array(rows, table.schema.field("turns").type)})
    with pytest.raises(DataError) as caught:
        gymdata.expand_turns(changed)
    assert message in str(caught.value)


def test_a_table_without_turns_is_named(table: pa.Table):
    """The missing column is the message."""
    with pytest.raises(DataError, match="lacks the column"):
        gymdata.expand_turns(table.select(["task_id"]))
