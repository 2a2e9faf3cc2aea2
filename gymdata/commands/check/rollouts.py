"""``check`` of rollouts or pairs: can they be trained? What `import` and `validate` find in them, in one screen.

Invariant: nothing is written; another project's file is imported into a temporary folder, and its findings name its lines.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from glob import has_magic
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gymdata.checks.violations import BREAKS, CODES, ValidationReport, Violation, rows_with_errors
from gymdata.commands.import_export.rendering import rendered, renderer_of
from gymdata.commands.import_export.rows import ImportedRows
from gymdata.commands.import_export.run import foreign_sources, warn_of_unread
from gymdata.commands.import_export.summaries import ImportSummary
from gymdata.commands.validate.rollouts import evidence_in
from gymdata.commands.validate.run import kind_of, sources_of, validate
from gymdata.errors import DataError, UsageError, counted
from gymdata.formats import Format, format_in
from gymdata.formats.conversion.batches import imported_batches
from gymdata.formats.conversion.importing import Importing, Numbering, Origin, Rejected
from gymdata.public import Figures, Report, Row, path_of
from gymdata.rollouts.failures import is_rollout, short_reason
from gymdata.rollouts.schema import TABLES
from gymdata.rollouts.turn_columns import Evidence
from gymdata.store import StageOutput, find_run_json, read_failures
from gymdata.store.fetch import is_url
from gymdata.store.lines import line_numbers
from gymdata.store.paths import RunFacts, read_facts
from gymdata.store.reading import reading

if TYPE_CHECKING:
    from gymdata.chat.rendering import TextRenderer

__all__ = ["DataReport", "check_rollouts"]

#: Files of which a folder of a model or tokenizer has one.
_OF_MODELS = ("config.json", "tokenizer.json", "tokenizer_config.json")
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".gz", ".zst", ".pt", ".dp", ".pkl")
#: Reasons that are shown.
_WORST = 3
#: What log-probabilities are where a code was found, the worst first.
_LOG_PROBS = {
    "L301": "missing or too many in {}",
    "L302": "unknown or not finite in {}",
    "L303": "positive in {}",
    "L306": "cannot be a sampler's",
    "L304": "biased by the sampling settings",
}


class Finding(NamedTuple):
    """All that one code says: in how many places, the first of them, and the command that prints its page."""

    code: str
    name: str
    severity: str
    times: int
    where: str
    detail: str

    @property
    def page(self) -> str:
        return f"gymdata validate --explain {self.code}"


class Usable(NamedTuple):
    """What a trainer could use: ``rollouts`` (or pairs) with ``tokens`` that are trained, and why no more, if it matters."""

    trainer: str
    rollouts: int
    tokens: int
    why: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class DataReport(Report):
    """Whether the rollouts or pairs at ``path`` can be trained. ``what``: where they are from; ``trainable``: rows with
    sampled ids and no error; ``groups``: how many, of several scored rollouts, and of these with equal rewards."""

    path: str
    what: str
    table: str
    format: str | None
    is_imported: bool
    validation: ValidationReport
    rejected: Mapping[str, int]
    failures: Mapping[str, int]
    log_probs: str
    groups: Mapping[str, int]
    trainers: Sequence[Usable]
    findings: Sequence[Finding]
    verdict: str
    ok: bool

    @property
    def breaks(self) -> dict[str, int]:
        """Breaks by their cause."""
        return {code: n for code, n in self.validation.by_code.items() if code in BREAKS}

    def to_dict(self) -> Figures:
        """The facts of the text, with all findings."""
        names = ("path", "what", "table", "format", "verdict", "ok", "rejected", "breaks", "failures", "log_probs")
        counts = ("rollouts", "turns", "tokens", "trainable", "errors", "warnings", "by_code")
        return {
            **{name: getattr(self, name) for name in names},
            **{name: getattr(self.validation, name) for name in counts},
            "groups": dict(self.groups),
            "trainers": {u.trainer: {"rollouts": u.rollouts, "tokens": u.tokens, "why": u.why} for u in self.trainers},
            "findings": [finding._asdict() | {"page": finding.page} for finding in self.findings],
        }

    def rows(self) -> list[Row]:
        of = self.validation
        size = ", ".join(
            (f"{of.rollouts:,}", *([counted(of.turns, "turn")] if of.turns else []), counted(of.tokens, "token"))
        )
        rows: list[Row] = [("what", self.what), (self.table, size)]
        if self.rejected:
            rows.append(("rejected", _counts({f"{code} {CODES[code].name}": n for code, n in self.rejected.items()})))
        if self.table == "pairs":
            return rows
        breaks = {f"{code} {CODES[code].name}": n for code, n in self.breaks.items()}
        groups = "{n:,}: {of_several:,} with several scored rollouts, {without_signal:,} of them without signal"
        return [
            *rows,
            ("breaks", _counts(breaks) or "none"),
            ("failures", _counts(self.failures) or "none"),
            ("log-probs", self.log_probs),
            ("groups", groups.format_map(self.groups)),
        ]


def check_rollouts(
    path: str | Path, *, model: str | None = None, chat_template: str | Path | None = None
) -> DataReport:
    """Whether the rollouts or pairs at ``path`` can be trained: a run folder, a Parquet or JSONL file, a glob, or a file of
    another project. ``ok`` is False where training on all of it would be wrong.

    ``model``: a model or tokenizer folder, whose vocabulary bounds the ids; text of another project is rendered with its
    template, or ``chat_template`` (a file), as ``import_rollouts`` does. Raises DataError when nothing can be read there.
    """
    if chat_template is not None and model is None:
        raise UsageError("--chat-template: renders text with a model's tokenizer", hint="give the model with -m MODEL")
    path = path_of(path, "check_rollouts")
    sources = sources_of(path)
    form = None
    if sources and not Path(path).is_dir():
        if not any(source.path.stat().st_size for source in sources):
            raise DataError.empty(sources[0].path, "rollouts or pairs")
        with contextlib.suppress(DataError):  # of tasks: validate says so
            form = format_in(sources[0], {})
    if form is None or form.read_in_place:
        return _checked(path, path, _Imported(form), model)
    renderer = renderer_of(model, chat_template, form) if model is not None and form.holds_text else None
    with TemporaryDirectory() as folder:
        place = Path(folder, "run")
        return _checked(path, place, _import(path, place, renderer), model)


@dataclass(slots=True)
class _Imported:
    """The format of a file of another project, what was rejected, and where each row of the import was, also by its id."""

    form: Format | None = None
    rejected: list[Rejected] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    by_id: dict[str, Origin] = field(default_factory=dict)


def _import(path: str | Path, place: Path, renderer: TextRenderer | None) -> _Imported:
    """``gymdata import`` of ``path`` into ``place``; ``renderer``: of its text."""
    sources, form = foreign_sources([path], None, {})
    imported = _Imported(form)
    importing = Importing(secrets.token_hex(8), Numbering(text=form.holds_text), imported.rejected.append)

    def batches() -> Iterator[object]:
        parts = imported_batches(form, sources, importing)
        for part in parts if renderer is None else rendered(parts, renderer, TABLES[form.table], importing):
            extra = part.batch.column("extra").to_pylist() if form.table == "rollouts" else []
            kept = [is_rollout(text) for text in extra] or [True] * len(part.origins)
            imported.origins += [origin for origin, is_kept in zip(part.origins, kept, strict=True) if is_kept]
            names = part.batch.column("rollout_id").to_pylist() if form.table == "rollouts" else []
            for name, origin in zip(names, part.origins, strict=False):
                imported.by_id.setdefault(name, origin)
            yield part.batch

    summary = ImportSummary(str(place), form.name, files=[str(source.path) for source in sources])
    with StageOutput(place, "import") as out:
        ImportedRows(summary, imported.rejected).write(batches(), TABLES[form.table], out, "parquet")
        out.finish({"format": form.name, "counts": summary.counts()})
    warn_of_unread(form, importing)
    return imported


def _checked(path: str | Path, place: str | Path, imported: _Imported, model: str | None) -> DataReport:
    """The report of ``path``, whose rows are at ``place``."""
    report, form, figures = validate(place, tokenizer=model), imported.form, _Figures()
    kinds = {source: kind_of(source) for source in sources_of(place)}
    is_pairs = "pairs" in kinds.values()
    bad = rows_with_errors(report.violations)
    with reading(allow_changed=True, report=lambda _: None):  # findings name what is wrong
        for source, kind in kinds.items():
            for batch in evidence_in(source, kind) if kind != "pairs" else ():
                if isinstance(batch, Evidence):
                    figures.add(batch, bad.get(str(source.path), ()))
    failed = Counter(
        short_reason({"kind": row.get("kind"), "reason": row.get("message")}) for row in read_failures(place)
    )
    rejected = Counter(row.code for row in imported.rejected)
    has_text = form is not None and form.holds_text and report.rollouts > 0 and not report.tokens
    verdict, ok = _verdict(report, figures, len(imported.rejected), has_text, is_pairs)
    return DataReport(
        path=str(path),
        what=_what(place, form, report.state),
        table="pairs" if is_pairs else "rollouts",
        format=None if form is None else form.name,
        is_imported=form is not None and not form.read_in_place,
        validation=report,
        rejected=dict(sorted(rejected.items())),
        failures=dict((failed + Counter(report.masked)).most_common()),
        log_probs=_log_probs(report, figures),
        groups=figures.groups(),
        trainers=_of_pairs(report, has_text) if is_pairs else _trainers(report, figures, has_text),
        findings=_findings(report, imported),
        verdict=verdict,
        ok=ok,
    )


def _what(place: str | Path, form: Format | None, state: str) -> str:
    if form is not None:
        return f"{form.content} (format {form.name})"
    run_json = find_run_json(place)
    if run_json is None:
        return "rows of gymdata, without a run.json"
    facts: RunFacts = read_facts(run_json)
    policy = facts.get("policy") or (facts.get("config") or {}).get("model")
    words = [f"gymdata {facts.get('stage', 'unknown')}", *([str(policy)] if policy else []), state]
    return ", ".join(filter(None, words))


@dataclass(slots=True)
class _Figures:
    """One entry per rollout that could be read: its group, its reward (NaN: none), its generated tokens, and whether it can
    be trained as it was sampled, or as it was rendered from text."""

    group: list[str] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    rendered: list[bool] = field(default_factory=list)

    def add(self, e: Evidence, bad: Collection[int]) -> None:
        """Count a batch; ``bad``: the rows of its file with errors."""
        sound = e.turns.has_ids()
        sound[list(e.failures)] = False
        sound &= ~np.isin(e.rows, list(bad))
        rendered = e.turns.has_rendered()
        self.sampled += (sound & ~rendered).tolist()
        self.rendered += (sound & rendered).tolist()
        self.tokens += e.turns.by_rollout(e.turns.generation).lengths.tolist()
        first = len(self.group)
        names = [None] * e.n if e.group_id is None else e.group_id
        self.group += [f"row {first + row}" if name is None else name for row, name in enumerate(names)]
        if e.reward is None or e.reward_null is None:
            self.reward += [np.nan] * e.n
        else:
            self.reward += np.where(e.reward_null, np.nan, e.reward).tolist()

    def of_groups(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(n,) the number of each one's group; of each group how many rewards it has, and whether they differ."""
        reward = np.array(self.reward, np.float64)
        names, group = np.unique(np.array(self.group, object).astype(str), return_inverse=True)
        scored = np.isfinite(reward)
        lowest, highest = np.full(len(names), np.inf), np.full(len(names), -np.inf)
        np.minimum.at(lowest, group[scored], reward[scored])
        np.maximum.at(highest, group[scored], reward[scored])
        return group, np.bincount(group[scored], minlength=len(names)), highest > lowest

    def groups(self) -> dict[str, int]:
        _, scored, differ = self.of_groups()
        several = scored > 1
        return {
            "n": len(scored),
            "of_several": int(several.sum()),
            "without_signal": int((several & ~differ).sum()),
        }


