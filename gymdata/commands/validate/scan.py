"""Reading rollouts for validation: batches for the checks, and violations for what is in none.

Invariants: rows come in file order; every row is in a batch or named by a violation, and one bad row never hides another;
of a file that can be read in part no more is read than the checks need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa

from gymdata.checks.violations import Violation
from gymdata.errors import counted
from gymdata.rollouts.kept_sets import KeptSets
from gymdata.rollouts.schema import HEADED_ROWS, HEADS, ROLLOUTS, Table
from gymdata.rollouts.turn_columns import Evidence, from_arrow
from gymdata.store.columns import Fault
from gymdata.store.paths import Source
from gymdata.store.tables import batches

_TOKEN_LISTS = ("prompt_delta_ids", "generation_token_ids", "generation_log_probs")
_UNREAD = (
    *("run_id", "task_id", "rollout_index", "policy", "policy_hash", "policy_version", "stop_reason", "finish_reason"),
    *("prompt_hash", "generation_hash", "duration_s"),
    *("messages.name", "messages.extra", "turns.top_log_probs", "turns.server"),
)
#: What is computed of a batch is small compared to what is read at once.
_CHECKED_BYTES = 8 << 20


def _without_tokens() -> Table:
    """Rollouts in which a turn without a list of tokens, and a rollout without turns, are rows still: T205 and L301 name
    them."""
    of = ROLLOUTS.schema.field("turns")
    turn = pa.struct([f.with_nullable(f.nullable or f.name in _TOKEN_LISTS) for f in of.type.value_type])
    loose = pa.field("turns", pa.list_(turn), nullable=True)
    return replace(ROLLOUTS, schema=pa.schema([loose if f.name == "turns" else f for f in ROLLOUTS.schema]))


_TABLE = _without_tokens()
#: What checks read.
READ = _TABLE.without(*_UNREAD)


def scan(source: Source) -> Iterator[Evidence | Violation]:
    """The batches of one file, and violations for what is in none; last, one for each key that no table has."""
    first_row, n_rows = dict[str, int](), Counter[str]()
    for part in batches(source, _TABLE, read=READ):
        if isinstance(part, Fault):
            for key in part.keys:
                first_row.setdefault(key, part.row)
                n_rows[key] += 1
            if not part.keys:
                yield violation_of(part)
        elif "turns" in part.data.schema.names:
            for piece in part.slices(max(1, len(part.rows) * _CHECKED_BYTES // max(part.data.nbytes, 1))):
                evidence = from_arrow(piece.data, 0)
                evidence.rows = piece.rows
                yield evidence
    for key, row in first_row.items():
        detail = f"unknown key {key!r} in {counted(n_rows[key], 'row')}: other commands refuse it, --fix leaves it out"
        yield Violation("S102", row, expected="a column of the table", got=key, detail=detail, severity="warning")


def kept_sets(source: Source) -> KeptSets:
    """Whether the saved heads of a file's tokens are kept sets; faulty rows are passed over. Raises DataError for a turn
    with other than one head per token."""
    kept = KeptSets()
    for part in batches(source, _TABLE, ("turns",), read=HEADS, batch_size=HEADED_ROWS):
        if not isinstance(part, Fault) and "turns" in part.data.schema.names:
            kept.add(part.data.column("turns"))
    return kept


def violation_of(fault: Fault) -> Violation:
    """A fault as a violation, at its turn and position."""
    turn = position = expected = got = None
    if (misfit := fault.misfit) is not None and misfit.path:
        path = misfit.path
        if path[0] == "turns" and len(path) > 1 and isinstance(path[1], int):
            turn = path[1]
            position = path[3] if len(path) > 3 and path[2] in _TOKEN_LISTS and isinstance(path[3], int) else None
        expected = misfit.field if misfit.missing else misfit.expected
        got = None if misfit.missing else misfit.got
    violation = Violation(fault.code, fault.row, fault.rollout_id, turn, position, expected, got, fault.detail)
    return violation._replace(severity="warning") if fault.kind == "torn" else violation
