"""Validation of pairs files.

Invariants: rows keep their numbers, and one that is no pair hides no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from gymdata.checks.codes.pairs import PairChecks
from gymdata.checks.violations import Selection, ValidationReport, Violation, rows_with_errors
from gymdata.commands.validate.foreign import rows
from gymdata.commands.validate.scan import violation_of
from gymdata.rollouts.ragged import Ints, Ragged
from gymdata.rollouts.schema import PAIRS
from gymdata.store.columns import Fault
from gymdata.store.formats import format_of
from gymdata.store.paths import Source
from gymdata.store.tables import batches

_BATCH_ROWS = 1_024


def validate_pairs(
    sources: Iterable[Source], *, selection: Selection, vocab_size: int | None = None
) -> ValidationReport:
    """The report over pairs; ``rollouts`` counts pairs, ``tokens`` their prompt, chosen and rejected ids."""
    report = ValidationReport()
    checks = PairChecks(vocab_size)
    violations: list[Violation] = []
    with_ids: list[tuple[str, int]] = []
    for source in sources:
        file = str(source.path)
        row = 0
        for part in _batches(source):
            if isinstance(part, Violation):
                violations.append(part._replace(file=file))
                continue
            batch, numbers = part
            found = checks.batch(batch, row, file)
            violations += (v._replace(file=file, row=int(numbers[v.row - row])) for v in found)
            lists = [Ragged.of(batch.column(f"{name}_ids")) for name in ("prompt", "chosen", "rejected")]
            has_ids = np.stack([ids.lengths for ids in lists]).all(axis=0)
            with_ids += ((file, int(number)) for number in numbers[has_ids])
            row += len(batch)
            report.tokens += sum(len(ids.values) for ids in lists)
        report.rollouts += row
    bad = rows_with_errors(violations)
    report.trainable = sum(pair not in bad for pair in with_ids)
    report.violations = selection.apply(violations)
    return report


def _batches(source: Source) -> Iterator[tuple[pa.RecordBatch, Ints] | Violation]:
    """(batch, the number of each of its rows), and violations for rows that are in none."""
    if format_of(source) is not None:
        yield from rows(source)
        return
    for part in batches(source, PAIRS, batch_size=_BATCH_ROWS):
        if isinstance(part, Fault):
            yield violation_of(part)
            if part.kind == "file":
                return
        else:
            yield part.data, part.rows
