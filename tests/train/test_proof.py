"""The proof of trained tokens: exact against the hash library, and sensitive to one token."""

import struct
from random import Random

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from gymdata.commands.train.token_checksum import (
    TrainedTokens,
    sequence_keys,
    token_hashes,
    total,
    trained_tokens,
    trained_tokens_by_sequence,
)
from gymdata.rollouts.ragged import Ragged

sequences = st.lists(
    st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 1)), min_size=1, max_size=12), min_size=1, max_size=6
)


def ragged(rows: list[list[tuple[int, int]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    ids = np.array([i for row in rows for i, _ in row], np.int32)
    mask = np.array([m for row in rows for _, m in row], np.int8)
    starts = np.cumsum([0, *(len(row) for row in rows)])
    lists = Ragged(ids, starts)
    return sequence_keys(f"s{i}" for i in range(len(rows))), lists, lists.like(mask)


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1)), min_size=1))
def test_hashes_are_xxh3_of_the_packed_record(records: list[tuple[int, int, int]]) -> None:
    """Every hash is the one that the xxhash library gives for key, position and id packed little-endian."""
    keys, positions, ids = (
        np.array(column, kind)
        for column, kind in zip(zip(*records, strict=True), (np.uint64, np.int64, np.int32), strict=True)
    )
    expected = [xxhash.xxh3_64_intdigest(struct.pack("<QII", *record)) for record in records]
    assert token_hashes(keys, positions, ids).tolist() == expected


@given(sequences)
def test_ragged_and_padded_forms_agree(rows: list[list[tuple[int, int]]]) -> None:
    """A file's flat arrays and the (sequence, position, id) triples of padded batches give the same proof."""
    keys, ids, mask = ragged(rows)
    triples = [(i, p, t) for i, row in enumerate(rows) for p, (t, m) in enumerate(row) if m]
    which, positions, tokens = (np.array([t[k] for t in triples], np.int64) for k in range(3))
    assert total(*trained_tokens_by_sequence(keys, ids, mask)) == trained_tokens(keys[which], positions, tokens)


@given(sequences, st.randoms(use_true_random=False))
def test_order_and_batching_do_not_matter(rows: list[list[tuple[int, int]]], random: Random) -> None:
    """Shuffled tokens, summed in parts, give the whole's proof."""
    keys, ids, mask = ragged(rows)
    owner, starts = ids.owner, ids.offsets
    at = np.flatnonzero(mask.values)
    random.shuffle(at)  # type: ignore[arg-type]  # numpy arrays can be shuffled, too
    parts = [trained_tokens(keys[owner[p]], p - starts[owner[p]], ids.values[p]) for p in np.array_split(at, 3)]
    assert sum(parts, TrainedTokens()) == total(*trained_tokens_by_sequence(keys, ids, mask))


def test_one_id_one_shift_and_one_swap_are_seen() -> None:
    """Changing one id, shifting one mask by one, or swapping two sequences' names changes the checksum."""
    keys, ids, mask = ragged([[(5, 0), (6, 1), (7, 1), (8, 0)], [(5, 0), (9, 1), (4, 0), (6, 1)]])
    base = total(*trained_tokens_by_sequence(keys, ids, mask))
    flipped, shifted = ids.like(ids.values.copy()), mask.like(mask.values.copy())
    flipped.values[2] += 1
    shifted.values[:4] = [0, 0, 1, 1]
    for other in ((keys, flipped, mask), (keys, ids, shifted), (keys[::-1], ids, mask)):
        seen = total(*trained_tokens_by_sequence(*other))
        assert (seen.count, seen.checksum) != (base.count, base.checksum)
        assert seen.count == base.count


def test_json_keeps_all_64_bits() -> None:
    """The proof survives JSON, whose numbers may not."""
    proof = TrainedTokens(3, 2**64 - 1)
    assert TrainedTokens.from_json(proof.as_json()) == proof
    assert proof + TrainedTokens(1, 2) == TrainedTokens(4, 1)
