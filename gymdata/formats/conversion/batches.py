"""Files of another project as batches of rollouts.

Invariant: rows, ids, rejections and counts do not depend on how the rows are cut into batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from gymdata.formats.conversion.importing import BadItem, Importing, Origin
from gymdata.rollouts.messages import TableRow
from gymdata.rollouts.schema import ROLLOUTS, TABLES, Table
from gymdata.store.columns import Batch, Fault
from gymdata.store.tables import row_parts
from gymdata.workers.tuning import rare_collections

if TYPE_CHECKING:
    from gymdata.formats import Format
    from gymdata.store.paths import Source

#: About the bytes of a pair, which bounds how many are in memory as Python objects.
_PAIR_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Imported:
    """Rows of some files in their order."""

    batch: pa.RecordBatch
    origins: list[Origin]


def imported_batches(format: Format, sources: Sequence[Source], importing: Importing) -> Iterator[Imported]:
    """The rows of files; ``importing`` rejects those that cannot become columns."""
    table, refused, base = TABLES[format.table], set[int](), 0
    with rare_collections():
        for part in _parts(format.read(sources, importing), table):
            if isinstance(part, Fault):
                if part.row not in refused:
                    refused.add(part.row)
                    bad = BadItem("S102", part.error().reason)
                    importing.turn_down(bad, importing.origins[part.row - base], part.value)
                continue
            batch = part.only(np.array([row not in refused for row in part.rows.tolist()]))
            origins = [importing.origins[row - base] for row in batch.rows.tolist()]
            done = int(part.rows[-1]) + 1
            del importing.origins[: done - base]
            base = done
            if origins:
                yield Imported(batch.data, origins)


def _parts(rows: Iterator[tuple[int, TableRow]], table: Table) -> Iterator[Batch | Fault]:
    """(line, row) as batches, and what is wrong with rows that cannot become columns."""
    if (first := next(rows, None)) is None:
        return
    # Optional columns of pairs are there when our own pairs were exported with them.
    columns = [c for c in table.schema.names if table is ROLLOUTS or c not in table.optional or c in first[1]]
    # With about the bytes of the row's JSON.
    sized = (
        (line, row, 2000 + 12 * (row["n_context_tokens"] + row["n_generated_tokens"]))
        if table is ROLLOUTS
        else (line, row, _PAIR_BYTES)
        for line, row in chain([first], rows)
    )
    yield from row_parts(sized, table, columns, f"imported {table.name}")
