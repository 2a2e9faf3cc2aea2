"""Validation of a path: every file's batches through the checks, into one report.

Invariants: memory is bounded by a few batches plus ids, hashes and numbers of each rollout, in arrays; violations come in
the order of files and rows; nothing is changed, and no token is judged by its text unless a decoder is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gymdata.checks.batches import Checks, sort_key
from gymdata.checks.breaks import Reader
from gymdata.checks.codes.behavior import Behavior
from gymdata.checks.violations import (
    CODES,
    Check,
    CheckSettings,
    Selection,
    UnknownKey,
    ValidationReport,
    Violation,
    rows_with_errors,
)
from gymdata.errors import UsageError, counted
from gymdata.formats.nemo_gym import batches as nemo_rows
from gymdata.rollouts.logprobs import sampling_biases
from gymdata.rollouts.ragged import Ints
from gymdata.rollouts.turn_columns import Evidence
from gymdata.store.paths import RunFacts, Source, find_run_json, read_facts, resolve, run_jsons
from gymdata.store.run_json import agreed
from gymdata.workers.tuning import give_back


def validate_rollouts(
    sources: Sequence[Source],
    *,
    selection: Selection,
    runs: Mapping[Path, RunFacts],
    vocab_size: int | None = None,
    reader: Reader | None = None,
    user_checks: Sequence[UserCheck] = (),
    kind: Kind = "rollouts",
) -> ValidationReport:
    """The report over the rollouts in ``sources``. ``runs``: the run.json files that describe them.

    ``reader`` loads the tokenizer; it is called at the first break. ``user_checks``: those of the user; ``kind``: of the
    files' rows.
    """
    report = ValidationReport(files=list(dict.fromkeys(str(source.path) for source in sources)))
    run = agreed(list(runs.values()))
    settings = CheckSettings(
        vocab_size if vocab_size is not None else vocabulary(run),
        names_reward(run),
        selection.wants("T209"),
        reader,
        unweighted(run),
    )
    checks = Checks(settings, selection, load_checks(user_checks))
    files = {source.path: _checked(checks, source, kind, report) for source in sources}
    violations = [v for found in files.values() for v in found.violations]
    violations += checks.finish()
    greedy: dict[str, Any] = {"temperature": 0.0} if any(found.greedy for found in files.values()) else {}
    described: list[tuple[Path | None, RunFacts]] = [*runs.items()] or [(None, {})]
    for run_json, facts in described if any(found.log_probs for found in files.values()) else ():
        if biases := sampling_biases({**greedy, **(facts.get("identity") or {})}):
            of_run = (file for file in report.files if len(runs) < 2 or find_run_json(file) == run_json)
            violations.append(Violation("L304", 0, detail=", ".join(biases), file=next(of_run, None)))
    # The rows of each file that have none of the errors that were found.
    bad: dict[str | None, list[int]] = {}
    for of, row in rows_with_errors(violations):
        bad.setdefault(of, []).append(row)
    report.trainable = sum(
        int((~np.isin(rows, bad.get(str(file), []))).sum()) for file, found in files.items() for rows in found.with_ids
    )
    order = {file: index for index, file in enumerate(report.files)}
    report.violations = sorted(selection.apply(violations), key=lambda v: (order.get(v.file or "", 0), *sort_key(v)))
    return report


#: What the rows of a file are.
Kind = Literal["rollouts", "pairs", "nemo", "tasks", "foreign"]
#: ``path.py:Class``, or the class.
UserCheck = str | type[Check]


@dataclass(slots=True)
class _Found:
    """The findings in a file: all that need no other one."""

    violations: list[Violation] = field(default_factory=list)
    #: The rows with token ids, batch by batch.
    with_ids: list[Ints] = field(default_factory=list)
    #: Whether any temperature is 0, and whether there is any log-probability, and any id.
    greedy: bool = False
    log_probs: bool = False
    has_ids: bool = False


def _checked(checks: Checks, source: Source, kind: Kind, report: ValidationReport) -> _Found:
    """The findings in a file, which is counted in ``report``."""
    found, file, in_file = _Found(), str(source.path), list[Violation]()
    strange: dict[str, UnknownKey] = {}
    #: The settings that rows name, each with its first row.
    sampled: dict[str, tuple[int, Mapping[str, Any]]] = {}
    for batch in _scan(source, checks.texts, strange, kind):
        if isinstance(batch, Violation):
            in_file.append(batch)
            continue
        batch.file = file
        trained = batch.turns.has_ids()
        trained[list(batch.failures)] = False  # never trained
        found.with_ids.append(batch.rows[trained])
        found.has_ids |= bool(trained.any() if batch.foreign else batch.n_tokens)
        found.log_probs |= bool(np.isfinite(batch.turns.logprobs.values).any())
        found.greedy |= batch.temperature is not None and bool((batch.temperature == 0).any())
        report.rollouts += batch.n
        report.turns += len(batch.turns)
        report.tokens += batch.n_tokens
        for row, settings in zip(batch.rows.tolist(), batch.settings, strict=False):
            if settings:
                sampled.setdefault(repr(settings), (row, settings))
        in_file += checks.find(batch)
        # It would grow with the number of batches.
        give_back()
    for key, unknown in strange.items():
        detail = f"unknown key {key!r} in {counted(unknown.rows, 'row')}: other commands refuse it, --fix leaves it out"
        fault = Violation("S102", unknown.first, expected="a column of the table", got=key, detail=detail)
        in_file.append(fault._replace(severity="warning"))
    ordered = downgrade_t205(sorted(in_file, key=sort_key), found.has_ids)
    found.violations += (v if v.file else v._replace(file=file) for v in ordered)
    # Without a single log-probability none is biased.
    for row, settings in sampled.values() if found.log_probs else ():
        if biases := sampling_biases(settings):
            found.violations.append(Violation("L304", row, detail=", ".join(biases), file=file))
    return found


def load_checks(user_checks: Sequence[UserCheck]) -> list[type[Check]]:
    """The checks that a user gives, as ``path.py:Class`` or the class itself; their codes are known from then on. Raises
    UsageError."""
    checks = []
    if user_checks:
        from gymdata.user_code import load_symbol
    for check in user_checks:
        kind = load_symbol(check, "--check")[0] if isinstance(check, str) else check
        if not (isinstance(kind, type) and issubclass(kind, Check) and kind.codes):
            expected = "path.py:Class of a gymdata.checks.violations.Check with a code"
            raise UsageError.bad_value("--check", str(check), expected)
        for code in kind.codes:
            CODES.add(code)
        checks.append(kind)
    return checks


def behavior_of(path: str | Path) -> dict[str, str]:
    """The behavior findings alone, by code: the count, or the text."""
    run = agreed([read_facts(run_json) for run_json in run_jsons(path)])
    behavior, violations = Behavior(CheckSettings(unweighted=unweighted(run))), list[Violation]()
    for source in resolve(path):
        for batch in _scan(source, True, {}):
            if isinstance(batch, Evidence):
                violations += behavior.find(batch)
    counts = Counter(v.code for v in violations)
    lines = {code: f"{CODES[code].meaning}: {counted(n, 'time')}" for code, n in sorted(counts.items())}
    return lines | {v.code: v.detail or CODES[v.code].meaning for v in behavior.finish()}


def downgrade_t205(violations: list[Violation], has_ids: bool) -> list[Violation]:
    """T205 is a warning when a whole file has no ids, for then it is a file of texts and not a damaged one."""
    return violations if has_ids else [v._replace(severity="warning") if v.code == "T205" else v for v in violations]


def _scan(
    source: Source, texts: bool, strange: dict[str, UnknownKey], kind: Kind = "rollouts"
) -> Iterator[Evidence | Violation]:
    if kind == "nemo":
        return nemo_rows.scan(source)
    # Late, so that NeMo Gym rows are validated without pyarrow.
    if kind == "foreign":
        from gymdata.commands.validate import foreign

        return foreign.scan(source)
    from gymdata.commands.validate import scan

    return scan.scan(source, strange, texts)


def names_reward(run: RunFacts) -> bool:
    """Whether run.json says that its rollouts were to be scored."""
    config = run.get("config") or {}
    named: list[Any] = [run.get("rewards"), run.get("reward")]
    if isinstance(config, Mapping):
        named += [config.get("rewards"), config.get("reward")]
    identity = run.get("identity")
    if isinstance(identity, Mapping):
        named += [identity.get("rewards"), identity.get("reward")]
    return any(bool(p) for p in named)


def unweighted(run: RunFacts) -> frozenset[str]:
    """The rewards of run.json that have the weight 0: they are measured, and no part of the reward."""
    identity = run.get("identity")
    rewards = identity.get("rewards") if isinstance(identity, Mapping) else None
    return frozenset(str(r.get("name")) for r in rewards or () if isinstance(r, Mapping) and r.get("weight") == 0)


def vocabulary(run: RunFacts) -> int | None:
    """The vocabulary's size from run.json: the model's if the engine reported it, else the tokenizer's."""
    for part in (run.get("engine"), run.get("chat")):
        if isinstance(part, Mapping) and isinstance(part.get("vocab_size"), int):
            return int(part["vocab_size"])
    return None
