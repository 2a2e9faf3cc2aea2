"""Files of other projects, validated as the rows that an import makes of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from gymdata.checks.violations import Violation
from gymdata.formats.conversion.batches import Reader
from gymdata.rollouts.failures import CANCELLED, MASKED, failures_in, short_reason
from gymdata.rollouts.ragged import Ints
from gymdata.rollouts.turn_columns import Evidence, from_arrow
from gymdata.store.formats import format_of
from gymdata.store.lines import iter_lines
from gymdata.store.paths import Source


def rows(source: Source) -> Iterator[tuple[pa.RecordBatch, Ints] | Violation]:
    """(batch, the 0-based number of each row's document in the file), and a violation for each row that is rejected."""
    format = format_of(source)
    assert format is not None
    # As other rows, without blank lines.
    lines = None if source.kind == "parquet" else np.fromiter((n for n, _ in iter_lines(source)), np.int64)
    # What is the same in two files of text is an example of each.
    reader = Reader(format.name, str(source.path) if format.holds_text else "")
    for part in reader([source]):
        for row in part.rejected:
            yield Violation(row.code, int(_numbers(lines, [row.line])[0]), detail=row.reason)
        if part.batch is not None:
            yield part.batch, _numbers(lines, [line for _, line in part.origins])


def _numbers(lines: Ints | None, of: list[int]) -> Ints:
    given = np.asarray(of, np.int64)
    return given - 1 if lines is None else np.searchsorted(lines, given)


def scan(source: Source) -> Iterator[Evidence | Violation]:
    """The rollouts of a file; an attempt that failed is none, and said (R501)."""
    for part in rows(source):
        if isinstance(part, Violation):
            yield part
            continue
        batch, numbers = part
        failures = failures_in(batch.column("extra"))
        failed = [row for row, failure in failures.items() if failure.get("kind") not in (MASKED, CANCELLED)]
        yield from (Violation("R501", int(numbers[row]), detail=short_reason(failures[row])) for row in failed)
        kept = np.setdiff1d(np.arange(len(batch)), failed)
        if len(kept):
            evidence = from_arrow(batch.take(pa.array(kept)) if failed else batch, 0)
            evidence.rows = numbers[kept]
            yield evidence
