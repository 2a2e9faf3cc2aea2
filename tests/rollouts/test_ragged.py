"""Lists of different lengths as flat values: every operation gives what it gives on plain lists."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymdata.rollouts.ragged import Ragged, content_codes, first_like, list_parts

LISTS = st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=6)


def of(lists: list[list[int]]) -> Ragged:
    return Ragged.of_arrays([np.array(one, np.int32) for one in lists], np.int32)


def plain(lists: Ragged) -> list[list[int]]:
    return [lists[i].tolist() for i in range(len(lists))]


@given(LISTS, st.data())
def test_operations_are_those_of_lists(lists: list[list[int]], data: st.DataObject) -> None:
    """Taking, cutting, interleaving, grouping, summing and locating."""
    ragged, n = of(lists), len(lists)
    rows = data.draw(st.lists(st.integers(0, n - 1), max_size=6))
    assert plain(ragged.take(np.array(rows, np.int64))) == [lists[row] for row in rows]
    at = [data.draw(st.integers(0, len(one))) for one in lists]
    heads, is_tail = ragged.first(np.array(at)), ~ragged.is_head(np.array(at))
    tails = ragged.only(is_tail, ragged.lengths - at)
    assert (plain(heads), plain(tails)) == ([x[:k] for x, k in zip(lists, at, strict=True)],
                                            [x[k:] for x, k in zip(lists, at, strict=True)])  # fmt: skip
    both, part = Ragged.interleaved([heads, tails, heads])
    assert plain(both) == [[*x, *x[:k]] for x, k in zip(lists, at, strict=True)]
    assert both.values[part == 1].tolist() == [v for x, k in zip(lists, at, strict=True) for v in x[k:]]
    cut = data.draw(st.integers(0, n))
    assert plain(ragged.grouped(np.array([0, cut, n]))) == [list(chain(*lists[:cut])), list(chain(*lists[cut:]))]
    assert ragged.sums(ragged.values).tolist() == [sum(one) for one in lists]
    assert ragged.owner.tolist() == [i for i, one in enumerate(lists) for _ in one]
    assert [ragged.locate(k) for k in range(len(ragged.values))] == [(i, p) for i, one in enumerate(lists)
                                                                     for p in range(len(one))]  # fmt: skip
    assert plain(Ragged.joined([ragged, ragged])) == lists * 2


@given(LISTS, st.integers(0, 3))
def test_arrow_columns_come_and_go(lists: list[list[int]], skip: int) -> None:
    """Also a slice, whose offsets do not begin at 0, in several chunks."""
    column = pa.array(lists, pa.list_(pa.int32())).slice(skip)
    assert plain(Ragged.of(pa.chunked_array([column, column]))) == lists[skip:] * 2
    assert Ragged.of(column).to_arrow().to_pylist() == lists[skip:]
    assert plain(Ragged.of(pa.chunked_array([], pa.list_(pa.int32())), np.int32)) == []


@given(LISTS)
def test_keys_are_equal_exactly_when_the_lists_are(lists: list[list[int]]) -> None:
    """64 and 128 bits; ``first_like`` gives the first of those that are equal."""
    ragged = of(lists)
    for keys in (ragged.hashes().tolist(), ragged.keys()):
        assert all((a == b) == (x == y) for a, x in zip(keys, lists, strict=True)
                   for b, y in zip(keys, lists, strict=True))  # fmt: skip
    assert first_like(content_codes(ragged.keys())).tolist() == [lists.index(one) for one in lists]


def test_null_lists_with_hidden_values_are_empty() -> None:
    """Arrow may keep values under a null list; they belong to nobody."""
    hidden = pa.ListArray.from_arrays(pa.array([0, 2, 3]), pa.array([7, 8, 9]), mask=pa.array([True, False]))
    offsets, values = list_parts(hidden)
    assert (offsets.tolist(), values.to_pylist()) == ([0, 0, 1], [9])


def test_more_tokens_than_arrow_counts_are_refused() -> None:
    """List offsets in files are int32."""
    from gymdata.errors import DataError

    values = np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), (2**31,), (0,))
    with pytest.raises(DataError, match="more than 2³¹"):
        Ragged(values, np.array([0, 2**31])).to_arrow()


def test_no_chunk_at_all_keeps_the_type() -> None:
    """A column without chunks, as a table that nothing was read into has, stays of its type."""
    column = pa.chunked_array([], pa.list_(pa.int32()))
    assert Ragged.of(column).to_arrow().type == column.type
