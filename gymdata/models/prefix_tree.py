"""Sequences that begin alike as trees: each common beginning once, so that a model reads it once.

Invariants: every token of every sequence has exactly one node, and a node is one prefix: two tokens share it only if
everything before them is equal too. Nodes are in depth-first order, so token ``k`` comes before token ``j`` in some
sequence, or is it, exactly when ``k <= j < ends[k]``: that is the attention mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gymdata.rollouts.ragged import Array, Ints, Ragged, content_codes
from gymdata.rollouts.turns import common_prefix

#: What one pair of tokens costs in attention, as a share of what one token costs in the rest of a layer, is 1 in six times
#: the width: 4·h operations against 24·h² (projections 8·h², a feed-forward layer of four times the width 16·h²).
_WIDTHS_PER_PAIR = 6
#: Lengths of a row that are tried, in lengths of the largest tree.
_ROOM = (1.0, 1.25, 1.5, 2.0, 3.0)


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """R rows of at most T nodes each, every one int64 (R, T): ``ids``, ``positions`` in their sequence, and ``ends``, the
    end of each node's subtree in its row. A place that only fills up a row has id 0, position 0 and no descendant.

    ``nodes``: one array per sequence, the node of each of its tokens as a number in 0 … R·T − 1.
    """

    ids: Ints
    positions: Ints
    ends: Ints
    nodes: list[Ints]

    @property
    def tokens(self) -> int:
        """Nodes that are a token."""
        return len(np.unique(np.concatenate(self.nodes)))


def padded_cost(rows: int, length: int, width: int) -> float:
    """The cost of (rows, length) tokens with dense attention, for a model of hidden size ``width``, counted in
    tokens."""
    return rows * (length + length**2 / (_WIDTHS_PER_PAIR * width))


def prefix_tree(sequences: Sequence[Array], width: int, limit: int | None = None) -> PrefixTree:
    """The tree of ``sequences``, each a non-empty array of ids.

    Sequences are put into one tree as long as that is less to compute than a tree of their own, by the cost of a model of
    hidden size ``width`` with dense attention, and as long as the tree has at most ``limit`` tokens; so a short common
    beginning, such as a system message, may be there several times.
    """
    keys = [np.ascontiguousarray(ids, dtype=">u4").tobytes() for ids in sequences]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    trees: list[_Tree] = []
    previous: Array | None = None
    for number in order:
        sequence = sequences[number]
        shared = 0 if previous is None else common_prefix(previous, sequence)
        if not trees or not trees[-1].takes(len(sequence), shared, width, limit):
            trees.append(_Tree())
        trees[-1].add(number, sequence, shared)
        previous = sequence
    # In rows of one length: the largest tree's, or a longer one that leaves less room unused.
    largest = max(tree.size for tree in trees)
    rooms = {int(largest * factor) for factor in _ROOM if limit is None or largest * factor <= limit} | {largest}
    layouts = [_filled(trees, room) for room in sorted(rooms)]
    rows, length = min(layouts, key=lambda layout: padded_cost(len(layout[0]), layout[1], width))
    shape = len(rows), length
    ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    ends = np.tile(np.arange(1, length + 1), (len(rows), 1))
    nodes: list[Ints] = [np.empty(0, np.int64)] * len(sequences)
    for row, members in enumerate(rows):
        start = 0
        for tree in members:
            tree.write(ids[row], positions[row], ends[row], start)
            for number, path in tree.members:
                nodes[number] = path + (row * length + start)
            start += tree.size
    return PrefixTree(ids, positions, ends, nodes)


class _Tree:
    """A tree that grows by one sequence after another, in lexicographic order."""

    def __init__(self) -> None:
        self.size = 0
        self.members: list[tuple[int, Array]] = []
        self.ids: list[Array] = []
        self.positions: list[Array] = []
        self.ends: list[tuple[Array, int]] = []

    def takes(self, length: int, shared: int, width: int, limit: int | None) -> bool:
        """Whether a sequence of ``length`` whose first ``shared`` tokens are the last one's is cheaper here than alone."""
        if not shared:
            return False
        if not self.size:
            return True
        new = length - shared
        if limit is not None and self.size + new > limit:
            return False
        pairs = (self.size + new) ** 2 - self.size**2 - length**2
        return shared * _WIDTHS_PER_PAIR * width > pairs

    def add(self, number: int, ids: Array, shared: int) -> None:
        path = np.arange(len(ids)) + self.size
        shared = shared if self.members else 0
        path[shared:] -= shared
        if self.members:
            last = self.members[-1][1]
            path[:shared] = last[:shared]
            self.ends.append((last[shared:], self.size))
        self.ids.append(ids[shared:])
        self.positions.append(np.arange(shared, len(ids)))
        self.members.append((number, path))
        self.size += len(ids) - shared

    def write(self, ids: Ints, positions: Ints, ends: Ints, start: int) -> None:
        """Into one row of the layout, from place ``start``."""
        here = slice(start, start + self.size)
        ids[here], positions[here] = np.concatenate(self.ids), np.concatenate(self.positions)
        for nodes, end in [*self.ends, (self.members[-1][1], self.size)]:
            ends[nodes + start] = end + start


def _filled(trees: Sequence[_Tree], capacity: int) -> tuple[list[list[_Tree]], int]:
    """Rows of at most ``capacity`` tokens, the largest tree first into the first row with room; and the longest row."""
    rows: list[list[_Tree]] = []
    taken: list[int] = []
    for tree in sorted(trees, key=lambda t: -t.size):
        row = next((r for r, used in enumerate(taken) if used + tree.size <= capacity), len(rows))
        if row == len(rows):
            rows.append([])
            taken.append(0)
        rows[row].append(tree)
        taken[row] += tree.size
    return rows, max(taken)


def prompt_groups(token_ids: Ragged, mask: Ragged) -> Ints:
    """A number per sequence, the same for those whose ids before their first token with ``mask`` are equal: siblings."""
    return content_codes(token_ids.first(mask.first_nonzero()).keys())


def sibling_order(groups: Ints, lengths: Ints) -> Ints:
    """Row numbers, siblings side by side: the group with the longest sequence first, and so on within a group."""
    longest = np.zeros(int(groups.max()) + 1 if len(groups) else 0, np.int64)
    np.maximum.at(longest, groups, lengths)
    return np.asarray(np.lexsort((-lengths, groups, -longest[groups])), np.int64)
