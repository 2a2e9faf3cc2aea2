"""What an import and an export did, as programs and people read it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from gymdata.checks.violations import CODES
from gymdata.commands.import_export.splitting import SPLIT
from gymdata.formats import format_named
from gymdata.formats.conversion.exporting import Export
from gymdata.public import Figures, Report, Row
from gymdata.rollouts.schema import PAIRS
from gymdata.store.paths import RunFacts


@dataclass(slots=True, repr=False)
class ImportSummary(Report):
    """Summary of an import. ``rows_in`` (``rows`` in JSON) = ``rollouts`` + ``pairs`` + ``rejected``; ``reasons``
    counts rejected rows by code, ``duplicates`` the rollouts that are the same as an earlier one (D701; they are in the
    run as well).
    ``failed``: attempts that failed, by reason, which are in failures.jsonl and also count in ``rows_in``;
    ``masked``: rollouts that their writer masked or cancelled, by reason.

    ``rendered``: rows whose ids were rendered from their text, when a model was given; of the others ``refused`` has the
    reasons, and ``rejected`` counts them. See ``gymdata.chat.rendering.RenderCounts``. ``tokens_generated``,
    ``tokens_context``: of the rollouts or pairs that have ids, rendered or not; those of a prompt count once.
    ``tasks``: of each side of ``test_share``. ``without_time``: rollouts whose format says not when they began; their
    ``started_at`` is 1970-01-01. ``equal_scores``: pairs whose own scores prefer neither side (P603).
    """

    run: str
    format: str
    rows_in: int = 0
    rollouts: int = 0
    pairs: int = 0
    rejected: int = 0
    turns: int = 0
    breaks: int = 0
    without_token_data: int = 0
    without_reward: int = 0
    without_time: int = 0
    equal_scores: int = 0
    masked: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    duplicates: int = 0
    rendered: int = 0
    tokens_generated: int = 0
    tokens_context: int = 0
    unopened: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    twins: dict[str, int] = field(default_factory=dict)
    control_tokens: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    tasks: dict[str, int] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """False when a row was rejected or there was none at all."""
        return not self.rejected and self.rows_in > 0

    def to_dict(self) -> Figures:
        return {"rows" if name == "rows_in" else name: value for name, value in asdict(self).items()}

    def rows(self) -> list[Row]:
        split: list[Row] = [(f"  {side}, tasks", f"{n:,} in {SPLIT}/{side}.parquet") for side, n in self.tasks.items()]
        rejected: list[Row] = [(f"  rejected, {code} ({CODES[code].name})", n) for code, n in self.reasons.items()]
        rejected += [(f"    {reason}"[:300], n) for reason, n in self.refused.items()]
        first: list[Row] = [("format", self.format), ("rows", self.rows_in), *rejected, *self._rendered()]
        if format_named(self.format).table == PAIRS.name:
            without = "pairs" if self.rendered else "pairs, without token data"
            equal: list[Row] = [("  with equal scores (P603)", self.equal_scores)] if self.equal_scores else []
            return [*first, (without, self.pairs), *equal, ("written to", self.run), *split]
        return [
            *first,
            ("rollouts", self.rollouts),
            ("turns with token ids", self.turns),
            ("breaks", self.breaks),
            ("rollouts without token data", self.without_token_data),
            ("rollouts without reward", self.without_reward),
            *([("rollouts without a time", self.without_time)] if self.without_time else []),
            *((f"  {why}", n) for why, n in self.masked.items()),
            *([("failed attempts, in failures.jsonl", sum(self.failed.values()))] if self.failed else []),
            *((f"  {why}", n) for why, n in self.failed.items()),
            ("duplicate rollouts", self.duplicates),
            ("written to", self.run),
            *split,
        ]

    def _rendered(self) -> list[Row]:
        if not self.rendered:
            return []
        return [
            ("rendered from text (T213)", self.rendered),
            *((f"  with the training template {name}", n) for name, n in self.twins.items()),
            *((f"  with {token} in a text, as a control token", n) for token, n in self.control_tokens.items()),
            *([("  answers without the reasoning that the prompt opens", self.unopened)] if self.unopened else []),
            ("tokens", f"{self.tokens_generated:,} of the assistant, {self.tokens_context:,} of context"),
        ]

    def counts(self) -> Figures:
        """What run.json has of it."""
        return {name: n for name, n in self.to_dict().items() if name not in ("run", "files", "format", "tasks")}

    def recall(self, facts: RunFacts) -> None:
        """Take the ``counts`` of a run.json."""
        for name, n in facts["counts"].items():
            setattr(self, "rows_in" if name == "rows" else name, n)


@dataclass(slots=True, repr=False)
class ExportSummary(Report):
    """Summary of an export: ``rows_out`` rows (``rows`` in JSON). ``lost``: what the format cannot hold → in how many
    rows; ``skipped``: rows without a place in it; ``account``: kind → how many were ``read``, ``written`` and ``lost``
    (``formats.KINDS``, and failures); ``turns``, ``turns_lost``: of rollouts, the same numbers."""

    output: str
    format: str
    rows_out: int = 0
    skipped: int = 0
    turns: int = 0
    turns_lost: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    account: dict[str, dict[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, output: str, export: Export) -> ExportSummary:
        """Of an export that is done."""
        account = export.account()
        turns = account.get("turns", {"read": 0, "lost": 0})
        return cls(
            output,
            export.format,
            rows_out=export.written,
            skipped=export.read + export.further - export.written,
            turns=turns["read"],
            turns_lost=turns["lost"],
            lost={kind: n for kind, n in export.lost.items() if n},
            account=account,
        )

    @property
    def ok(self) -> bool:
        """False when the format could hold no row: a script must not continue with an empty file."""
        return self.rows_out > 0

    def to_dict(self) -> Figures:
        return {"rows" if name == "rows_out" else name: value for name, value in asdict(self).items()}

    def rows(self) -> list[Row]:
        return [
            ("rows", self.rows_out),
            *([("left out", self.skipped)] if self.skipped else []),
            *((f"  lost: {kind}", n) for kind, n in self.lost.items()),
            *(
                (f"{kind} written", f"{n['written']:,} of {n['read']:,}")
                for kind, n in self.account.items()
                if n["read"]
            ),
            *([] if self.lost or any(n["lost"] for n in self.account.values()) else [("lost", "nothing")]),
            ("written to", self.output),
        ]
