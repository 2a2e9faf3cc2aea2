"""The proof that what is trained is what the file holds: a count and checksums of trained tokens.

Invariants: a token is known by its sequence's key and its position in the whole sequence. The ids of trained tokens, those
of their context, and each column that a loss reads (log-prob, advantage, weight …) have a checksum of their own: the sum mod
2⁶⁴ of hashes of key, position and the value's bits. So it does not depend on order, batch size, padding, accumulation or how
many processes share the work, and parts add up to the whole. One value changed, one mask shifted by one, one sequence lost
or seen twice changes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import xxhash

from gymdata.rollouts.ragged import Array, Ragged, slices
from gymdata.rollouts.sequences import Sequences

#: The ids of trained tokens, and of all others that the model reads.
IDS, CONTEXT = "input_ids", "context_ids"
#: What a loss reads besides ids: a list with a number per token, a list with some numbers per trained token, or an array
#: with a number per row of training.
Columns = Mapping[str, "Ragged | Array"]
Hashes = npt.NDArray[np.uint64]
#: Tokens hashed at once: keeps the temporaries in the cache.
_CHUNK = 1 << 15


class TokenFacts(TypedDict):
    """``checksum``: of the ids; ``columns``: those of what the loss reads besides. In hexadecimal, as 64 bits do not survive
    every JSON reader."""

    count: int
    checksum: str
    columns: dict[str, str]


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """How many tokens are trained, and the checksum of each of their columns. Adds up: the sum over parts is that of the
    whole."""

    count: int = 0
    checksums: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: TrainedTokens) -> TrainedTokens:
        names = {**self.checksums, **other.checksums}
        sums = {name: (self.checksums.get(name, 0) + other.checksums.get(name, 0)) % 2**64 for name in names}
        return TrainedTokens(self.count + other.count, sums)

    def differing(self, other: TrainedTokens) -> list[str]:
        """The columns whose checksums are not those of ``other``."""
        return [name for name, value in self.checksums.items() if other.checksums.get(name) != value]

    def as_json(self) -> TokenFacts:
        columns = {name: f"{value:016x}" for name, value in self.checksums.items()}
        return {"count": self.count, "checksum": columns.pop(IDS, f"{0:016x}"), "columns": columns}

    @classmethod
    def from_json(cls, facts: TokenFacts) -> TrainedTokens:
        columns = {IDS: facts["checksum"], **facts["columns"]}
        return cls(int(facts["count"]), {name: int(value, 16) for name, value in columns.items()})

    def __str__(self) -> str:
        return f"{self.count:,} tokens, checksum {self.checksums.get(IDS, 0):016x}"


def sequence_keys(names: Iterable[str]) -> Hashes:
    """One uint64 a sequence name (for a pair: ``"<pair_id>/chosen"``)."""
    return np.fromiter((xxhash.xxh3_64_intdigest(n.encode()) for n in names), dtype=np.uint64)


def mixed(numbers: Hashes) -> Hashes:
    """The output function of splitmix64 (Steele, Lea, Flood 2014), in which every bit depends on every bit."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


def token_proofs(keys: Hashes, positions: Array) -> Hashes:
    """What tells a token from all others: a number of its sequence's key and its position, (n,)."""
    return mixed(keys ^ mixed(positions.astype(np.uint64)))


def hashes(proofs: Hashes, values: Array) -> Hashes:
    """A hash of each token's values, (n,) or (n, k): ids by number, all others by the bits of their float32."""
    ids = np.issubdtype(values.dtype, np.integer)
    bits = (
        values.astype(np.uint64) if ids else np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    )
    if bits.ndim == 1:
        return mixed(proofs ^ bits)
    ranks = np.arange(bits.shape[1], dtype=np.uint64)
    return np.asarray(mixed((proofs[:, None] + ranks) ^ bits).sum(axis=1, dtype=np.uint64))


def trained_tokens(proofs: Hashes, columns: Mapping[str, Array]) -> TrainedTokens:
    """The count and checksums of tokens, of each of which ``columns`` has the value or values."""
    sums = {name: int(hashes(proofs, values).sum(dtype=np.uint64)) for name, values in columns.items()}
    return TrainedTokens(len(proofs), sums)


def checksums_by_row(keys: Hashes, sequences: Sequences, columns: Columns, sides: int = 1) -> dict[str, Hashes]:
    """The checksum of each column (``IDS``, ``CONTEXT`` and those given) for each row of training, which is ``sides``
    sequences."""
    sums = {name: np.zeros(len(sequences), np.uint64) for name in (IDS, CONTEXT, *columns)}
    for rows in slices(sequences.token_ids.offsets, _CHUNK):
        ids = sequences.token_ids.part(rows)
        owner, trained = ids.owner, sequences.loss_mask.part(rows).values != 0
        proofs = token_proofs(keys[rows][owner], np.arange(len(owner)) - ids.offsets[owner])
        of_ids = hashes(proofs, ids.values)
        np.add.at(sums[IDS][rows], owner[trained], of_ids[trained])
        np.add.at(sums[CONTEXT][rows], owner[~trained], of_ids[~trained])
        for name, column in columns.items():
            if not isinstance(column, Ragged):
                values = column[(rows.start + owner[trained]) // sides]
            else:
                part = column.part(rows).values
                values = part[trained] if part.ndim == 1 else part
            np.add.at(sums[name][rows], owner[trained], hashes(proofs[trained], values))
    return {name: column.reshape(-1, sides).sum(axis=1, dtype=np.uint64) for name, column in sums.items()}