def _trainers(report: ValidationReport, figures: _Figures, has_text: bool) -> list[Usable]:
    group, _, differ = figures.of_groups()
    sampled, tokens = np.array(figures.sampled, bool), np.array(figures.tokens, np.int64)
    scored = np.isfinite(np.array(figures.reward, np.float64))
    signal = scored & differ[group] if len(group) else scored
    rendered = sum(figures.rendered)
    extra = f"and {rendered:,} rendered from text, with --allow-rendered" if rendered else ""
    extra = _as_text(report) if has_text else extra
    pairs = sampled & signal
    groups = f"in {counted(len(np.unique(group[pairs])), 'group')} with signal"
    lacking = "refused: no log-probabilities are known (L302)"
    refused = lacking if _without_log_probs(report) else ""
    for code in ("L306", "L304"):
        refused = refused or (f"refused: {code} {CODES[code].name}" if code in report.by_code else "")
    value = sampled & scored, "that have a reward"
    uses = {
        "train-sft": (sampled, extra),
        "train-dpo, train-reward": (pairs, groups),
        "train-kto": (pairs, groups),
        "train-value": (pairs & False, lacking) if refused == lacking else value,
        "train-rl": (pairs & False, refused) if refused else (pairs, groups),
    }
    return [Usable(name, int(of.sum()), int(tokens[of].sum()), why) for name, (of, why) in uses.items()]


