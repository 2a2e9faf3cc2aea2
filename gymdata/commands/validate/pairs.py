"""Validation of pairs files.

Invariants: rows keep their numbers, and one that is no pair hides no other.
"""

from __future__ import annotations

import numpy as np

from gymdata.checks.batches import Checks
from gymdata.checks.violations import ValidationReport
from gymdata.commands.validate.rollouts import CheckedFile
from gymdata.commands.validate.scan import violation_of
from gymdata.rollouts.ragged import Ragged
from gymdata.rollouts.schema import PAIRS
from gymdata.store.columns import Fault
from gymdata.store.paths import Source
from gymdata.store.tables import batches

_BATCH_ROWS = 1_024


def check_pairs(source: Source, checks: Checks, report: ValidationReport) -> CheckedFile:
    """What is found in a file of pairs, which are counted in ``report``: as its rollouts, with the tokens of their prompt,
    chosen and rejected ids."""
    file = CheckedFile(str(source.path))
    for part in batches(source, PAIRS, batch_size=_BATCH_ROWS):
        if isinstance(part, Fault):
            file.violations.append(violation_of(part)._replace(file=file.name))
            if part.kind == "file":
                break
            continue
        file.violations += checks.find_pairs(part.data, part.rows, file.name)
        lists = [Ragged.of(part.data.column(f"{name}_ids")) for name in ("prompt", "chosen", "rejected")]
        has_ids = np.stack([ids.lengths for ids in lists]).all(axis=0)
        file.with_ids.append(part.rows[has_ids])
        report.rollouts += len(part.rows)
        report.tokens += sum(len(ids.values) for ids in lists)
    return file
