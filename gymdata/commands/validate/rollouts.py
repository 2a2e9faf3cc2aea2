"""Validation of a path: every file's batches through the checks, into one report.

Invariants: memory is bounded by a few batches plus ids, hashes and numbers of each rollout, in arrays; violations come in
the order of files and rows; nothing is changed, and no token is judged by its text unless a decoder is given.
"""

from __future__ import annotations

import itertools
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
from gymdata.store.paths import RunFacts, Source, find_run_json, read_facts, resolve, run_jsons, sealed
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
    sampled_greedily = any_log_prob = False
    #: The rows with token ids of each file.
    with_ids: dict[str, list[Ints]] = {}
    violations: list[Violation] = []
    checked = (part for source in sources for part in _checked(checks, source, kind))
    for file, of_file in itertools.groupby(checked, lambda part: part.file):
        in_file: list[Violation] = []
        strange: dict[str, UnknownKey] = {}
        has_ids = logged = False
        sampled: dict[str, tuple[int, Mapping[str, Any]]] = {}
        for part in of_file:
            report.rollouts += part.rollouts
            report.turns += part.turns
            report.tokens += part.tokens
            sampled_greedily = sampled_greedily or part.greedy
            any_log_prob = any_log_prob or part.log_probs
            with_ids.setdefault(file, []).append(part.with_ids)
            has_ids = has_ids or part.has_ids
            logged = logged or part.log_probs
            for row, row_settings in part.sampled:
                sampled.setdefault(repr(row_settings), (row, row_settings))
            in_file += part.violations
            for key, unknown in part.strange.items():
                strange.setdefault(key, UnknownKey(unknown.first)).rows += unknown.rows
        for key, unknown in strange.items():
            detail = (
                f"unknown key {key!r} in {counted(unknown.rows, 'row')}: other commands refuse it, --fix leaves it out"
            )
            expected = "a column of the table"
            in_file.append(
                Violation("S102", unknown.first, expected=expected, got=key, detail=detail, severity="warning")
            )
        violations += (
            v if v.file else v._replace(file=file) for v in downgrade_t205(sorted(in_file, key=sort_key), has_ids)
        )
        # Without a single log-probability none is biased.
        for row, row_settings in sampled.values() if logged else ():
            if biases := sampling_biases(row_settings):
                violations.append(Violation("L304", row, detail=", ".join(biases), file=file))
    violations += checks.finish()
    greedy: dict[str, Any] = {"temperature": 0.0} if sampled_greedily else {}
    described: list[tuple[Path | None, RunFacts]] = [*runs.items()] or [(None, {})]
    for run_json, facts in described if any_log_prob else ():
        if biases := sampling_biases({**greedy, **(facts.get("identity") or {})}):
            of_run = (file for file in report.files if len(runs) < 2 or find_run_json(file) == run_json)
            violations.append(Violation("L304", 0, detail=", ".join(biases), file=next(of_run, None)))
    # The rows of each file that have none of the errors that were found.
    bad: dict[str | None, list[int]] = {}
    for of, row in rows_with_errors(violations):
        bad.setdefault(of, []).append(row)
    rows_of = {file: np.concatenate(parts) for file, parts in with_ids.items()}
    report.trainable = sum(int((~np.isin(rows, bad.get(file, []))).sum()) for file, rows in rows_of.items())
    order = {file: index for index, file in enumerate(report.files)}
    report.violations = sorted(selection.apply(violations), key=lambda v: (order.get(v.file or "", 0), *sort_key(v)))
    return report


#: What the rows of a file are.
Kind = Literal["rollouts", "pairs", "nemo", "tasks", "foreign"]
#: ``path.py:Class``, or the class.
UserCheck = str | type[Check]


@dataclass(slots=True)
class _Checked:
    """The findings in a batch of a file, or besides its batches: all that need no other rows."""

    file: str
    rollouts: int = 0
    turns: int = 0
    tokens: int = 0
    #: Whether any temperature is 0, and whether there is any log-probability.
    greedy: bool = False
    log_probs: bool = False
    with_ids: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    violations: list[Violation] = field(default_factory=list)
    #: Whether there are token ids, so that a turn without lacks them; and the settings that rows name.
    has_ids: bool = False
    sampled: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    strange: dict[str, UnknownKey] = field(default_factory=dict)


def _checked(checks: Checks, source: Source, kind: Kind) -> Iterator[_Checked]:
    """The findings in a file, batch by batch."""
    file = str(source.path)
    rest = _Checked(file)
    for batch in _scan(source, checks.texts, rest.strange, kind):
        if isinstance(batch, Violation):
            yield _Checked(file, violations=[batch])
            continue
        batch.file = file
        has_ids = batch.turns.has_ids()
        has_ids[list(batch.failures)] = False  # never trained
        with_ids = batch.rows[has_ids]
        yield _Checked(
            file,
            batch.n,
            len(batch.turns),
            batch.n_tokens,
            batch.temperature is not None and bool((batch.temperature == 0).any()),
            bool(np.isfinite(batch.turns.logprobs.values).any()),
            with_ids,
            checks.find(batch),
            len(with_ids) > 0 if batch.foreign else batch.n_tokens > 0,
            [(row, chosen) for row, chosen in zip(batch.rows.tolist(), batch.settings, strict=False) if chosen],
        )
        # It would grow with the number of batches.
        give_back()
    yield rest


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
    source = sealed(source)
    if source.kind == "parquet":
        from gymdata.commands.validate import parquet

        return parquet.scan(source.path, texts)
    from gymdata.commands.validate import json_rows

    return json_rows.scan(source, strange)


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
