"""Rows that hold the same content, found by a 128-bit hash of what they hold.

Invariants: rows with equal content have equal keys. Rows with equal keys are taken for equal: among 10⁹ different
rows, the chance that any two share an xxh3_128 is below 10⁻²⁰.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

Mask = npt.NDArray[np.bool_]


def content_keys(lists: Any) -> list[bytes]:
    """16 bytes for each list of fixed-width numbers (an Arrow list array; a null list counts as an empty one)."""
    column = lists.combine_chunks() if isinstance(lists, pa.ChunkedArray) else lists
    values = column.flatten().to_numpy(zero_copy_only=False)
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return ragged_keys(values, np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))


def ragged_keys(values: np.ndarray, starts: np.ndarray) -> list[bytes]:
    """``content_keys`` of flat ``values``, row i being ``values[starts[i]:starts[i + 1]]``."""
    width = values.dtype.itemsize
    data = np.ascontiguousarray(values).view(np.uint8).data if len(values) else memoryview(b"")
    bounds = (starts * width).tolist()
    digest = xxhash.xxh3_128_digest
    return [digest(data[a:b]) for a, b in pairwise(bounds)]


def joined_keys(columns: Sequence[list[bytes]]) -> list[bytes]:
    """One key a row of several columns' keys."""
    return [b"".join(parts) for parts in zip(*columns, strict=True)]


def content_codes(keys: list[bytes]) -> npt.NDArray[np.int64]:
    """Keys as numbers from 0: rows have one number exactly when they have one key."""
    encoded = pa.array(keys, pa.binary()).dictionary_encode()
    return np.asarray(encoded.indices.to_numpy(zero_copy_only=False), np.int64)


def repeats(codes: npt.NDArray[np.int64]) -> Mask:
    """Which rows have a number that an earlier row has."""
    result = np.ones(len(codes), np.bool_)
    result[np.unique(codes, return_index=True)[1]] = False
    return result
