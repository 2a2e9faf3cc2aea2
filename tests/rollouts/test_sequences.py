"""The batch form of cutting rollouts into sequences gives what the turn-by-turn definition gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymdata.errors import DataError
from gymdata.rollouts.sequences import stitch
from tests.definition import sequences
from tests.rollout_files import BRANCH, BREAK, SHAPES, Calls, column, rollout, rollouts_table, two_turns


@given(picked=st.lists(st.integers(0, len(SHAPES) - 1), min_size=1, max_size=8), drop=st.booleans())
@settings(max_examples=60, deadline=None)
def test_sequences_are_those_of_the_definition(picked: list[int], drop: bool) -> None:
    """Ids, masks, log-probs and turn starts of every sequence, for chains, breaks, branches, retries and empty rollouts."""
    abandoned = "drop" if drop else "keep"
    turns, ids = column([SHAPES[i] for i in picked])
    found = {}
    made = stitch(turns, ids, abandoned)
    assert len(made.sampled.logprobs.values) == made.is_trained.sum()
    for s in range(len(made)):
        found[int(made.rollout[s]), int(made.index[s])] = (
            made.token_ids[s].tolist(), made.loss_mask[s].tolist(), made.logprobs[s].tolist(), made.turn_starts[s].tolist(),
        )  # fmt: skip
    assert list(found) == sorted(found)
    expected = {}
    for row, encoded in enumerate(turns.to_pylist()):
        for number, one in enumerate(sequences(encoded, abandoned=abandoned)):
            expected[row, number] = (
                one.input_ids.tolist(), one.loss_mask.tolist(), one.logprobs.tolist(), one.turn_starts.tolist(),
            )  # fmt: skip
    assert found == expected


def test_sampled_tokens_stand_in_turn_order() -> None:
    """Over several sequences too: the k-th sampled token of a rollout is the k-th that the model wrote."""
    turns, ids = column([BRANCH])
    made = stitch(turns, ids)
    assert made.in_turn_order(made.token_ids.values[made.is_trained]).tolist() == [10, 2, 11, 2, 12, 2]
    assert made.sampled.turn_ends.tolist() == [2, 4, 6]


@given(picked=st.lists(st.integers(0, len(SHAPES) - 1), min_size=1, max_size=6), data=st.data())
@settings(max_examples=40, deadline=None)
def test_what_is_taken_or_restricted_keeps_its_numbers(picked: list[int], data: st.DataObject) -> None:
    """Numbers of sampled tokens reach the same tokens in some of the sequences, and where only some tokens are trained."""
    turns, ids = column([SHAPES[i] for i in picked])
    made = stitch(turns, ids)
    number = np.arange(1, len(made.sampled.logprobs.values) + 1)
    whole = made.to_sequences(number, np.int64)
    assert made.in_turn_order(whole.values[made.is_trained]).tolist() == number.tolist()
    rows = np.array(
        data.draw(st.lists(st.integers(0, max(len(made) - 1, 0)), unique=True)) if len(made) else [], np.int64
    )
    chosen = np.array([data.draw(st.booleans()) for _ in number], np.bool_)
    some = made.restricted(chosen).take(rows)
    for k, row in enumerate(rows.tolist()):
        kept = [n if n and chosen[n - 1] else 0 for n in whole[row].tolist()]
        assert some.to_sequences(number, np.int64)[k].tolist() == kept
        assert some.loss_mask[k].tolist() == [int(n > 0) for n in kept]
        assert some.token_ids[k].tolist() == made.token_ids[row].tolist()
        assert (some.rollout[k], some.index[k]) == (made.rollout[row], made.index[row])
        assert some.turn_starts[k].tolist() == made.turn_starts[row].tolist()


@pytest.mark.parametrize("calls", [two_turns(5, 40), BREAK])
def test_a_changed_turn_is_named_with_its_rollout(calls: Calls) -> None:
    """T209, in a chain and in a rollout with a break."""
    row = rollout("t", 0, 1.0, calls)
    row["turns"][0]["generation_token_ids"][:] = 99
    table = rollouts_table([row])
    with pytest.raises(DataError, match=r"T209.*t-0|t-0.*T209"):
        stitch(table["turns"].combine_chunks(), table["rollout_id"].combine_chunks())


@given(picked=st.lists(st.integers(0, len(SHAPES) - 1), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_prompts_stand_apart_where_asked(picked: list[int]) -> None:
    """What stands before the first generation and what follows are together the whole sequence, masks and all."""
    turns, ids = column([SHAPES[i] for i in picked])
    whole, apart = stitch(turns, ids), stitch(turns, ids, prompts_apart=True)
    assert apart.prompts is not None
    assert len(whole) == len(apart) == len(apart.prompts)
    for k in range(len(whole)):
        prompt = apart.prompts[k].tolist()
        assert prompt + apart.token_ids[k].tolist() == whole.token_ids[k].tolist()
        assert [0] * len(prompt) + apart.loss_mask[k].tolist() == whole.loss_mask[k].tolist()
        assert (apart.turn_starts[k] + len(prompt)).tolist() == whole.turn_starts[k].tolist()
