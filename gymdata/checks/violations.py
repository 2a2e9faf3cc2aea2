"""The findings of validation: single violations, which of them count, and the report over all of them.

Invariants: the list of violations is complete and in the order of files and rows; counts are those of the list; nothing
here needs pyarrow except ``table``, so that a small file is validated without loading it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast

from gymdata.errors import UsageError, option, printable
from gymdata.public import Figures, Report, Row
from gymdata.registry import Registry

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.checks.breaks import Reader
    from gymdata.rollouts.ragged import Ints
    from gymdata.rollouts.turn_columns import Evidence

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Code:
    """One fault class. ``meaning`` is one line; ``explanation`` says why it matters and what to do."""

    code: str
    name: str
    severity: Severity
    meaning: str
    explanation: str

    def __str__(self) -> str:
        """The code for people."""
        meaning = self.meaning[0].upper() + self.meaning[1:]
        return f"{self.code} {self.name} ({self.severity})\n\n{meaning}.\n\n{self.explanation}"

    @property
    def advice(self) -> str:
        """The next step after a finding, besides what the explanation names as the cause."""
        if self.severity != "error":
            leave = f"nothing where it is meant, and `--ignore {self.code}` leaves it out of the report"
            return f"{leave}; else mend what made the rows and make them again."
        return _ADVICE.get(self.code[0], _ADVICE["T"])


#: By the letter of a code; all others as T.
_ADVICE = {
    "S": "write the file again, or remove the row, and validate it again.",
    "P": "correct what made the pairs and make them again (`gymdata pairs RUN`).",
    "T": "correct what made the rollouts and make them again, or keep what is sound: `gymdata validate RUN --fix drop -o "
    "NEW.parquet` leaves such rollouts out, `--fix truncate` keeps their turns before the fault, `--fix split` also "
    "those after a break, as rollouts of their own.",
}


_HEADING = re.compile(r"(?P<code>\w+) (?P<name>[^()]+) \((?P<severity>error|warning|info)\): (?P<meaning>.+)")


def code_pages(text: str) -> tuple[Code, ...]:
    """Codes, a paragraph for each: ``CODE name (severity): meaning`` in the first line, the explanation in the others.

    Raises ValueError for a first line of another form."""
    codes = []
    for page in text.strip().split("\n\n"):
        first, *explanation = page.splitlines()
        if (heading := _HEADING.fullmatch(first)) is None:
            raise ValueError(f"got {first!r}, expected 'CODE name (error, warning or info): meaning'")
        code, name, severity, meaning = heading.groups()
        codes.append(Code(code, name, cast("Severity", severity), meaning, " ".join(explanation)))
    return tuple(codes)


class _Codes(Mapping[str, Code]):
    """The codes of all checks by their names, in the order of the documentation; read at the first use."""

    @cached_property
    def _all(self) -> dict[str, Code]:
        codes = [code for entry in CHECKS for code in entry.object.codes]
        letters = "".join(FAMILIES)
        codes.sort(key=lambda code: (letters.find(code.code[0]) % (len(letters) + 1), code.code))
        return {code.code: code for code in codes}

    def add(self, code: Code) -> None:
        """A code of a user's own check. Raises UsageError for one that another check has."""
        if (registered := self._all.setdefault(code.code, code)) != code:
            raise UsageError(f"{option('check')}: the code {code.code} is taken: {registered.name}")

    def __getitem__(self, name: str) -> Code:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


#: The letters of codes in the order of the documentation.
FAMILIES = {
    "S": "Structure",
    "T": "Tokens, turns and storage",
    "L": "Log-probabilities",
    "M": "Messages",
    "R": "Rewards",
    "P": "Pairs",
    "B": "Behaviour",
    "D": "Duplicates",
}


CODES = _Codes()
#: Codes that are causes of one fault: the prompt does not extend what came before.
BREAKS = ("T200", "T201", "T202", "T203", "T204")


