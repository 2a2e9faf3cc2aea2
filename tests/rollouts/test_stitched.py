"""The batch form of cutting rollouts into sequences gives what the turn-by-turn definition gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymdata.errors import DataError, RefusedError
from gymdata.rollouts import turns as tokens
from gymdata.rollouts.sequences import stitch
from tests.rollout_files import rollout, rollouts_table, two_turns
from tests.rollout_shapes import BRANCH, BREAK, SHAPES, column


@given(picked=st.lists(st.integers(0, len(SHAPES) - 1), min_size=1, max_size=8), drop=st.booleans())
@settings(max_examples=60, deadline=None)
def test_sequences_are_those_of_the_definition(picked: list[int], drop: bool) -> None:
    """Ids, masks, log-probs and turn starts of every sequence, for chains, breaks, branches, retries and empty rollouts."""
    abandoned = "drop" if drop else "keep"
    turns, ids = column([SHAPES[i] for i in picked])
    found = {}
    for part in stitch(turns, ids, abandoned):
        logprobs = part.scatter_to_tokens(part.log_probs)
        assert part.offsets[-1] == len(part.log_probs) == part.mask.sum()
        for s in range(len(part.rollout)):
            span = slice(part.starts[s], part.starts[s + 1])
            starts = part.turn_starts[part.turn_bounds[s] : part.turn_bounds[s + 1]]
            found[int(part.rollout[s]), int(part.index[s])] = (
                part.ids[span].tolist(), part.mask[span].tolist(), logprobs[span].tolist(), starts.tolist(),
            )  # fmt: skip
    expected = {}
    for row, encoded in enumerate(turns.to_pylist()):
        for number, one in enumerate(tokens.sequences(encoded, abandoned=abandoned)):
            expected[row, number] = (
                one.input_ids.tolist(), (one.loss_mask == 1).tolist(), one.logprobs.tolist(), one.turn_starts.tolist(),
            )  # fmt: skip
    assert found == expected


def test_sampled_tokens_stand_in_turn_order() -> None:
    """Over several sequences too: the k-th sampled token of a rollout is the k-th that the model wrote."""
    turns, ids = column([BRANCH])
    (part,) = stitch(turns, ids)
    order = np.empty(len(part.log_probs), np.int32)
    order[part.source] = part.ids[part.mask]
    assert order.tolist() == [10, 2, 11, 2, 12, 2]
    assert part.turn_ends.tolist() == [2, 4, 6]


def test_changed_and_missing_evidence_is_named() -> None:
    """A changed id is T209 with its rollout; a turn without log-probs is L301; a NaN is L302."""
    rows = [rollout("t", 0, 1.0, two_turns(5, 40)), rollout("t", 1, 1.0, BREAK)]
    for row in rows:
        changed = {**row, "turns": [{**row["turns"][0], "generation_token_ids": [99] * len(row["turns"][0]
                   ["generation_token_ids"])}, *row["turns"][1:]]}  # fmt: skip
        table = rollouts_table([changed])
        with pytest.raises(DataError, match=rf"T209.*{row['rollout_id']}|{row['rollout_id']}.*T209"):
            stitch(table["turns"].combine_chunks(), table["rollout_id"].combine_chunks())
    bare = {**rows[0], "turns": [{**turn, "generation_log_probs": []} for turn in rows[0]["turns"]]}
    table = rollouts_table([rows[1], bare])
    with pytest.raises(RefusedError, match="L301: rollout t-0"):
        stitch(table["turns"].combine_chunks(), table["rollout_id"].combine_chunks())
    nan = {**rows[0], "turns": [{**t, "generation_log_probs": [np.nan] * len(t["generation_log_probs"])}
                                for t in rows[0]["turns"]]}  # fmt: skip
    table = rollouts_table([nan])
    with pytest.raises(RefusedError, match="L302: rollout t-0"):
        stitch(table["turns"].combine_chunks(), table["rollout_id"].combine_chunks())
