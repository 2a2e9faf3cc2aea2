"""Validation of rollouts: every file's batches through the checks, into one report.

Invariants: memory is bounded by a few batches plus ids, hashes and numbers of each rollout, in arrays; nothing is changed,
and no token is judged by its text unless a decoder is given. NeMo Gym rows are validated without loading pyarrow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gymdata.checks.batches import Checks
from gymdata.checks.breaks import Reader
from gymdata.checks.codes.behavior import Behavior
from gymdata.checks.violations import CODES, Check, CheckSettings, ValidationReport, Violation
from gymdata.errors import DataError, UsageError, counted
from gymdata.formats.nemo_gym import batches as nemo_rows
from gymdata.rollouts.logprobs import sampling_biases
from gymdata.rollouts.ragged import Ints
from gymdata.rollouts.turn_columns import Evidence
from gymdata.store.paths import RunFacts, Source, find_run_json, read_facts, resolve, run_jsons
from gymdata.store.run_json import agreed
from gymdata.workers.tuning import give_back

#: What the rows of a file are.
Kind = Literal["rollouts", "pairs", "nemo"]
#: ``path.py:Class``, or the class.
UserCheck = str | type[Check]


@dataclass(slots=True)
class CheckedFile:
    """A file, and what was found in it alone."""

    name: str
    violations: list[Violation] = field(default_factory=list)
    #: The rows that can be trained unless they have an error, batch by batch.
    with_ids: list[Ints] = field(default_factory=list)
    #: The settings that rows name, each with its first row; of gymdata's own the temperature alone, where it is 0.
    settings: dict[str, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)
    has_log_probs: bool = False
    #: A file of gymdata's rollouts, whose rows may have heads.
    source: Source | None = None

    def n_trainable(self, bad: Collection[int]) -> int:
        """How many rows can be trained; ``bad``: those with errors."""
        return sum(int((~np.isin(rows, list(bad))).sum()) for rows in self.with_ids)


def check_rollouts(source: Source, kind: Kind, checks: Checks, report: ValidationReport) -> CheckedFile:
    """What is found in a file of rollouts, which is counted in ``report``."""
    file, has_ids = CheckedFile(str(source.path), source=source if kind == "rollouts" else None), False
    for batch in evidence_in(source, kind):
        if isinstance(batch, Violation):
            file.violations.append(batch._replace(file=file.name))
            continue
        batch.file = file.name
        trained = batch.turns.has_ids()
        trained[list(batch.failures)] = False  # never trained
        file.with_ids.append(batch.rows[trained])
        file.has_log_probs |= bool(np.isfinite(batch.turns.logprobs.values).any())
        has_ids |= batch.n_tokens > 0
        report.rollouts += batch.n
        report.turns += len(batch.turns)
        report.tokens += batch.n_tokens
        for row, settings in zip(batch.rows.tolist(), batch.settings, strict=False):
            if settings:
                file.settings.setdefault(repr(settings), (row, settings))
        if batch.temperature is not None and (batch.temperature == 0).any():
            file.settings["greedy"] = 0, {"temperature": 0.0}
        file.violations += checks.find(batch)
        # It would grow with the number of batches.
        give_back()
    # A file of texts, or one whose sampler gave no log-probabilities, and not a damaged one.
    lacks = {"T205"} if not has_ids else {"L302"} if not file.has_log_probs else set()
    for number, violation in enumerate(file.violations):
        if violation.code in lacks and violation.position is None:
            file.violations[number] = violation._replace(severity="warning")
    return file


def biased(files: Sequence[CheckedFile], runs: Mapping[Path, RunFacts]) -> Iterator[Violation]:
    """L304: once for a run with settings that make log-probabilities biased, and for each such settings of a file's rows;
    not for a file in which each head is all that these could sample."""
    reported = set[tuple[object, str]]()
    for file in files:
        if not file.has_log_probs:
            continue  # none is biased
        run_json = find_run_json(file.name)
        of_run = runs.get(run_json, {}).get("identity", {}) if run_json is not None else {}
        for row, settings in file.settings.values() or [(0, {})]:
            chosen = {**settings, **of_run}
            biases, why_not = ", ".join(sampling_biases(chosen)), ""
            once = run_json or file.name, biases
            if not biases or once in reported:
                continue
            if file.source is not None and not sampling_biases(chosen, kept_sets=True):
                all_kept, why_not = _kept_sets(file.source)
                if all_kept:
                    continue
            reported.add(once)
            yield Violation("L304", row, detail="; ".join(filter(None, (biases, why_not))), file=file.name)


def _kept_sets(source: Source) -> tuple[bool, str]:
    """Whether a file's heads are kept sets, and why not where it has heads."""
    from gymdata.commands.validate import scan  # late: it loads pyarrow

    try:
        kept = scan.kept_sets(source)
    except DataError as error:
        return False, error.message
    return kept.all_kept, kept.fault()


def evidence_in(source: Source, kind: Kind) -> Iterator[Evidence | Violation]:
    """The batches of a file, and violations for what is in none."""
    if kind == "nemo":
        return nemo_rows.scan(source)
    from gymdata.commands.validate import scan  # late: it loads pyarrow

    return scan.scan(source)


def load_checks(user_checks: Sequence[UserCheck]) -> list[type[Check]]:
    """The checks that a user gives, as ``path.py:Class`` or the class itself; their codes are known from then on. Raises
    UsageError."""
    checks = []
    for check in user_checks:
        from gymdata.user_code import load_symbol

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
    behavior, counts = Behavior(settings_of(run)), Counter[str]()
    for source in resolve(path):
        for batch in evidence_in(source, "rollouts"):
            if isinstance(batch, Evidence):
                counts.update(violation.code for violation in behavior.find(batch))
    lines = {code: f"{CODES[code].meaning}: {counted(n, 'time')}" for code, n in sorted(counts.items())}
    return lines | {v.code: v.detail or CODES[v.code].meaning for v in behavior.finish()}


def settings_of(run: RunFacts, vocab_size: int | None = None, reader: Reader | None = None) -> CheckSettings:
    """What checks know besides the rows. ``vocab_size``: by default that of the model, if the engine reported it in
    run.json, else of the tokenizer. Rewards of the weight 0 are measured, and no part of the reward."""
    sizes = [vocab_size, *((run.get(part) or {}).get("vocab_size") for part in ("engine", "chat"))]
    rewards = run.get("identity", {}).get("rewards") or ()
    return CheckSettings(
        vocab_size=next((size for size in sizes if isinstance(size, int)), None),
        reward_named=bool(rewards or run.get("config", {}).get("reward")),
        reader=reader,
        unweighted=frozenset(str(r.get("name")) for r in rewards if isinstance(r, Mapping) and r.get("weight") == 0),
    )
