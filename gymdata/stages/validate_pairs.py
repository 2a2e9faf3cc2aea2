"""Validation of pairs files.

What always holds: a file that is no pairs table is a violation with what the store says of it; rows keep their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from gymdata.core.pair_checks import PairChecks
from gymdata.core.schema import PAIRS
from gymdata.core.violations import Report, Selection, Violation, rows_with_errors
from gymdata.errors import DataError
from gymdata.store import scan_batches
from gymdata.store.paths import Source

if TYPE_CHECKING:
    import pyarrow as pa


def validate_pairs(sources: Iterable[Source], *, selection: Selection, vocab_size: int | None = None) -> Report:
    """The report over pairs; ``rollouts`` counts pairs, ``tokens`` their prompt, chosen and rejected ids."""
    report = Report()
    checks = PairChecks(vocab_size)
    found: list[Violation] = []
    with_ids: list[tuple[str, int]] = []
    for source in sources:
        file = str(source.path)
        row = 0
        try:
            for batch in scan_batches(source.path, PAIRS):
                found += (v._replace(file=file) for v in checks.batch(batch, row, file))
                with_ids += ((file, row + int(at)) for at in np.flatnonzero(_has_ids(batch)))
                row += len(batch)
                report.tokens += sum(_values(batch.column(f"{s}_ids")) for s in ("prompt", "chosen", "rejected"))
        except DataError as error:
            code = "S104" if "newer" in error.message else "S103" if "lacks the column" in error.message else "S101"
            found.append(Violation(code, row, detail=error.message, file=file))
        report.rollouts += row
    bad = rows_with_errors(found)
    report.trainable = sum(place not in bad for place in with_ids)
    report.violations = selection.apply(found)
    return report


def _has_ids(batch: pa.RecordBatch) -> np.ndarray:
    """(n,) whether a pair has ids of its prompt and both sides."""
    lists = (batch.column(f"{side}_ids") for side in ("prompt", "chosen", "rejected"))
    lengths = np.stack([np.diff(column.offsets.to_numpy()) for column in lists])
    return np.asarray((lengths > 0).all(axis=0))


def _values(lists: pa.ListArray) -> int:
    offsets = lists.offsets.to_numpy()
    return int(np.subtract(offsets[-1], offsets[0])) if len(offsets) else 0
