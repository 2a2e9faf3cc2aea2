"""Writing a repaired copy of native rollouts: clean rows as they are, faulty ones split, shortened or left out.

Invariants: the source is never written to; the copy validates without errors; the report counts every row that went
in.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import pyarrow as pa

from gymdata.checks import repair
from gymdata.checks.violations import ValidationReport, Violation
from gymdata.commands.validate.json_rows import take_unknown
from gymdata.errors import DataError
from gymdata.rollouts.messages import JsonObject, RolloutRow
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.turn_columns import from_arrow
from gymdata.store import scan_batches
from gymdata.store.columns import build, to_rows
from gymdata.store.journal import lines_of
from gymdata.store.lines import decode, encode
from gymdata.store.paths import Source
from gymdata.store.tables import row_batches

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
    # The files of rows with keys that the table does not have, which only a warning names.
    strange = {v.file for v in report.violations if v.code == "S102" and v.severity == "warning"}
    for source in sources:
        faulty_rows = faults.get(str(source.path), {})
        unreadable = {row for row, violations in faulty_rows.items() if any(v.code.startswith("S") for v in violations)}
        account.rows_unreadable += len(unreadable)
        row = 0
        for batch in _readable(source, unreadable, str(source.path) in strange):
            rows: list[int] = []
            while len(rows) < len(batch):
                if row not in unreadable:
                    rows.append(row)
                row += 1
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


def _readable(source: Source, unreadable: set[int], is_strange: bool) -> Iterator[pa.RecordBatch]:
    """The rows of a file without those that cannot be read, and without the keys that the table does not have."""
    if not unreadable and not is_strange:
        yield from scan_batches(source.path, ROLLOUTS, batch_size=_BATCH_ROWS)
        return
    if source.kind == "parquet":
        why = "the file itself is damaged and its rows cannot be separated"
        raise DataError.unreadable(source.path, why, "write it again")

    def good() -> Iterator[tuple[int, JsonObject, int]]:
        for number, line in enumerate(lines_of(source)):
            if number not in unreadable and line.body is not None:
                row = decode(line.body)
                take_unknown(row)
                yield number + 1, row, len(line.body)

    yield from row_batches(good(), ROLLOUTS, ROLLOUTS.schema.names, str(source.path))


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
