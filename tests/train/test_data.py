"""Pairs as sequences: what is trained, what a length limit costs, and what is refused."""

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gymdata.commands.train.pair_data import PAIR_COLUMNS, sequences_of, training_pairs
from gymdata.commands.train.token_checksum import checksums_by_row
from gymdata.errors import DataError, RefusedError
from gymdata.rollouts.schema import PAIRS


def table(*rows: dict[str, Any]) -> pa.Table:
    base = {
        "margin": 1.0, "weight": 1.0, "policy_hash": "p", "temperature": 1.0, "prompt_ids": [1, 2],
        "chosen_ids": [3, 4, 5], "rejected_ids": [3, 4, 6, 7], "chosen_mask": [1, 0, 1], "rejected_mask": [1, 0, 1, 1],
        "chosen_logprobs": [-0.5, 0.0, -0.25], "rejected_logprobs": [-1.0, 0.0, -1.0, -1.0],
    }  # fmt: skip
    filled = [
        {"pair_id": f"p{i}", "chosen_rollout_id": f"c{i}", "rejected_rollout_id": f"r{i}", **base, **row}
        for i, row in enumerate(rows)
    ]
    return pa.table({n: pa.array([r.get(n) for r in filled], PAIRS.schema.field(n).type) for n in PAIR_COLUMNS})


def test_sides_are_interleaved_with_their_prompt() -> None:
    """Sequence 2i is prompt and chosen of pair i, 2i + 1 prompt and rejected; prompts are never trained."""
    pairs = training_pairs(
        table({}, {"prompt_ids": [9], "chosen_ids": [8], "chosen_mask": [1], "chosen_logprobs": [-2]})
    )
    rows = [pairs.lists("input_ids")[i].tolist() for i in range(4)]
    assert rows == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [9, 8], [9, 3, 4, 6, 7]]
    masks = [pairs.lists("loss_mask")[i].tolist() for i in range(4)]
    assert masks == [[0, 0, 1, 0, 1], [0, 0, 1, 0, 1, 1], [0, 1], [0, 1, 0, 1, 1]]
    assert sequences_of(pairs).n_trained.sum() == 2 + 3 + 1 + 3
    assert pairs.rollout_ids == ["c0", "r0", "c1", "r1"]


def test_slices_and_chunks_read_the_same() -> None:
    """A sliced, chunked table gives the sequences of a plain one."""
    rows = [{"prompt_ids": list(range(1, 2 + i))} for i in range(4)]
    whole = table(*rows)
    parts = pa.concat_tables([whole.slice(0, 1), whole.slice(1, 3)]).slice(1)
    plain = table(*rows).slice(1).combine_chunks()
    sequences = [sequences_of(training_pairs(given)) for given in (parts, plain)]
    of_parts, of_plain = (checksums_by_row(given.keys, given, {}) for given in sequences)
    assert of_parts["input_ids"].tolist() == of_plain["input_ids"].tolist()
    assert training_pairs(parts).table["name"].to_pylist() == ["p1", "p2", "p3"]


def test_a_length_limit_is_counted() -> None:
    """Cut, identical and emptied pairs are told apart, and lost trained tokens are added up."""
    longer = {"prompt_ids": [1, 2, 3, 4]}
    pairs = training_pairs(
        table({}, longer, {"chosen_ids": [3, 4], "chosen_mask": [1, 1], "chosen_logprobs": [-1, -1]}), 4
    )
    assert pairs.facts.cost.identical == ("p0", "p2")
    assert pairs.facts.cost.nothing_trained == ("p1",)
    assert len(pairs) == 0
    at_five = training_pairs(table({}, longer), 5)
    assert at_five.facts.cost.identical == ("p1",)
    assert (at_five.table["name"].to_pylist(), at_five.facts.cost.rows_cut) == (["p0"], 2)
    assert at_five.facts.cost.trained_tokens_lost == 10 - sequences_of(at_five).n_trained.sum()
    assert training_pairs(table({}), 6).facts.cost.rows_cut == 0


def test_cutting_and_taking_keep_content() -> None:
    """Cutting keeps each sequence's beginning; taking keeps what was asked for, in that order."""
    sequences = sequences_of(training_pairs(table({}, {"prompt_ids": [9]})))
    cut = sequences.cut(3)
    assert [cut.token_ids[i].tolist() for i in range(4)] == [[1, 2, 3], [1, 2, 3], [9, 3, 4], [9, 3, 4]]
    taken = sequences.take(np.array([3, 0]))
    assert taken.names == ["p1/rejected", "p0/chosen"]
    assert taken.token_ids.values.tolist() == [9, 3, 4, 6, 7, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("row", "error", "says"),
    [
        ({"rejected_ids": [3, 4, 5], "rejected_mask": [1, 0, 1], "rejected_logprobs": [0, 0, 0]}, RefusedError, "P601"),
        ({"prompt_ids": []}, RefusedError, "T205"),
        ({"chosen_mask": [0, 0, 0]}, RefusedError, "T205"),
        ({"chosen_mask": [1, 1]}, DataError, "chosen_mask has 2 entries"),
        ({"chosen_logprobs": [0.0]}, RefusedError, "L301: .*chosen_logprobs has 1"),
        ({"chosen_logprobs": [math.nan, 0.0, -1.0]}, RefusedError, "L302: pairs: pair p1/chosen"),
        ({"rejected_logprobs": [-1.0, 0.0, -1.0, 0.5]}, RefusedError, "L303: pairs: pair p1/rejected"),
        ({"rejected_ids": [3, 4, -5, 6]}, RefusedError, "T206: pairs: pair p1/rejected"),
        ({"chosen_mask": [1, 2, 1]}, DataError, "holds 2"),
        ({"weight": float("nan")}, DataError, "weight: got nan"),
        ({"weight": -1.0}, DataError, "weight: got -1.0"),
        ({"margin": float("inf")}, DataError, "margin: got inf"),
    ],
)
def test_rows_that_must_not_be_trained(row: dict[str, Any], error: type[Exception], says: str) -> None:
    """A row without tokens, with equal sides or with lists that disagree is refused and named."""
    with pytest.raises(error, match=says) as caught:
        training_pairs(table({}, row))
    assert "p1" in str(caught.value)
