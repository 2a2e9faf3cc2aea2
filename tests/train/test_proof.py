"""The proof of trained tokens: the same in any order and form, and sensitive to one token and to each value of it."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gymdata.commands.train.pair_data import NamedSequences
from gymdata.commands.train.token_checksum import (
    TrainedTokens,
    checksums_by_row,
    mixed,
    token_proofs,
    trained_tokens,
)
from gymdata.rollouts.ragged import Ragged

rows_of_tokens = st.lists(
    st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 1)), min_size=1, max_size=12), min_size=1, max_size=6
)
Rows = list[list[tuple[int, int]]]


def sequences_of(rows: Rows) -> NamedSequences:
    """Sequences s0, s1 … of (id, mask)."""
    ids = Ragged.of_arrays([[i for i, _ in row] for row in rows], np.int32)
    mask = Ragged.of_arrays([[m for _, m in row] for row in rows], np.int8)
    return NamedSequences(ids, mask, ids.like(ids.values.astype(np.float32) / 7), [f"s{i}" for i in range(len(rows))])


def whole(sequences: NamedSequences, sides: int = 1) -> dict[str, int]:
    sums = checksums_by_row(sequences.keys, sequences, {"logprobs": sequences.logprobs}, sides)
    return {name: int(column.sum(dtype=np.uint64)) for name, column in sums.items()}


def test_numbers_are_mixed_as_splitmix64_does() -> None:
    """From the state 1234567 the published generator gives these numbers."""
    states = np.array([1234567], np.uint64) + np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mixed(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(rows_of_tokens, st.randoms(use_true_random=False))
def test_order_and_form_do_not_matter(rows: Rows, random: Random) -> None:
    """Tokens one by one, shuffled and summed in parts, as batches have them, give the checksums of the file's lists."""
    sequences = sequences_of(rows)
    tokens = [(i, p) for i, row in enumerate(rows) for p, (_, trained) in enumerate(row) if trained]
    random.shuffle(tokens)
    total = TrainedTokens()
    for part in (tokens[::2], tokens[1::2]):
        owner, position = (np.array([token[k] for token in part], np.int64) for k in (0, 1))
        ids = np.array([rows[i][p][0] for i, p in part], np.int64)
        columns = {"input_ids": ids, "logprobs": ids.astype(np.int32).astype(np.float32) / 7}
        total += trained_tokens(token_proofs(sequences.keys[owner], position), columns)
    sums = whole(sequences)
    del sums["context_ids"]
    assert total == TrainedTokens(len(tokens), sums)


def test_one_value_one_shift_and_one_swap_change_what_they_are_of() -> None:
    """An id changes the checksum of ids or of their context, the last bit of a log-prob that of log-probs, a shifted mask
    and other names change all."""
    rows: Rows = [[(5, 0), (6, 1), (7, 1), (8, 0)], [(5, 0), (9, 1), (4, 0), (6, 1)]]
    sequences = sequences_of(rows)
    base = TrainedTokens(4, whole(sequences))

    def changed(**columns: object) -> list[str]:
        other = NamedSequences(**{**vars(sequences_of(rows)), **columns})  # type: ignore[arg-type]  # columns of its own
        return base.differing(TrainedTokens(4, whole(other)))

    flipped, prompt = sequences.token_ids.values.copy(), sequences.token_ids.values.copy()
    nudged = sequences.logprobs.values.copy()
    flipped[2] += 1
    prompt[0] += 1
    nudged[2] = np.nextafter(nudged[2], np.float32(9))
    shifted = np.array([0, 0, 1, 1, 0, 1, 0, 1], np.int8)
    assert changed() == []
    assert changed(token_ids=sequences.token_ids.like(flipped)) == ["input_ids"]
    assert changed(token_ids=sequences.token_ids.like(prompt)) == ["context_ids"]
    assert changed(logprobs=sequences.logprobs.like(nudged)) == ["logprobs"]
    assert changed(loss_mask=sequences.loss_mask.like(shifted)) == ["input_ids", "context_ids", "logprobs"]
    assert changed(names=["s1", "s0"]) == ["input_ids", "context_ids", "logprobs"]


def test_rows_have_their_numbers_and_their_heads() -> None:
    """A number per row is of each of its sides' tokens; of two numbers per trained token their order counts."""
    sequences = sequences_of([[(5, 0), (6, 1)], [(5, 0), (9, 1)]])
    head = Ragged(np.array([[1, 2], [3, 4]]), np.array([0, 1, 2]))
    pairs = checksums_by_row(sequences.keys, sequences, {"weight": np.array([0.5]), "top_ids": head}, sides=2)
    apart = checksums_by_row(sequences.keys, sequences, {"weight": np.array([0.5, 0.5]), "top_ids": head})
    assert all(pairs[name].tolist() == [int(apart[name].sum(dtype=np.uint64))] for name in pairs)
    turned = checksums_by_row(sequences.keys, sequences, {"top_ids": head.like(head.values[:, ::-1])})
    assert (turned["top_ids"] != apart["top_ids"]).all()
    assert not np.array_equal(
        checksums_by_row(sequences.keys, sequences, {"weight": np.array([0.25])}, 2)["weight"], pairs["weight"]
    )


def test_json_keeps_all_64_bits() -> None:
    """The proof survives JSON, whose numbers may not."""
    proof = TrainedTokens(3, {"input_ids": 2**64 - 1, "advantages": 2**63 + 1})
    assert TrainedTokens.from_json(proof.as_json()) == proof
    assert proof + TrainedTokens(1, {"input_ids": 2}) == TrainedTokens(4, {"input_ids": 1, "advantages": 2**63 + 1})
