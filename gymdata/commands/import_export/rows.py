"""The rows of an import on their way to its output: failed attempts are told apart, and all is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.commands.import_export.summaries import ImportSummary
from gymdata.errors import counted
from gymdata.formats.conversion.importing import Rejected
from gymdata.formats.conversion.rows import NO_TIME
from gymdata.rollouts.failures import CANCELLED, MASKED, failures_in, short_reason
from gymdata.rollouts.messages import JsonObject, TableRow, loads, object_of
from gymdata.rollouts.schema import PAIRS, Table
from gymdata.store import StageOutput
from gymdata.store.columns import to_rows
from gymdata.store.journal import FAILURES, line_of
from gymdata.store.lines import encode
from gymdata.store.paths import ROLLOUTS_FOLDER
from gymdata.store.reading import warn

REJECTED = "rejected.jsonl"
#: The placeholder of an image in a text, as LLaVA, LLaMA-Factory and ms-swift write it.
_MARK = "<image>"
#: Column of rollouts → what its sum is in a summary.
_SUMS = {
    "n_turns": "turns",
    "n_breaks": "breaks",
    "n_generated_tokens": "tokens_generated",
    "n_context_tokens": "tokens_context",
}


@dataclass(slots=True)
class ImportedRows:
    """What is written by an import, and counted in ``summary``."""

    summary: ImportSummary
    rejected: list[Rejected] = field(default_factory=list)
    tasks: set[str] = field(default_factory=set)
    #: Lines of failures.jsonl.
    _failures: list[bytes] = field(default_factory=list)
    #: How many rows there are of each reason: failed attempts, and masked rollouts.
    _failed: Counter[str] = field(default_factory=Counter)
    _masked: Counter[str] = field(default_factory=Counter)
    _rollout_ids: set[str] = field(default_factory=set)
    #: Rows with that placeholder in a message.
    _marked: int = 0

    def write(self, read: Iterable[pa.RecordBatch], table: Table, out: StageOutput, suffix: str) -> None:
        """Write the rows that were ``read``, those that were rejected and the failed attempts to ``out``."""
        batches = self._kept(read, table)
        first = next(batches, None)
        # Pairs have optional columns.
        names = table.required() if first is None else first.schema.names
        schema = pa.schema([table.schema.field(name) for name in names], metadata=table.metadata)
        batches = chain([] if first is None else [first], batches)
        name = f"pairs.{suffix}" if table is PAIRS else f"{ROLLOUTS_FOLDER}/part-00000.{suffix}"
        if table is PAIRS or suffix == "parquet":
            out.batches(name, batches, table, schema)
        else:  # a segment, whose lines have checksums
            out.lines(name, (line_of(encode(row)) for batch in batches for row in to_rows(batch)), table)
        summary = self.summary
        if self.rejected:
            order = {file: number for number, file in enumerate(summary.files)}
            self.rejected.sort(key=lambda row: (order[str(row.file)], row.line))
            out.lines(REJECTED, map(_rejected_line, self.rejected))
        if self._failures:
            out.lines(FAILURES, self._failures)
        if self._marked:
            warn(f"{counted(self._marked, 'row')} with {_MARK} in the text: it is trained as text, without an image")
        summary.rejected = len(self.rejected)
        summary.failed, summary.masked = (dict(counts.most_common()) for counts in (self._failed, self._masked))
        summary.rows_in = summary.rollouts + summary.pairs + summary.rejected + self._failed.total()
        summary.reasons = dict(sorted(Counter(row.code for row in self.rejected).items()))

    def _kept(self, read: Iterable[pa.RecordBatch], table: Table) -> Iterator[pa.RecordBatch]:
        """The batches that were ``read``, without failed attempts, counted."""
        for batch in read:
            messages = batch.column("prompt" if table is PAIRS else "messages")
            marked = pc.match_substring(pc.list_flatten(messages).field("content"), _MARK)
            self._marked += len(pc.list_parent_indices(messages).filter(marked).unique())
            if table is PAIRS:
                self._count_pairs(batch)
            else:
                batch = self._without_failed(batch)
                self._count_rollouts(batch)
            self.tasks.update(batch.column("task_id").unique().to_pylist())
            if batch.num_rows:
                yield batch

    def _without_failed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """``batch`` without failed attempts, which become lines of failures.jsonl."""
        failures = failures_in(batch.column("extra"))
        of_rollouts = (MASKED, CANCELLED)
        failed = dict.fromkeys(row for row, failure in failures.items() if failure.get("kind") not in of_rollouts)
        self._masked.update(short_reason(failure) for row, failure in failures.items() if row not in failed)
        self._failed.update(short_reason(failures[row]) for row in failed)
        for row, attempt in zip(failed, to_rows(batch.take(pa.array([*failed], pa.int64()))), strict=True):
            self._failures.append(line_of(encode(_attempt(attempt, failures[row]))))
        rollouts = pa.array([row for row in range(len(batch)) if row not in failed], pa.int64())
        return batch.take(rollouts) if failed else batch

    def _count_pairs(self, batch: pa.RecordBatch) -> None:
        summary = self.summary
        summary.pairs += batch.num_rows
        summary.equal_scores += batch.column("margin").to_pylist().count(0.0)
        generated, ids = (
            sum(int(pc.sum(batch.column(name).flatten()).as_py() or 0) for name in ("chosen_mask", "rejected_mask")),
            sum(len(batch.column(name).flatten()) for name in ("prompt_ids", "chosen_ids", "rejected_ids")),
        )
        summary.tokens_generated += generated
        summary.tokens_context += ids - generated

    def _count_rollouts(self, batch: pa.RecordBatch) -> None:
        summary = self.summary
        summary.rollouts += batch.num_rows
        for column, name in _SUMS.items():
            setattr(summary, name, getattr(summary, name) + int(batch.column(column).to_numpy().sum()))
        summary.without_token_data += int((batch.column("n_turns").to_numpy() == 0).sum())
        rewards = batch.column("reward").to_numpy(zero_copy_only=False)
        summary.without_reward += int(np.count_nonzero(~np.isfinite(rewards)))
        summary.without_time += batch.column("started_at").to_pylist().count(NO_TIME)
        self._rollout_ids.update(batch.column("rollout_id").to_pylist())
        summary.duplicates = summary.rollouts - len(self._rollout_ids)


def _attempt(row: TableRow, failure: Mapping[str, Any]) -> JsonObject:
    """A failed attempt as a record of failures.jsonl: where its writer says so, and all that its row would hold."""
    names = ("rollout_id", "run_id", "group_id", "task_id", "rollout_index", "turns", "messages", "duration_s")
    return {
        "kind": failure.get("kind"),
        "place": failure.get("field"),
        "message": failure.get("reason"),
        "attempt": object_of(loads(row["task"])).get("_ng_attempt_index"),
        "counts": True,
        "final": bool(failure.get("final")),
        **{name: row[name] for name in names},
        "at": row["started_at"].isoformat(),
        **{name: row[name] for name in ("policy", "tools", "task", "extra")},
    }


def _rejected_line(row: Rejected) -> bytes:
    # A reason may quote a lone surrogate, which no output file can hold.
    reason = row.reason.encode("utf-8", "replace").decode()
    fields = {"file": str(row.file), "line": row.line, "code": row.code, "reason": reason, "text": row.text}
    return encode(fields) + b"\n"