def expand_prefixes(prefixes: Iterable[str], flag: str) -> frozenset[str]:
    """The codes that begin with any of ``prefixes`` (``T2`` is every T2xx). Raises UsageError for one that matches none."""
    chosen: set[str] = set()
    for raw in [prefixes] if isinstance(prefixes, str) else prefixes:
        for prefix in raw.replace(",", " ").split():
            matching = [code for code in CODES if code.startswith(prefix.upper())]
            if not matching:
                raise UsageError.unknown_choice(flag, prefix, CODES)
            chosen.update(matching)
    return frozenset(chosen)


def explain(code: str) -> Code:
    """The explanation of a code. Raises UsageError for an unknown code, naming similar ones."""
    entry = CODES.get(code.upper())
    if entry is None:
        family = [f"{name} {other.name}" for name, other in CODES.items() if code and name.startswith(code.upper())]
        if family:
            raise UsageError.bad_value(option("explain"), code, f"one code; these begin so: {', '.join(family)}")
        raise UsageError.unknown_choice(option("explain"), code, CODES)
    return entry


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
    #: Evidence of a break: the differing spans with their ids and texts, the tokens around them, and a line that
    #: explains.
    evidence: dict[str, Any] | None = None

    def as_dict(self) -> Figures:
        """The row of the violations table, with the file that ``row`` counts in; and of a break the evidence."""
        row = self._asdict() | {"severity": self.severity or CODES[self.code].severity}
        if self.evidence is None:
            del row["evidence"]
        return row


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """What checks know besides the rows. ``vocab_size``: ids are below it; ``reward_named``: run.json names a reward;
    ``reader``: loads the tokenizer, and is called at the first break; ``unweighted``: parts of the reward that have the
    weight 0."""

    vocab_size: int | None = None
    reward_named: bool = False
    reader: Reader | None = None
    unweighted: frozenset[str] = frozenset()


class Check:
    """One code or family: what its ``codes`` mean, and how they are found. One object checks all batches of a path."""

    codes: ClassVar[tuple[Code, ...]] = ()

    def __init__(self, settings: CheckSettings) -> None:
        self.settings = settings

    def find(self, e: Evidence) -> Iterable[Violation]:
        """The violations of a batch; what they need of other batches is kept for ``finish``."""
        del e
        return ()

    def find_pairs(self, batch: pa.RecordBatch, rows: Ints, file: str) -> Iterable[Violation]:
        """The violations of a batch of the pairs table; ``rows``: the number of each of its rows in ``file``."""
        del batch, rows, file
        return ()

    def finish(self) -> Iterable[Violation]:
        """The violations that need all rows, after the last batch."""
        return ()

    @staticmethod
    def at_rollout(e: Evidence, r: int, code: str, **more: Any) -> Violation:
        """The violation ``code`` of rollout ``r`` of a batch; ``more``: fields of it."""
        return Violation(code, int(e.rows[r]), e.rollout_id[r], **{"file": e.file, **more})

    @staticmethod
    def at_turn(e: Evidence, k: int, code: str, **more: Any) -> Violation:
        """The same of turn ``k`` of a batch."""
        return Check.at_rollout(e, int(e.turns.rollout[k]), code, turn=int(e.turns.number[k]), **more)


CHECKS: Registry[type[Check]] = Registry("check", "gymdata.checks.codes", "gymdata.checks")


