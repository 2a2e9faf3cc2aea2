"""Lists of different lengths as one array of values and the offsets of the lists; and keys of their contents.

Invariants: offsets are int64, begin at 0 and end at the number of values; a null list of a file is an empty one; lists with
equal content have equal keys. Lists with equal 128-bit keys are taken for equal: among 10⁹ different ones, the chance that
any two share a key is below 10⁻²⁰. Importing this needs no pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from gymdata.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Ragged:
    """n lists: list i is ``values[offsets[i]:offsets[i + 1]]``; ``offsets`` has shape (n + 1,)."""

    values: Array
    offsets: Ints

    @classmethod
    def of(cls, lists: pa.ListArray | pa.ChunkedArray, dtype: Any = None) -> Ragged:
        """The lists of an Arrow column; the values share its memory where it is one chunk without nulls."""
        chunks = [list_parts(chunk) for chunk in getattr(lists, "chunks", [lists])]
        parts = [cls(values.to_numpy(zero_copy_only=values.null_count == 0), offsets) for offsets, values in chunks]
        none = cls(np.empty(0, lists.type.value_type.to_pandas_dtype()), np.zeros(1, np.int64))
        joined = cls.joined(parts or [none])
        return joined if dtype is None else cls(joined.values.astype(dtype, copy=False), joined.offsets)

    @classmethod
    def of_arrays(cls, arrays: Sequence[npt.ArrayLike], dtype: Any) -> Ragged:
        values = np.concatenate(arrays).astype(dtype, copy=False) if len(arrays) else np.empty(0, dtype)
        return cls(values, offsets_of(np.fromiter(map(len, arrays), np.int64, len(arrays))))  # type: ignore[arg-type]  # arrays have lengths

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        """The lists of all ``parts`` (at least one), one part after the other."""
        if len(parts) == 1:
            return parts[0]
        values = np.concatenate([part.values for part in parts])
        return cls(values, offsets_of(np.concatenate([part.lengths for part in parts])))

    @classmethod
    def interleaved(cls, parts: Sequence[Ragged]) -> tuple[Ragged, npt.NDArray[np.int8]]:
        """One list per row: that of each part (all of n lists), one after the other; and the part that each value is of."""
        offsets = offsets_of(np.stack([part.lengths for part in parts], axis=1).ravel())
        part_of = np.repeat(np.tile(np.arange(len(parts), dtype=np.int8), len(parts[0])), np.diff(offsets))
        values = np.empty(len(part_of), parts[0].values.dtype)
        for number, part in enumerate(parts):
            values[part_of == number] = part.values
        return cls(values, offsets[:: len(parts)]), part_of

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> Array:
        return self.values[self.span(i)]

    def span(self, i: int) -> slice:
        """Where list i is in ``values``."""
        return slice(int(self.offsets[i]), int(self.offsets[i + 1]))

    @property
    def lengths(self) -> Ints:
        return np.diff(self.offsets)

    @property
    def owner(self) -> Ints:
        """The list of each value."""
        return self.spread(np.arange(len(self)))

    def spread(self, numbers: Array) -> Array:
        """One number per list → one per value."""
        return np.repeat(numbers, self.lengths)

    def sums(self, numbers: Array, dtype: Any = np.int64) -> Array:
        """The sum over each list of ``numbers``, one per value."""
        running = np.concatenate((np.zeros(1, dtype), np.cumsum(numbers, dtype=dtype)))
        return np.asarray(running[self.offsets[1:]] - running[self.offsets[:-1]])

    def locate(self, index: int) -> tuple[int, int]:
        """(list, position in it) of a value; lists may be empty."""
        i = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return i, int(index - self.offsets[i])

    def like(self, values: Array) -> Ragged:
        """Other values in lists of the same lengths."""
        return Ragged(values, self.offsets)

    def take(self, rows: Array) -> Ragged:
        """The lists at ``rows`` (int array), in that order."""
        if len(rows) == len(self) and np.array_equal(rows, np.arange(len(self))):
            return self
        indices, offsets = places(self.offsets[:-1][rows], self.lengths[rows])
        return Ragged(self.values[indices], offsets)

    def part(self, rows: slice) -> Ragged:
        """The lists of some rows side by side, without copying their values."""
        offsets = self.offsets[rows.start : rows.stop + 1]
        return Ragged(self.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])

    def is_head(self, n: Array) -> npt.NDArray[np.bool_]:
        """Which values are among the first ``n[i]`` of their list."""
        return np.repeat(np.tile(np.array([True, False]), len(self)), np.stack((n, self.lengths - n), axis=1).ravel())

    def only(self, chosen: npt.NDArray[np.bool_], lengths: Array) -> Ragged:
        """The values that are true in ``chosen``; ``lengths``: how many that are in each list."""
        return Ragged(self.values[chosen], offsets_of(lengths))

    def first(self, n: Array) -> Ragged:
        """The first ``n[i]`` values of each list."""
        return self.only(self.is_head(n), n)

    def padded(self, filler: float) -> Array:
        """The lists as rows of one array, (n, length of the longest), with ``filler`` behind the shorter ones."""
        rows = np.full((len(self), int(self.lengths.max(initial=0))), filler, self.values.dtype)
        owner = self.owner
        rows[owner, np.arange(len(owner)) - self.offsets[owner]] = self.values
        return rows

    def first_nonzero(self) -> Ints:
        """The index of the first nonzero value of each list; its length without one."""
        nonzero, first = np.flatnonzero(self.values), self.lengths
        begin = np.searchsorted(nonzero, self.offsets)
        has = begin[:-1] < begin[1:]
        first[has] = nonzero[begin[:-1][has]] - self.offsets[:-1][has]
        return first

    def grouped(self, bounds: Ints) -> Ragged:
        """Lists ``bounds[i]`` to ``bounds[i + 1]`` joined to one; ``bounds`` has all lists in it."""
        return Ragged(self.values, self.offsets[bounds])

    def to_arrow(self) -> pa.ListArray:
        """As an Arrow list array. Raises DataError above 2³¹ values, which its offsets cannot count."""
        import pyarrow as pa

        if len(self.values) > np.iinfo(np.int32).max:
            raise DataError("a batch holds more than 2³¹ tokens", hint="read it in smaller batches")
        return pa.ListArray.from_arrays(self.offsets.astype(np.int32), self.values)

    def hashes(self, seeds: Sequence[int] | None = None) -> npt.NDArray[np.uint64]:
        """A 64-bit hash of each list's bytes."""
        data, bounds, digest = self._bytes()
        if seeds is None:
            return np.array([digest(data[a:b]) for a, b in pairwise(bounds)], np.uint64)
        return np.array([digest(data[a:b], s) for (a, b), s in zip(pairwise(bounds), seeds, strict=True)], np.uint64)

    def keys(self) -> list[bytes]:
        """A 128-bit key of each list's bytes."""
        data, bounds, _ = self._bytes()
        return [xxhash.xxh3_128_digest(data[a:b]) for a, b in pairwise(bounds)]

    def _bytes(self) -> tuple[memoryview, list[int], Any]:
        return byte_view(self.values), (self.offsets * self.values.itemsize).tolist(), xxhash.xxh3_64_intdigest


