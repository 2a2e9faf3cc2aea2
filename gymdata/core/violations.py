"""What validation found: single violations, which of them count, and the report over all of them.

What always holds: the list of violations is complete and in the order of files and rows; counts are those of the list;
nothing here needs pyarrow unless a table is asked for, so that a small file is validated without loading it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gymdata.core.codes import CODES, Severity, expand_prefixes


class Violation(NamedTuple):
    """One fault. ``row`` is 0-based in ``file``; ``turn`` and ``position`` are 0-based, None when they do not apply."""

    code: str
    row: int
    rollout_id: str | None = None
    turn: int | None = None
    position: int | None = None
    expected: str | None = None
    got: str | None = None
    detail: str | None = None
    severity: Severity | None = None
    file: str | None = None
    #: Of a break: the differing spans with their ids and texts, what they stand between, and a line that explains.
    evidence: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The row of the violations table, with the file that ``row`` counts in; of a break the evidence, too."""
        row = {
            "rollout_id": self.rollout_id,
            "row": self.row,
            "turn": self.turn,
            "code": self.code,
            "severity": self.severity or CODES[self.code].severity,
            "position": self.position,
            "expected": self.expected,
            "got": self.got,
            "detail": self.detail,
            "file": self.file,
        }
        return row if self.evidence is None else row | {"evidence": self.evidence}


def rows_with_errors(found: Iterable[Violation]) -> set[tuple[str | None, int]]:
    """(file, row) of every row with an error."""
    return {(v.file, v.row) for v in found if (v.severity or CODES[v.code].severity) == "error"}


@dataclass(frozen=True, slots=True)
class Selection:
    """Which codes count, and as what. ``reward_named``: run.json names a reward, so a missing one is an error."""

    select: frozenset[str] = frozenset(CODES)
    ignore: frozenset[str] = frozenset()
    strict: bool = False

    @classmethod
    def of(cls, select: Iterable[str] = (), ignore: Iterable[str] = (), strict: bool = False) -> Selection:
        """From prefixes as the command line gives them; no ``select`` means every code."""
        chosen = expand_prefixes(select, "--select") or frozenset(CODES)
        return cls(chosen, expand_prefixes(ignore, "--ignore"), strict)

    def wants(self, code: str) -> bool:
        return code in self.select and code not in self.ignore

    def apply(self, found: Iterable[Violation]) -> list[Violation]:
        """Those of ``found`` that count, each with its severity filled in."""
        kept = []
        for violation in found:
            if self.wants(violation.code):
                severity = violation.severity or CODES[violation.code].severity
                if self.strict and severity == "warning":
                    severity = "error"
                kept.append(violation if violation.severity == severity else violation._replace(severity=severity))
        return kept


@dataclass(slots=True)
class Report:
    """The outcome of one validation. ``rollouts`` counts rows that could be read (pairs, for a pairs file), ``trainable``
    those of them that have token ids to train on and no error, whatever codes were selected. ``notes``:
    files that are not as they were sealed; what that did to their rows is among the violations, or nothing."""

    path: str = ""
    files: list[str] = field(default_factory=list)
    rollouts: int = 0
    trainable: int = 0
    turns: int = 0
    tokens: int = 0
    violations: list[Violation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def errors(self) -> int:
        return sum(v.severity == "error" for v in self.violations)

    @property
    def warnings(self) -> int:
        return sum(v.severity == "warning" for v in self.violations)

    @property
    def infos(self) -> int:
        return sum(v.severity == "info" for v in self.violations)

    @property
    def by_code(self) -> dict[str, int]:
        return dict(sorted(Counter(v.code for v in self.violations).items()))

    @property
    def ok(self) -> bool:
        """There are rows, and no errors."""
        return self.rollouts > 0 and not any(v.severity == "error" for v in self.violations)

    def has(self, *codes: str) -> bool:
        """Whether any of ``codes`` was found, whatever its severity: what a command asks before it refuses."""
        return any(v.code in codes for v in self.violations)

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints. Complete, never capped."""
        return {
            "rollouts": self.rollouts,
            "trainable": self.trainable,
            "turns": self.turns,
            "tokens": self.tokens,
            "errors": self.errors,
            "warnings": self.warnings,
            "infos": self.infos,
            "by_code": self.by_code,
            "files": self.files,
            "notes": self.notes,
            "violations": [v.as_dict() for v in self.violations],
        }

    def to_json(self, indent: int | None = None) -> str:
        import json

        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    def table(self) -> Any:
        """The violations as an Arrow table of the violations schema."""
        import pyarrow as pa

        from gymdata.core.schema import VIOLATIONS

        rows: list[Mapping[str, Any]] = [
            {k: v for k, v in one.as_dict().items() if k not in ("file", "evidence")} for one in self.violations
        ]
        return pa.Table.from_pylist(rows, schema=VIOLATIONS.arrow)