def both_sides(evidence: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """The first place of a break for people: (``before`` or ``prompt``, text to the left, what differs, text to the
    right), each cut to a part of a line and fit for a terminal; empty where no tokenizer gave texts."""
    if evidence["left"] is None:
        return []
    first, left = evidence["spans"][0], _cut(evidence["left"], 40, "end")
    return [
        (side, left, _cut(first[side]["text"], 80, "middle"), _cut(right, 40, "start"))
        for side, right in zip(("before", "prompt"), evidence["right"], strict=True)
    ]


def _cut(text: str, width: int, keep: str) -> str:
    """``text`` on one line, at most ``width`` characters of its start, its end, or both."""
    line = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    line = printable(line, lines=False)
    if len(line) <= width:
        return line
    if keep == "middle":
        return f"{line[: width // 2]} … {line[-width // 2 :]}"
    return line[:width] + "…" if keep == "start" else "…" + line[-width:]


def rows_with_errors(violations: Iterable[Violation]) -> dict[str | None, set[int]]:
    """The rows with an error, by file."""
    rows: dict[str | None, set[int]] = {}
    for v in violations:
        if (v.severity or CODES[v.code].severity) == "error":
            rows.setdefault(v.file, set()).add(v.row)
    return rows


@dataclass(frozen=True, slots=True)
class Selection:
    """Which codes count, and as what: ``strict`` makes warnings errors."""

    codes: frozenset[str] = field(default_factory=lambda: frozenset(CODES))
    strict: bool = False

    @classmethod
    def of(cls, select: Iterable[str] = (), ignore: Iterable[str] = (), strict: bool = False) -> Selection:
        """From prefixes as the command line gives them; no ``select`` means every code."""
        chosen = expand_prefixes(select, option("select")) or frozenset(CODES)
        return cls(chosen - expand_prefixes(ignore, option("ignore")), strict)

    def apply(self, violations: Iterable[Violation]) -> list[Violation]:
        """The ``violations`` that count, each with its severity filled in."""
        counting = [violation for violation in violations if violation.code in self.codes]
        severities = [violation.severity or CODES[violation.code].severity for violation in counting]
        return [
            violation._replace(severity="error" if self.strict and severity == "warning" else severity)
            for violation, severity in zip(counting, severities, strict=True)
        ]


_FIGURES = ("rollouts", "trainable", "turns", "tokens", "errors", "warnings", "infos", "by_code", "masked", "files")


@dataclass(slots=True, repr=False)
class ValidationReport(Report):
    """The outcome of one validation. ``rollouts`` counts rows that could be read (pairs, for a pairs file), ``trainable``
    those of them that have token ids to train on and no error, whatever codes were selected. ``state``: of the run that was
    checked, as ``gymdata ls`` has it."""

    path: str = ""
    state: str = ""
    files: list[str] = field(default_factory=list)
    rollouts: int = 0
    trainable: int = 0
    turns: int = 0
    tokens: int = 0
    violations: list[Violation] = field(default_factory=list)
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
    def masked(self) -> dict[str, int]:
        """Rows whose writer masked them or says that they failed, by reason."""
        return dict(Counter(v.detail for v in self.violations if v.code == "R501" and v.detail).most_common())

    @property
    def ok(self) -> bool:
        """There are rows, and no errors."""
        return self.rollouts > 0 and not any(v.severity == "error" for v in self.violations)

    def __repr__(self) -> str:
        return (
            f"ValidationReport(path={self.path!r}, rollouts={self.rollouts}, trainable={self.trainable}, "
            f"by_code={self.by_code})"
        )

    def rows(self) -> list[Row]:
        """How many rollouts can be trained; the meaning and the count of each code that was found."""
        counts = [(f"{code}  {CODES[code].meaning}", count) for code, count in self.by_code.items()]
        return [("trainable", f"{self.trainable:,} of {self.rollouts:,} rollouts"), *counts, *self.masked.items()]

    def to_dict(self) -> Figures:
        """The object that ``--json`` prints. Complete, never capped."""
        return {name: getattr(self, name) for name in _FIGURES} | {"violations": [v.as_dict() for v in self.violations]}

    def table(self) -> Any:
        """The violations as an Arrow table of the violations schema."""
        import pyarrow as pa

        from gymdata.rollouts.schema import VIOLATIONS

        return pa.Table.from_pylist([violation.as_dict() for violation in self.violations], schema=VIOLATIONS.arrow)
