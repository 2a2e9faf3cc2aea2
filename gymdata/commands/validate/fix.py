"""Writing a repaired copy of native rollouts: clean rows as they are, faulty ones split, shortened or left out.

Invariants: the source is never written to; the copy validates without errors; the report counts every row that went
in.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from gymdata.checks import repair
from gymdata.checks.violations import ValidationReport, Violation
from gymdata.rollouts.messages import RolloutRow
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.turn_columns import from_arrow
from gymdata.store.columns import Batch, build, to_rows
from gymdata.store.lines import decode, encode
from gymdata.store.paths import Source
from gymdata.store.tables import batches

_BATCH_ROWS = 4096


def fixed_rollouts(
    sources: Sequence[Source], report: ValidationReport, choice: repair.Choice, account: repair.FixReport
) -> Iterator[pa.RecordBatch]:
    """The repaired rollouts of ``sources``, whose validation gave ``report``; counts in ``account``.

    Raises DataError when a whole file cannot be read, for what it held cannot be counted.
    """
    # The errors of each row of each file.
    faults: dict[str, dict[int, list[Violation]]] = defaultdict(lambda: defaultdict(list))
    for v in report.violations:
        if v.severity == "error":
            faults[v.file or ""][v.row].append(v)
    for source in sources:
        faulty_rows = faults.get(str(source.path), {})
        unreadable = {row for row, violations in faulty_rows.items() if any(v.code.startswith("S") for v in violations)}
        for part in _readable(source, unreadable):
            batch, rows = part.data, part.rows.tolist()
            account.rollouts_in += len(batch)
            faulty = [i for i, row in enumerate(rows) if row in faulty_rows]
            start = 0
            for i in faulty:
                if i > start:
                    account.rollouts_out += i - start
                    yield batch.slice(start, i - start)
                start = i + 1
                repaired = _rollout(batch.slice(i, 1), faulty_rows[rows[i]], choice, account)
                if repaired:
                    account.rollouts_out += len(repaired)
                    # Through JSON, which is what builds a batch from rows.
                    lines = [decode(encode(row)) for row in repaired]
                    yield build(lines, ROLLOUTS, ROLLOUTS.schema.names, "repaired rollouts", list(range(len(repaired))))
            if start < len(batch):
                account.rollouts_out += len(batch) - start
                yield batch.slice(start)
        account.rows_unreadable += len(unreadable)


def _readable(source: Source, unreadable: set[int]) -> Iterator[Batch]:
    """The rows of a file without those that are ``unreadable``, to which rows that do not fit are added, and without the
    keys that the table does not have."""
    for part in batches(source, ROLLOUTS, batch_size=_BATCH_ROWS):
        if isinstance(part, Batch):
            sound = part.only(~np.isin(part.rows, list(unreadable)))
            if len(sound.rows):
                yield sound
        elif part.kind == "file":
            raise part.error()
        elif part.kind == "row":
            unreadable.add(part.row)


def _rollout(
    batch: pa.RecordBatch, faults: list[Violation], choice: repair.Choice, account: repair.FixReport
) -> list[RolloutRow]:
    account.rollouts_with_errors += 1
    for code, n in Counter(v.code for v in faults).items():
        account.by_code[code] = account.by_code.get(code, 0) + n
    evidence = from_arrow(batch, 0)
    turns = evidence.turns.structs(0)
    sizes = [len(t["generation_token_ids"]) for t in turns]
    expandable = all(v.code not in ("T209", "T210", "T205") for v in faults)
    roots = repair.chain_roots(turns) if turns and expandable else None
    plans = {c: repair.plan(len(turns), roots, faults, c) for c in repair.CHOICES}
    for name, keep in plans.items():
        account.costs[name].count(sizes, keep)
    if not plans[choice]:
        return []
    (row,) = to_rows(batch)
    extra = json.loads(row["extra"] or "{}")
    extra["fixed"] = {"choice": choice, "rollout_id": row["rollout_id"], "codes": sorted({v.code for v in faults})}
    unread, rows = extra.get("unread_turns"), []
    for repaired, part in zip(repair.parts_of(row, plans[choice]), plans[choice], strict=True):
        if unread is not None:
            # Turns have other numbers in a part.
            extra["unread_turns"] = [n for n, turn in enumerate(part) if turn in unread]
        rows.append({**repaired, "extra": json.dumps(extra)})
    return rows
