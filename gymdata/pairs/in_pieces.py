"""The contents of candidates, computed from parts of Parquet files by several processes.

Invariants: batches, and what is in them, are those of one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gymdata.errors import DataError
from gymdata.pairs.contents import COLUMNS, contents
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import resolve
from gymdata.store.objects.streams import parquet_file
from gymdata.store.paths import Source
from gymdata.store.tables import scan_source
from gymdata.workers.arrow import packed, unpacked
from gymdata.workers.pieces import name_of, pieces
from gymdata.workers.processes import in_order

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Contents:
    """The ``contents`` of batches of rollouts. ``where``: names them in errors."""

    agents: Collection[str]
    where: str
    vocab_size: int | None
    rendered: bool
    batch_rows: int

    def of(self, batch: pa.RecordBatch) -> pa.Table:
        return contents(batch, self.agents, where=self.where, vocab_size=self.vocab_size, rendered=self.rendered)

    def __call__(self, piece: tuple[Source, Mask]) -> list[tuple[bytes, bytes | None]]:
        """In a worker: the ids of each batch of a part, and the contents of its rows that are true in the mask."""
        source, needed = piece
        at, made = 0, []
        for batch in scan_source(source, ROLLOUTS, COLUMNS, self.batch_rows):
            mine, at = needed[at : at + batch.num_rows], at + batch.num_rows
            ids = packed(pa.table({"rollout_id": batch.column("rollout_id")}))
            kept = batch if mine.all() else batch.filter(pa.array(mine))
            made.append((ids, packed(self.of(kept)) if kept.num_rows else None))
        return made


def in_pieces(
    path: str | Path, work: Contents, needed: Mask, workers: int
) -> Iterator[tuple[pa.Array, pa.Table | None]] | None:
    """The ids of each batch under ``path``, and the contents of its rows that are true in ``needed``, which begins with
    the first of them; None for what cannot be divided. Raises DataError when these are not the rows of ``needed``."""
    found = _divided(path, needed) if workers > 1 else None
    return None if found is None else _made(work, found, workers)


def _made(
    work: Contents, found: Sequence[tuple[Source, Mask]], workers: int
) -> Iterator[tuple[pa.Array, pa.Table | None]]:
    with contextlib.closing(in_order(work, found, workers, lambda piece: name_of(piece[0]))) as done:
        for batches in done:
            for ids, table in batches:
                names = unpacked(ids)["rollout_id"].combine_chunks()
                yield names, None if table is None else unpacked(table)


def _divided(path: str | Path, needed: Mask) -> list[tuple[Source, Mask]] | None:
    """Parts, each with its needed rows. Rows beyond ``needed`` were added later, and are not needed."""
    files = resolve(path, ROLLOUTS)
    if any(file.kind != "parquet" for file in files):
        return None
    found, first = [], 0
    for file in files:
        try:
            with parquet_file(file.path) as opened:
                rows = opened.metadata.num_rows
        except (pa.ArrowException, OSError):
            # Reading it in order says what is wrong.
            return None
        parts = list(pieces([file], ROLLOUTS))
        starts = [part.part.rows if part.part is not None else 0 for part in parts]
        for part, (start, end) in zip(parts, pairwise([*starts, rows]), strict=True):
            mask = np.zeros(end - start, np.bool_)
            known = needed[first + start : first + end]
            mask[: len(known)] = known
            found.append((part, mask))
        first += rows
    return found


def refuse_changed(path: str | Path, was: Mask, now: Mask) -> None:
    """Raises DataError when other rows of a batch are needed than a worker was given."""
    if not np.array_equal(was, now):
        raise DataError(f"{path}: changed while it was read", hint="run the command again")
