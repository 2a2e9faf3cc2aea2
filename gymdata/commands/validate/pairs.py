"""Validation of pairs files.

Invariants: rows keep their numbers, and one that is no pair hides no other.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gymdata.checks.codes.pairs import PairChecks
from gymdata.checks.violations import ValidationReport, Violation, rows_with_errors
from gymdata.commands.validate.scan import violation_of
from gymdata.rollouts.ragged import Ragged
from gymdata.rollouts.schema import PAIRS
from gymdata.store.columns import Fault
from gymdata.store.paths import Source
from gymdata.store.tables import batches

_BATCH_ROWS = 1_024


def validate_pairs(sources: Iterable[Source], vocab_size: int | None, report: ValidationReport) -> list[Violation]:
    """The violations of pairs, which are counted in ``report``: as its rollouts, with the tokens of their prompt, chosen and
    rejected ids."""
    checks = PairChecks(vocab_size)
    violations: list[Violation] = []
    with_ids: list[tuple[str, int]] = []
    for source in sources:
        file = str(source.path)
        for part in batches(source, PAIRS, batch_size=_BATCH_ROWS):
            if isinstance(part, Fault):
                violations.append(violation_of(part)._replace(file=file))
                if part.kind == "file":
                    break
                continue
            violations += checks.batch(part.data, part.rows, file)
            lists = [Ragged.of(part.data.column(f"{name}_ids")) for name in ("prompt", "chosen", "rejected")]
            has_ids = np.stack([ids.lengths for ids in lists]).all(axis=0)
            with_ids += ((file, row) for row in part.rows[has_ids].tolist())
            report.rollouts += len(part.rows)
            report.tokens += sum(len(ids.values) for ids in lists)
    bad = rows_with_errors(violations)
    report.trainable += sum(pair not in bad for pair in with_ids)
    return violations
