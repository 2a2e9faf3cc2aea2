"""``gymdata scan``: what a run holds that should not be published, and a copy of its rollouts without it.

Invariants: a report never shows a value, only its first characters; everything of a run that is text is read; a copy and its
run.json have no finding.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from gymdata.errors import UsageError, counted
from gymdata.progress import NullProgress, Progress
from gymdata.public import Report, Row, path_of
from gymdata.rollouts.schema import PAIRS, ROLLOUTS
from gymdata.scan.files import all_rows, texts_in
from gymdata.scan.patterns import Find, Found, finder, without
from gymdata.store import StageOutput, find_run_json, read_run_json
from gymdata.store.lineage import parents_of
from gymdata.store.paths import output_file, refuse_inputs
from gymdata.store.stage_output import described_by
from gymdata.store.tables import holds_pairs

#: Keys of run.json that later commands read.
_KEPT = ("identity", "engine", "policy", "model", "chat", "rewards", "reward")
#: Counts of the copy, with their names in the summary.
_COUNTS = {
    "redacted": "{table} redacted",
    "tokens_replaced": "tokens replaced",
    "tokens_untrained": "tokens no longer trained",
}
_OWNER = re.compile(r'"rollout_id": *"([^"]+)"')
#: Characters of a value that a report shows.
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """Something found: its file, row (0-based), field and kind; ``shown``: how it begins, and how long it is."""

    file: str
    row: int
    field: str
    kind: str
    shown: str
    rollout_id: str | None


@dataclass(slots=True, repr=False)
class ScanReport(Report):
    """What ``gymdata.scan`` found, and the copy that it wrote.

    ``by_kind``: kind → findings; ``redacted``: rollouts that were changed; ``left_out``: reason → rollouts.
    """

    path: str
    rows_scanned: int = 0
    findings: list[Finding] = field(default_factory=list)
    by_kind: dict[str, int] = field(default_factory=dict)
    redacted: int = 0
    tokens_replaced: int = 0
    tokens_untrained: int = 0
    left_out: dict[str, list[str]] = field(default_factory=dict)
    file: str | None = None
    table: str = ROLLOUTS.name

    @property
    def ok(self) -> bool:
        """Nothing was found, or all rollouts are in the copy."""
        return not (self.findings if self.file is None else self.left_out)

    def rows(self) -> list[Row]:
        n_rows = len({(finding.file, finding.row) for finding in self.findings})
        result = f"{counted(len(self.findings), 'finding')} in {counted(n_rows, 'row')}" if n_rows else "nothing found"
        summary: list[Row] = [("rows scanned", self.rows_scanned), ("result", result), *self.by_kind.items()]
        if self.file is None:
            return summary
        summary += [(label.format(table=self.table), getattr(self, name)) for name, label in _COUNTS.items()]
        for why, ids in self.left_out.items():
            summary.append((f"left out: {why}", f"{len(ids):,} ({', '.join(ids[:3])}{' …' * (len(ids) > 3)})"))
        return [*summary, ("written to", self.file)]


def scan(
    path: str | Path,
    output: str | Path | None = None,
    *,
    redact: bool = False,
    tokenizer: str | Path | None = None,
    overwrite: bool = False,
    command: Sequence[str] = (),
    progress: Progress | None = None,
) -> ScanReport:
    """Look for keys, tokens, e-mail addresses and home folders in every text under ``path`` (run folder, file or glob):
    messages, tool calls, tasks, tools and environment facts of rollouts, other tables, run.json and logs.

    ``redact``: write the rollouts (or pairs) without them to ``output``, a folder (``rollouts.parquet``, ``pairs.parquet``)
    or a .parquet/.jsonl file.
    ``tokenizer``: that of the policy, where run.json names none that is here.
    Raises MissingExtraError without the extra ``scan``, DataError where there is nothing, or a file cannot be read, and as
    ``filter`` for the output.
    """
    source, find, progress = path_of(path, "scan"), finder(), progress or NullProgress()
    if redact != (output is not None):
        raise UsageError("--redact and -o belong together", hint="--redact -o OUT writes a copy without what is found")
    report = ScanReport(str(path))
    for file, row, value in all_rows(source):
        report.findings += _findings(find, str(file), row, value)
        report.rows_scanned += 1
        progress.update(done=report.rows_scanned)
    report.by_kind = dict(Counter(finding.kind for finding in report.findings).most_common())
    if output is None:
        return report

    from gymdata.models._transformers import reader_of
    from gymdata.scan.redact import Redaction

    table = PAIRS if holds_pairs(source) else ROLLOUTS
    report.table, name = table.name, f"{table.name}.parquet"
    target, run_json = output_file(output, name), find_run_json(source)
    refuse_inputs([target], [source], table, "scanned")
    facts = read_run_json(run_json) if run_json is not None else {}
    reader = reader_of(tokenizer, facts)
    redaction = Redaction(find, reader() if reader is not None else None)
    with StageOutput(described_by(target, name), "redact", [target.name], overwrite=overwrite) as out:
        config = redaction.clean({"path": str(Path(source).resolve())})
        out.refuse_other("config", config, f"redacted {table.name}")
        batches, schema = redaction.batches(source), ROLLOUTS.arrow
        if table is PAIRS:
            import pyarrow as pa

            of_pairs = redaction.pair_batches(source)
            first = next(of_pairs, None)
            columns = PAIRS.required() if first is None else first.schema.names
            schema = pa.schema([PAIRS.schema.field(column) for column in columns], metadata=PAIRS.metadata)
            batches = chain([] if first is None else [first], of_pairs)
        out.batches(target.name, batches, table, schema)
        counts = {name: getattr(redaction, name) for name in (*_COUNTS, "left_out")}
        base = {key: facts[key] for key in _KEPT if key in facts}
        more = {"command": list(command), "parents": parents_of([source]), "neutral_token": redaction.neutral}
        out.finish(
            {**redaction.clean({**base, **more}), "config": config, "counts": {"by_kind": report.by_kind, **counts}}
        )
    for name, value in {**counts, "file": str(target)}.items():
        setattr(report, name, value)
    return report


def _findings(find: Find, file: str, row: int, value: Any) -> Iterator[Finding]:
    named = value.get("rollout_id") if isinstance(value, dict) else next(iter(_OWNER.findall(str(value)[:4_096])), None)
    owner = without(named, find(named)) if named else None
    spots: list[tuple[str, str, Found]] = []
    for where, text in texts_in(value):
        # A text that is JSON was looked at in its parts.
        if not any(before.startswith(where) for before, _, _ in spots):
            spots.extend((where, text, span) for span in find(text))
    keys = {text[span.start : span.end]: span.kind for where, text, span in spots if where.endswith(" (key)")}
    for where, text, span in spots:
        size = span.end - span.start
        shown = f"{text[span.start : span.start + min(_SHOWN, size // 3)]}… ({size:,} characters)"
        for key, kind in keys.items():  # behind a dot it may no longer look like what it is
            where = where.replace(key, f"[redacted:{kind}]")
        yield Finding(file, row, without(where, find(where)), span.kind, shown, owner)