def _without_log_probs(report: ValidationReport) -> bool:
    """Whether the source gave none in a whole file."""
    return any(v.code == "L302" and v.severity == "warning" for v in report.violations)


def _of_pairs(report: ValidationReport, has_text: bool) -> list[Usable]:
    why = _as_text(report) if has_text else ""
    return [Usable("train-dpo, train-reward", report.trainable, report.tokens, why)]


def _as_text(report: ValidationReport) -> str:
    return f"and {report.rollouts:,} as text: -m renders their ids (T213)"


def _log_probs(report: ValidationReport, figures: _Figures) -> str:
    for code, words in _LOG_PROBS.items():
        if found := [v for v in report.violations if v.code == code]:
            rollouts = counted(len({(v.file, v.row) for v in found}), "rollout")
            detail = f": {found[0].detail}" if "{}" not in words and found[0].detail else ""
            return f"{words.format(rollouts)} ({code}){detail}"
    if any(figures.sampled):
        return "plausible"
    return "none: ids were rendered from text (T213)" if any(figures.rendered) else "none"


def _findings(report: ValidationReport, imported: _Imported) -> list[Finding]:
    """By severity, and then by how many rows have it; rows that were rejected are errors."""
    found: dict[str, list[Violation]] = {}
    for violation in report.violations:
        found.setdefault(violation.code, []).append(violation)
    places = _Places(imported, [violations[0] for violations in found.values()])
    findings = []
    for code, violations in found.items():
        first = violations[0]
        sides = [f"{name} {value}" for name, value in (("expected", first.expected), ("got", first.got)) if value]
        detail = "; ".join(filter(None, (places.named_in(first), *sides)))
        severity = first.severity or CODES[code].severity
        findings.append(Finding(code, CODES[code].name, severity, len(violations), places.of(first), detail))
    by_code: dict[str, list[Rejected]] = {}
    for row in imported.rejected:
        by_code.setdefault(row.code, []).append(row)
    for code, rows in by_code.items():
        where = str(Origin(rows[0].file, rows[0].line))
        findings.append(Finding(code, "rejected by import", "error", len(rows), where, rows[0].reason))
    order = ("error", "warning", "info")
    return sorted(findings, key=lambda f: (order.index(f.severity), -f.times))


