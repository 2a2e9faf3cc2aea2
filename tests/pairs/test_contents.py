"""Flat training columns: equal to the turn-by-turn definition, for whole batches and slices of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymdata.commands.pairs.contents import message_keys, token_columns
from gymdata.errors import DataError
from gymdata.rollouts import turns as tokens
from gymdata.rollouts.schema import MESSAGE, TURN
from tests.definition import sequences


def call(prompt: list[int], generation: list[int]) -> tokens.Call:
    logprobs = -np.arange(1, len(generation) + 1, dtype=np.float32)
    return tokens.Call(np.array(prompt, np.int32), np.array(generation, np.int32), logprobs, "stop")


def column(*rollouts: list[tokens.Call]) -> pa.ListArray:
    return pa.array([tokens.encode_turns(r) for r in rollouts], pa.list_(TURN))


def ids(n: int) -> pa.Array:
    return pa.array([f"r{i}" for i in range(n)], pa.string())


TWO_TURNS = [call([1, 2], [10, 11]), call([1, 2, 10, 11, 3], [12])]
RETRIED = [call([1, 2], [10]), call([1, 2], [11])]
BROKEN = [call([1, 2], [10, 11]), call([1, 2, 99, 3], [12])]


def test_masks_are_one_on_generated_tokens_only() -> None:
    """The prompt ends before the first generated token; context between turns has mask 0 and log-prob 0."""
    row = token_columns(column(TWO_TURNS), ids(1)).to_pylist()[0]
    assert row["prompt_ids"] == [1, 2]
    assert row["completion_ids"] == [10, 11, 3, 12]
    assert row["completion_mask"] == [1, 1, 0, 1]
    assert row["completion_logprobs"] == [-1.0, -2.0, 0.0, -1.0]
    assert row["n_sequences"] == 1


def test_rollouts_that_are_no_chain_are_marked() -> None:
    """A retry that was superseded leaves one sequence; a break leaves two; no turns leave none; order is kept."""
    table = token_columns(column(BROKEN, TWO_TURNS, [], RETRIED), ids(4))
    assert table["n_sequences"].to_pylist() == [2, 1, 0, 1]
    assert table["completion_ids"].to_pylist() == [[], [10, 11, 3, 12], [], [11]]


@pytest.mark.parametrize("field", ["prompt_delta_ids", "generation_token_ids", "generation_log_probs"])
def test_a_changed_value_is_found_at_its_turn(field: str) -> None:
    """One changed id or log-prob is refused as T209, naming the rollout and the turn."""
    turns = tokens.encode_turns(TWO_TURNS)
    turns[1][field] = turns[1][field] + 1
    good = tokens.encode_turns(TWO_TURNS)
    with pytest.raises(DataError, match="T209: rollout r1, turn 1"):
        token_columns(pa.array([good, turns], pa.list_(TURN)), ids(2))


continuing = st.lists(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), max_size=4), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
        min_size=1,
        max_size=4,
    ),
    min_size=1,
    max_size=5,
)


@given(continuing, st.data())
def test_columns_equal_the_definition(parts: list[Any], data: st.DataObject) -> None:
    """For rollouts that are chains, also inside a slice, the columns equal ``definition.sequences``."""
    rollouts = []
    for spec in parts:
        held: list[int] = [5]
        calls = []
        for delta, generation in spec:
            held = held + delta
            calls.append(call(held, generation))
            held = held + generation
        rollouts.append(calls)
    start = data.draw(st.integers(0, len(rollouts) - 1))
    table = token_columns(column(*rollouts).slice(start), ids(len(rollouts)).slice(start))
    for row, calls in zip(table.to_pylist(), rollouts[start:], strict=True):
        found = sequences(tokens.encode_turns(calls), abandoned="drop")
        assert row["n_sequences"] == len(found)
        if len(found) == 1:
            cut = int(found[0].turn_starts[0])
            assert row["prompt_ids"] + row["completion_ids"] == found[0].input_ids.tolist()
            assert row["completion_mask"] == found[0].loss_mask[cut:].tolist()
            assert row["completion_logprobs"] == found[0].logprobs[cut:].tolist()


def message(role: str, content: str, turn: int | None = None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, "turn": turn, **more}


def test_keys_of_words_ignore_call_ids_and_tool_output() -> None:
    """Two answers with the same words and calls are the same text, whatever ids their calls drew."""

    def calls(call_id: str, value: int) -> str:
        return (
            f'[{{"id": "{call_id}", "type": "function", "function": {{"name": "f", "arguments": {{"id": {value}}}}}}}]'
        )

    rows = [
        [message("assistant", "x", 0, tool_calls=calls("c1", 1)), message("tool", "7")],
        [message("assistant", "x", 0, tool_calls=calls("c2", 1)), message("tool", "8")],
        [message("assistant", "x", 0, tool_calls=calls("c1", 2)), message("tool", "7")],
        [],
    ]
    words, others = message_keys(pa.array(rows, pa.list_(MESSAGE)))
    assert words[0] == words[1] != words[2]
    assert others[0] == others[2] != others[1]
    assert words[3] == others[3] == 0
