"""``gymdata scan``: what a run holds that should not be published.

Invariants: a report never shows a value, only its first characters; everything of a run that is text is read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gymdata.errors import counted, plural
from gymdata.progress import NullProgress, Progress
from gymdata.public import Report, Row, path_of
from gymdata.scan.files import all_rows, rewritten, rollout_id_of
from gymdata.scan.patterns import Find, Found, finder, without

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
    rollout_id: str | None = None


@dataclass(slots=True, repr=False)
class ScanReport(Report):
    """What ``gymdata.scan`` found in ``path``, and what it wrote.

    ``by_kind``: kind → findings.
    """

    path: str
    rows_scanned: int = 0
    findings: list[Finding] = field(default_factory=list)
    by_kind: Counter[str] = field(default_factory=Counter)

    @property
    def ok(self) -> bool:
        """Nothing was found."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"by_kind": dict(self.by_kind.most_common())}

    def rows(self) -> list[Row]:
        where = {(one.file, one.row) for one in self.findings}
        found = (
            f"{counted(len(self.findings), 'finding')} in {counted(len(where), 'row')}" if where else "nothing found"
        )
        return [("rows scanned", self.rows_scanned), ("result", found), *sorted(self.by_kind.items())]


def scan(path: str | Path, *, progress: Progress | None = None) -> ScanReport:
    """Look for keys, tokens, e-mail addresses and home folders in every text under ``path`` (run folder, file or glob):
    messages, tool calls, tasks, tools and environment facts of rollouts, other tables, run.json and logs.

    Raises MissingExtraError without the extra ``scan``, and DataError where there is nothing, or a file cannot be read.
    """
    source, find, progress = path_of(path, "scan"), finder(), progress or NullProgress()
    report = ScanReport(str(path))
    for file, row, value in all_rows(source):
        _scan_row(report, find, str(file), row, value)
        report.rows_scanned += 1
        progress.update(done=report.rows_scanned)
    return report


def _scan_row(report: ScanReport, find: Find, file: str, row: int, value: Any) -> None:
    owner = _hidden(rollout_id_of(value) or "", find) or None

    def look(where: str, text: str) -> str:
        for one in find(text):
            report.by_kind[one.kind] += 1
            report.findings.append(Finding(file, row, _hidden(where, find), one.kind, _shown(text, one), owner))
        return text

    rewritten(value, look)


def _shown(text: str, one: Found) -> str:
    size = one.end - one.start
    return f"{text[one.start : one.start + min(_SHOWN, size // 3)]}… ({size:,} {plural(size, 'character')})"


def _hidden(name: str, find: Find) -> str:
    """The name of a field or rollout, which may itself hold what is not shown."""
    return without(name, find(name))