class _Places:
    """Where violations are, in the file that was given."""

    def __init__(self, imported: _Imported, violations: Sequence[Violation]) -> None:
        self._origins, self._by_id = imported.origins, imported.by_id
        rows: dict[str, set[int]] = {}
        for v in violations:
            rows.setdefault(v.file or "", set()).add(v.row)
        self._lines = {} if self._origins else {file: line_numbers(file, of) for file, of in rows.items() if file}

    def named_in(self, v: Violation) -> str | None:
        """The detail, which names rows of an import by their place in the file that was given."""
        if not self._origins or v.detail is None:
            return v.detail
        detail = re.sub(rf"{re.escape(v.file or '')} row (\d+)", lambda row: str(self._origins[int(row[1])]), v.detail)
        return re.sub(r"\b[0-9a-f]{32}\b", lambda name: str(self._by_id.get(name[0], name[0])), detail)

    def of(self, v: Violation) -> str:
        line = self._lines.get(v.file or "", {}).get(v.row)
        if v.row < len(self._origins):
            parts = [str(self._origins[v.row])]
        else:
            parts = [f"{v.file} row {v.row}" if line is None else f"{v.file} line {line}"] if v.file else []
        parts += [f"turn {v.turn}"] if v.turn is not None else []
        parts += [f"position {v.position}"] if v.position is not None else []
        return ", ".join(parts)


