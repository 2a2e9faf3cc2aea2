"""Sequences that begin alike become trees with each common beginning once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gymdata.models.prefix_tree import padded_cost, prefix_tree, prompt_groups, sibling_order
from gymdata.rollouts.ragged import Ragged

#: So wide a model that sharing one token always pays.
WIDE = 2**40


def arrays(*lists: list[int]) -> list[np.ndarray]:
    return [np.array(one, np.int32) for one in lists]


def test_two_completions_of_a_prompt_hold_the_prompt_once():
    """Ids, positions and subtree ends of [1, 2, 3] and [1, 2, 4, 5]; each token knows its node."""
    tree = prefix_tree(arrays([1, 2, 3], [1, 2, 4, 5]), WIDE)
    assert tree.ids.tolist() == [[1, 2, 3, 4, 5]]
    assert tree.positions.tolist() == [[0, 1, 2, 2, 3]]
    assert tree.ends.tolist() == [[5, 5, 3, 5, 5]]
    assert [nodes.tolist() for nodes in tree.nodes] == [[0, 1, 2], [0, 1, 3, 4]]


def test_an_equal_sequence_and_a_beginning_of_one_need_no_node():
    """[1, 2] and a second [1, 2, 3] lie wholly in the nodes of [1, 2, 3]."""
    tree = prefix_tree(arrays([1, 2, 3], [1, 2], [1, 2, 3]), WIDE)
    assert tree.tokens == 3
    assert [nodes.tolist() for nodes in tree.nodes] == [[0, 1, 2], [0, 1], [0, 1, 2]]


def test_sequences_with_nothing_in_common_share_a_row_where_it_has_room():
    """Trees of 4, 2 and 2 tokens fill two rows of 4."""
    tree = prefix_tree(arrays([1, 1, 1, 1], [2, 2], [3, 3]), WIDE)
    assert tree.ids.tolist() == [[1, 1, 1, 1], [2, 2, 3, 3]]
    assert tree.ends.tolist() == [[4, 4, 4, 4], [2, 2, 4, 4]]


def test_a_short_common_beginning_is_not_worth_a_long_row():
    """Two sequences of 100 that share their first token are two trees for a narrow model."""
    long = [list(range(start, start + 99)) for start in (100, 500)]
    assert prefix_tree(arrays(*([7, *rest] for rest in long)), width=8).ids.shape == (2, 100)
    assert prefix_tree(arrays(*([7, *rest] for rest in long)), width=WIDE).ids.shape == (1, 199)


def test_a_tree_stays_within_the_limit():
    """Three completions of two tokens after a prompt of four: with at most 8 tokens the third begins a tree of its own."""
    lists = arrays(*([1, 2, 3, 4, n, n] for n in (5, 6, 7)))
    assert prefix_tree(lists, WIDE).ids.shape == (1, 10)
    assert prefix_tree(lists, WIDE, limit=8).ids.shape == (2, 8)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8),
    st.sampled_from([1, 64, WIDE]),
    st.one_of(st.none(), st.integers(1, 20)),
)
def test_each_token_attends_to_itself_and_what_stands_before_it(lists: list[list[int]], width: int, limit: int | None):
    """The nodes spell the sequence at its positions, and the mask lets each see exactly the nodes up to it."""
    tree = prefix_tree(arrays(*lists), width, limit)
    place = np.arange(tree.ids.shape[1])
    mask = (place <= place[:, None]) & (place[:, None] < tree.ends[:, None, :])
    for ids, nodes in zip(lists, tree.nodes, strict=True):
        row, at = np.divmod(nodes, len(place))
        assert tree.ids[row, at].tolist() == ids
        assert tree.positions[row, at].tolist() == list(range(len(ids)))
        assert len(set(row.tolist())) == 1
        for count, node in enumerate(at, 1):
            assert np.flatnonzero(mask[row[0], node]).tolist() == at[:count].tolist()
    assert mask[:, place, place].all()


def test_the_cost_of_attention_grows_with_the_square():
    """One row of 12 tokens in a model of width 2 costs 12 + 144 / 12 tokens."""
    assert padded_cost(1, 12, width=2) == 24
    assert padded_cost(3, 12, width=2) == 72


def test_siblings_are_sequences_with_one_prompt():
    """What comes before the first trained token decides; the group with the longest sequence is first."""
    ids = Ragged.of_arrays([[1, 2, 5], [9, 6, 6, 6], [1, 2, 7, 7]], np.int32)
    mask = Ragged.of_arrays([[0, 0, 1], [0, 1, 1, 0], [0, 0, 1, 1]], np.int8)
    groups = prompt_groups(ids, mask)
    assert groups.tolist() == [0, 1, 0]
    assert sibling_order(groups, ids.lengths).tolist() == [2, 0, 1]
    assert sibling_order(groups, np.array([3, 9, 4])).tolist() == [1, 2, 0]


def test_a_sequence_without_a_trained_token_is_all_prompt():
    """Two of them are siblings when they are equal."""
    ids = Ragged.of_arrays([[1, 2], [1, 2], [1, 2, 3]], np.int32)
    assert prompt_groups(ids, ids.like(np.zeros(7, np.int8))).tolist() == [0, 0, 1]