def offsets_of(lengths: npt.ArrayLike) -> Ints:
    """Where lists of these lengths begin and end, one after the other: shape (n + 1,), from 0."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))


def places(begin: Array, lengths: Array) -> tuple[Ints, Ints]:
    """Every place from ``begin[i]`` on, ``lengths[i]`` of them, list by list; and the offsets of these lists."""
    offsets = offsets_of(lengths)
    return np.arange(offsets[-1]) + np.repeat(begin - offsets[:-1], lengths), offsets


def list_parts(array: Any) -> tuple[Ints, Any]:
    """Offsets from 0, and the flat Arrow values that they cut. A null list is an empty one."""
    offsets = array.offsets.to_numpy().astype(np.int64)
    values = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    if array.null_count:
        # Arrow allows values under a null list; they belong to no list.
        keep = array.is_valid().to_numpy(zero_copy_only=False)
        if (np.diff(offsets)[~keep] != 0).any():
            return list_parts(array.fill_null([]))
    return offsets - offsets[0], values


def slices(offsets: Ints, size: int) -> Iterator[slice]:
    """The lists between ``offsets`` in order as slices of about ``size`` values and at least one list each."""
    first, n = 0, len(offsets) - 1
    while first < n:
        last = max(first + 1, int(np.searchsorted(offsets, offsets[first] + size, side="right")) - 1)
        yield slice(first, last)
        first = last


def byte_view(array: Array) -> memoryview:
    """The array's memory as bytes, to be sliced without copying."""
    # An empty memoryview cannot be cast.
    return np.ascontiguousarray(array).view(np.uint8).data if len(array) else memoryview(b"")


def joined_keys(columns: Sequence[list[bytes]]) -> list[bytes]:
    """One key a row of several columns' keys."""
    return [b"".join(parts) for parts in zip(*columns, strict=True)]


def content_codes(keys: list[bytes] | pa.Array) -> Ints:
    """Keys as numbers from 0, as they first appear: rows have one number exactly when they have one key."""
    import pyarrow as pa

    encoded = (pa.array(keys, pa.binary()) if isinstance(keys, list) else keys).dictionary_encode()
    return np.asarray(encoded.indices.to_numpy(zero_copy_only=False), np.int64)


def first_like(*columns: Array) -> Ints:
    """The first row that has the same values as each row in all ``columns`` (at least one)."""
    order = np.lexsort(columns)
    same = np.zeros(len(order), np.bool_)
    same[1:] = np.logical_and.reduce([column[order[1:]] == column[order[:-1]] for column in columns])
    # Equal rows are adjacent, in their order.
    leader = np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))
    first = np.empty(len(order), np.int64)
    first[order] = order[leader]
    return first
