"""Tables of training data as parts of a few rows each, with what is seen only over all parts.

Invariants: the parts are the rows of ``read_table`` in its order, with the same columns; what would be refused of the whole
table is refused, after the last part at the latest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import xxhash

from gymdata.rollouts.schema import EXPERIENCES, Table
from gymdata.store import scan_batches
from gymdata.train.sequence_data import WEIGHTS, lacking_weights, sequence_names, twice

#: Rows of a part. A part takes about a hundred bytes a token while it is checked.
ROWS = 1024


def parts(source: str, table: Table, columns: Sequence[str], rows: int = ROWS) -> Iterator[tuple[int, pa.Table]]:
    """(number of its first row, part) of a path; one part without rows where there are none."""
    first = 0
    for batch in scan_batches(source, table, columns, rows):
        yield first, pa.Table.from_batches([batch])
        first += batch.num_rows
    if not first:
        yield 0, pa.schema([table.schema.field(name) for name in columns]).empty_table()


def experience_parts(source: str, columns: Sequence[str], rows: int = ROWS) -> Iterator[tuple[int, pa.Table]]:
    """``parts`` of experiences. Raises DataError for a sequence that is there twice, or a weight that some rows lack."""
    seen: list[np.ndarray] = []
    has: dict[str, bool] = {}
    for first, part in parts(source, EXPERIENCES, columns, rows):
        for name in set(WEIGHTS).intersection(part.column_names):
            lacking = part[name].null_count
            known = has.setdefault(name, not lacking) if part.num_rows else not lacking
            if lacking not in (0, len(part)) or known == bool(lacking):
                _refuse_missing(source, name)
        names = sequence_names(part)
        seen.append(
            np.frombuffer(b"".join(xxhash.xxh3_128_digest(name.encode()) for name in names), ">u8").reshape(-1, 2)
        )
        yield first, part
    keys = np.concatenate(seen)
    del seen
    keys = keys[np.lexsort(keys.T)]
    if (keys[1:] == keys[:-1]).all(axis=1).any():
        raise twice(source)


def _refuse_missing(source: str, name: str) -> None:
    """A column that some rows have and some do not."""
    columns = [batch.column(0) for batch in scan_batches(source, EXPERIENCES, [name], ROWS)]
    lacking, rows = (sum(counts) for counts in zip(*((c.null_count, len(c)) for c in columns), strict=True))
    raise lacking_weights(source, name, lacking, rows)


def distinct(source: str, table: Table, column: str) -> set[str]:
    """The values of a column of texts."""
    found: set[str] = set()
    for batch in scan_batches(source, table, [column]):
        found.update(batch.column(0).unique().to_pylist())
    return found
