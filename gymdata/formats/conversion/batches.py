"""Files of another project as batches of rollouts.

Invariant: rows, ids, rejections and counts do not depend on how the rows are cut into batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from gymdata.errors import DataError
from gymdata.formats import format_named
from gymdata.formats.conversion.importing import ODD, Importing, Numbering, Rejected
from gymdata.rollouts.messages import TableRow
from gymdata.rollouts.schema import ROLLOUTS, TABLES, Table
from gymdata.store.columns import build
from gymdata.store.tables import row_batches
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
        done = 0
        with rare_collections():
            try:
                for imported in self._read(sources, careful=False):
                    yield imported
                    done += 1
            except ODD:
                # Rows are turned into columns many at a time. Now each is tried alone, so that only unfit ones are lost.
                yield from islice(self._read(sources, careful=True), done, None)

    def _read(self, sources: Sequence[Source], *, careful: bool) -> Iterator[Imported]:
        format, rejected = format_named(self.format), list[Rejected]()
        table = TABLES[format.table]
        numbering = Numbering(text=format.holds_text)
        importing = Importing(self.run_id, numbering, rejected.append, None, self.keep_contradicting, self.columns)
        if careful:
            importing.check = lambda row: _refuse_unfit(row, table)
        rows = format.read(sources, importing)
        if (first := next(rows, None)) is not None:
            # Optional columns of pairs are there when our own pairs were exported with them.
            columns = [c for c in table.schema.names if table is ROLLOUTS or c not in table.optional or c in first[1]]
            # With about the bytes of the row's JSON.
            sized = (
                (line, row, 2000 + 12 * (row["n_context_tokens"] + row["n_generated_tokens"]))
                if table is ROLLOUTS
                else (line, row, _PAIR_BYTES)
                for line, row in chain([first], rows)
            )
            for batch in row_batches(sized, table, columns, f"imported {table.name}"):
                yield _taken(batch, importing, rejected)
        yield _taken(None, importing, rejected)


def _taken(batch: pa.RecordBatch | None, importing: Importing, rejected: list[Rejected]) -> Imported:
    """What was read since the last call."""
    imported = Imported(batch, rejected.copy(), importing.origins.copy())
    rejected.clear()
    importing.origins.clear()
    return imported


def _refuse_unfit(row: TableRow, table: Table) -> None:
    """Raises DataError, or what Arrow raises, for a row that cannot become columns."""
    try:
        build([row], table, [name for name in table.schema.names if name in row], "", [0])
    except DataError as error:
        # The row's file and line are reported beside the reason.
        raise DataError(error.reason) from error
