"""Files of another project as batches of rollouts.

Invariant: rows, ids, rejections and counts do not depend on how the rows are cut into batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from gymdata.errors import DataError
from gymdata.formats import format_named
from gymdata.formats.conversion.importing import ODD, Importing, Numbering, Rejected, Unnumbered, rollout_id_of
from gymdata.rollouts.messages import TableRow
from gymdata.rollouts.schema import ROLLOUTS, TABLES, Table
from gymdata.store.columns import build
from gymdata.store.tables import row_batches
from gymdata.workers.tuning import rare_collections

if TYPE_CHECKING:
    from gymdata.store.paths import Source

#: Bytes of files that are read together, so that many small files do not become many small batches.
_JOB_BYTES = 64 << 20
#: About the bytes of a pair, which bounds how many are in memory as Python objects.
_PAIR_BYTES = 16_384


@dataclass(slots=True)
class Imported:
    """Rows of some files in their order, and what was found between them."""

    batch: pa.RecordBatch | None
    rejected: list[Rejected]
    #: What the index of each row that was read is determined by, rejected ones as well.
    hashes: list[tuple[bytes, str | None, str]]
    #: For each row of the batch, its number in ``hashes``; None for one that has an index of its own.
    keys: list[int | None]
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
        format, numbering, rejected = format_named(self.format), Unnumbered(), list[Rejected]()
        table = TABLES[format.table]
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
                yield _taken(batch, importing, numbering, rejected)
        yield _taken(None, importing, numbering, rejected)


def _taken(
    batch: pa.RecordBatch | None, importing: Importing, numbering: Unnumbered, rejected: list[Rejected]
) -> Imported:
    """What was read since the last call."""
    imported = Imported(
        batch,
        rejected.copy(),
        numbering.keys.copy(),
        importing.keys.copy(),
        importing.origins.copy(),
    )
    for gathered in (rejected, numbering.keys, importing.keys, importing.origins):
        gathered.clear()
    return imported


def _refuse_unfit(row: TableRow, table: Table) -> None:
    """Raises DataError, or what Arrow raises, for a row that cannot become columns."""
    try:
        build([row], table, [name for name in table.schema.names if name in row], "", [0])
    except DataError as error:
        # The row's file and line are reported beside the reason.
        raise DataError(error.reason) from error


def imported(reader: Reader, sources: Sequence[Source]) -> Iterator[Imported]:
    """What ``reader`` makes of the files, with the ids, groups and indices of all rows."""
    format = format_named(reader.format)
    numbering = Numbering(text=format.holds_text)
    job: list[Source] = []
    jobs: list[Sequence[Source]] = []
    size = _JOB_BYTES
    for source in sources:
        if size >= _JOB_BYTES:
            job, size = [], 0
            jobs.append(job)
        job.append(source)
        size += source.path.stat().st_size
    for part in (part for job in jobs for part in reader(job)):
        positions = [numbering.of_key(*key) for key in part.hashes]
        if part.batch is None:
            yield part
            continue
        yield replace(part, batch=_numbered(part, positions, reader.run_id))


def _numbered(part: Imported, positions: Sequence[tuple[str, int]], run_id: str) -> pa.RecordBatch:
    """The batch with the group and index of each row that has none of its own, and their ids."""
    batch = part.batch
    assert batch is not None
    names = ("rollout_id", "task_id", "group_id", "rollout_index")
    ids, tasks, groups, indices = (batch.column(name).to_pylist() for name in names)
    for row, key in enumerate(part.keys):
        if key is not None:
            group, index = positions[key]
            if ids[row] == rollout_id_of(run_id, part.hashes[key][1] or "", -1):
                ids[row] = rollout_id_of(run_id, group, index)
            if tasks[row] == groups[row]:
                tasks[row] = group
            groups[row] = group
            if indices[row] < 0:
                indices[row] = index
    numbered = dict(zip(names, (ids, tasks, groups, indices), strict=True))
    columns = [
        pa.array(numbered[field.name], field.type) if field.name in numbered else column
        for field, column in zip(batch.schema, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)
