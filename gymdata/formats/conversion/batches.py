"""Files of another project as batches of rollouts.

Invariant: rows, ids, rejections and counts do not depend on how the rows are cut into batches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from gymdata.formats import format_named
from gymdata.formats.conversion.importing import Importing, Numbering, Rejected
from gymdata.rollouts.messages import TableRow
from gymdata.rollouts.schema import ROLLOUTS, TABLES, Table
from gymdata.store.columns import Batch, Fault
from gymdata.store.tables import row_parts
from gymdata.workers.tuning import rare_collections

if TYPE_CHECKING:
    from gymdata.store.paths import Source

#: About the bytes of a pair, which bounds how many are in memory as Python objects.
_PAIR_BYTES = 16_384


@dataclass(slots=True)
class Imported:
    """Rows of some files in their order, and what was found between them."""

    batch: pa.RecordBatch | None
    rejected: list[Rejected]
    #: For each row of the batch, its file and line.
    origins: list[tuple[Path, int]]


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads files in ``format``. ``columns``: field → column, as of ``--map``."""

    format: str
    run_id: str
    keep_contradicting: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, sources: Sequence[Source]) -> Iterator[Imported]:
        format, rejected, refused, base = format_named(self.format), list[Rejected](), set[int](), 0
        table = TABLES[format.table]
        numbering = Numbering(text=format.holds_text)
        importing = Importing(self.run_id, numbering, rejected.append, self.keep_contradicting, self.columns)
        order = {source.path: number for number, source in enumerate(sources)}
        with rare_collections():
            for part in _parts(format.read(sources, importing), table):
                if isinstance(part, Fault):
                    if part.row not in refused:
                        refused.add(part.row)
                        shown = json.dumps(part.value, ensure_ascii=False, default=str)[:1000]
                        origin = importing.origins[part.row - base]
                        rejected.append(Rejected(*origin, "S102", part.error().reason, shown))
                    continue
                batch = part.only(np.array([row not in refused for row in part.rows.tolist()]))
                origins = [importing.origins[row - base] for row in batch.rows.tolist()]
                done = int(part.rows[-1]) + 1
                del importing.origins[: done - base]
                base = done
                rejected.sort(key=lambda row: (order[row.file], row.line))
                yield Imported(batch.data if origins else None, rejected.copy(), origins)
                rejected.clear()
        yield Imported(None, rejected, [])


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
