"""The proof that the tokens in the batches are the tokens in the file: a count and a checksum of trained tokens.

Invariants: a trained token is known by (sequence key, position in the whole sequence, token id); the checksum is
the sum mod 2⁶⁴ of xxh3_64 over those three, so it does not depend on order, batch size, padding, accumulation or how many
processes share the work, and parts add up to the whole. One id changed, one mask shifted by one, one sequence lost or
seen twice changes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import xxhash

from gymdata.commands.train.mapped import chunks, part_of
from gymdata.rollouts.ragged import Ragged

_U64 = np.uint64
_LOW = _U64(0xFFFFFFFF)
_32 = _U64(32)
#: XXH3's default secret at bytes 24 to 55, folded as the 9-to-16-byte case folds it (seed 0).
_FLIP_LOW = _U64(0x1F67B3B7A4A44072 ^ 0x78E5C0CC4EE679CB)
_FLIP_HIGH = _U64(0x2172FFCC7DD05A82 ^ 0x8E2443F7744608B8)
_PRIME_MX1 = _U64(0x165667919E3779F9)
#: Tokens hashed at once: keeps the temporaries in the cache.
_CHUNK = 1 << 15


class TokenFacts(TypedDict):
    """The checksum in hexadecimal: 64 bits do not survive every JSON reader."""

    count: int
    checksum: str


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """How many tokens are trained, and which. Adds up: the sum over parts is that of the whole."""

    count: int = 0
    checksum: int = 0

    def __add__(self, other: TrainedTokens) -> TrainedTokens:
        return TrainedTokens(self.count + other.count, (self.checksum + other.checksum) % 2**64)

    def as_json(self) -> TokenFacts:
        return {"count": self.count, "checksum": f"{self.checksum:016x}"}

    @classmethod
    def from_json(cls, facts: TokenFacts) -> TrainedTokens:
        return cls(int(facts["count"]), int(facts["checksum"], 16))

    def __str__(self) -> str:
        return f"{self.count:,} tokens, checksum {self.checksum:016x}"


def sequence_keys(names: Iterable[str]) -> np.ndarray:
    """One uint64 a sequence name (for a pair: ``"<pair_id>/chosen"``)."""
    return np.fromiter((xxhash.xxh3_64_intdigest(n.encode()) for n in names), dtype=np.uint64)


def token_hashes(keys: np.ndarray, positions: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """xxh3_64 of each 16-byte little-endian record (key u64, position u32, token id u32); all arrays of shape (n,).

    The same numbers as ``xxhash.xxh3_64(struct.pack("<QII", …))``, a few nanoseconds a token.
    """
    low = keys.astype(np.uint64, copy=False) ^ _FLIP_LOW
    high = (positions.astype(np.uint64) & _LOW) | ((ids.astype(np.uint64) & _LOW) << _32)
    high ^= _FLIP_HIGH
    acc = low.byteswap()
    acc += _U64(16)
    acc += high
    # Low half XOR high half of the 128-bit product, from four 32-bit products.
    a_low, a_high, b_low, b_high = low & _LOW, low >> _32, high & _LOW, high >> _32
    low_low = a_low * b_low
    high_low = a_high * b_low
    cross = (low_low >> _32) + (high_low & _LOW) + a_low * b_high
    upper = (high_low >> _32) + (cross >> _32) + a_high * b_high
    lower = (cross << _32) | (low_low & _LOW)
    acc += np.asarray(upper ^ lower)
    acc ^= acc >> _U64(37)
    acc *= _PRIME_MX1
    acc ^= acc >> _32
    return acc


def trained_tokens(keys: np.ndarray, positions: np.ndarray, ids: np.ndarray) -> TrainedTokens:
    """The proof of tokens given one by one; all arrays of shape (n,)."""
    total = 0
    for start in range(0, len(ids), _CHUNK):
        part = slice(start, start + _CHUNK)
        total += int(token_hashes(keys[part], positions[part], ids[part]).sum(dtype=np.uint64))
    return TrainedTokens(len(ids), total % 2**64)


def trained_tokens_by_sequence(keys: np.ndarray, ids: Ragged, mask: Ragged) -> tuple[np.ndarray, np.ndarray]:
    """(counts int64, checksums uint64), one per sequence.

    ``keys`` (n,); ``ids`` and ``mask`` have n lists. A position is counted from the start of its sequence. Sums of
    ``checksums`` wrap, as they must.
    """
    counts, sums = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.uint64)
    for rows in chunks(ids.offsets, _CHUNK):
        part = part_of(ids, rows)
        tokens = np.flatnonzero(part_of(mask, rows).values)
        owner = part.owner[tokens]
        hashes = token_hashes(keys[rows][owner], tokens - part.offsets[owner], part.values[tokens])
        counts[rows] = np.bincount(owner, minlength=len(part))
        np.add.at(sums[rows], owner, hashes)
    return counts, sums


def total(counts: np.ndarray, sums: np.ndarray) -> TrainedTokens:
    """The whole of what ``trained_tokens_by_sequence`` gave."""
    return TrainedTokens(int(counts.sum()), int(sums.sum(dtype=np.uint64)))