def _verdict(
    report: ValidationReport, figures: _Figures, rejected: int, has_text: bool, is_pairs: bool
) -> tuple[str, bool]:
    """The answer in a sentence, and whether training on all of it would be right."""
    noun, n_rows = "pair" if is_pairs else "rollout", report.rollouts + rejected
    n, total = report.trainable if is_pairs else sum(figures.sampled), counted(n_rows, noun)
    of = f"{n:,} of {n_rows:,} {noun}s"
    if report.errors or rejected:
        if n:
            return f"not as it is: {of} have sampled token ids and no error", False
        return f"no: none of {total} has sampled token ids and no error", False
    if n and not is_pairs and _without_log_probs(report):
        return f"not with ratios: {of} have token ids, but no log-probabilities are known (L302)", False
    if "L306" in report.by_code:
        return f"not with ratios: {of} have token ids, but their log-probabilities cannot be a sampler's (L306)", False
    if n:
        return f"yes: {of} can be trained as they were sampled", True
    if rendered := sum(figures.rendered):
        return f"only with --allow-rendered: the ids of {rendered:,} of {total} were rendered from text (T213)", True
    if has_text:
        return f"only as text: {total} without token ids, which `-m` renders (T213)", True
    return f"no: none of {total} has token ids", False


def _counts(counts: Mapping[str, int]) -> str:
    """``3 T201 re-tokenized, 1 T202 re-templated``, the first of them."""
    parts = [f"{n:,} {name}" for name, n in list(counts.items())[:_WORST]]
    more = len(counts) - len(parts)
    return ", ".join(parts) + (f" and {counted(more, 'other reason')}" if more else "")


def is_rollouts(path: str) -> bool:
    """Whether a path argument of ``check`` names rollouts, not a model: a file, a glob, a URL of one, or a folder without
    the files of a model or tokenizer. What is not there is the name of a model, unless it ends as a file of rows does."""
    place = Path(path)
    if place.is_dir():
        return not any((place / name).is_file() for name in _OF_MODELS)
    if path.startswith(("http://", "https://")) or not (place.is_file() or is_url(path) or has_magic(path)):
        return place.suffix in _SUFFIXES
    return True
