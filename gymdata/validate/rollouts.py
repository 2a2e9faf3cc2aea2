"""Validation of a path: every file's batches through the checks, into one report.

Invariants: memory is bounded by a few batches plus ids, hashes and numbers of each rollout, in arrays; violations come in
the order of files and rows; nothing is changed, and no token is judged by its text unless a decoder is given.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gymdata.rollouts import checks
from gymdata.rollouts.breaks import Reader
from gymdata.rollouts.logprobs import sampling_biases
from gymdata.rollouts.ragged import Ints
from gymdata.rollouts.turn_columns import Evidence
from gymdata.rollouts.violations import CODES, Selection, ValidationReport, Violation, rows_with_errors
from gymdata.store.paths import Source, resolve, sealed_twin
from gymdata.validate import json_rows as validate_rows
from gymdata.validate.behavior import Behavior
from gymdata.validate.json_columns import UnknownKey
from gymdata.workers.processes import in_order
from gymdata.workers.tuning import give_back


def validate_rollouts(
    sources: Sequence[Source],
    *,
    selection: Selection,
    run: Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    reader: Reader | None = None,
    workers: int = 1,
) -> ValidationReport:
    """The report over the rollouts in ``sources``. ``run`` is the run.json that describes them, when there is one.

    ``reader`` loads the tokenizer; it is called at the first break. ``workers``: processes that check parts of the
    files.
    """
    report = ValidationReport(files=[str(source.path) for source in sources])
    across, behavior = checks.AcrossRows(), Behavior()
    check = _Check(
        selection.wants("T209"),
        # Texts are read only for this.
        any(code.startswith("B") for code in selection.select - selection.ignore),
        vocab_size if vocab_size is not None else vocabulary(run or {}),
        names_reward(run or {}),
        reader,
    )
    sampled_greedily = any_log_prob = False
    #: The rows with token ids of each file.
    with_ids: dict[str, list[Ints]] = {}
    found: list[Violation] = []
    checked = _checked_in_order(check, sources, across, behavior, workers)
    for file, of_file in itertools.groupby(checked, lambda one: one.file):
        here: list[Violation] = []
        strange: dict[str, UnknownKey] = {}
        before = report.tokens
        for one in of_file:
            report.rollouts += one.rollouts
            report.turns += one.turns
            report.tokens += one.tokens
            sampled_greedily = sampled_greedily or one.greedy
            any_log_prob = any_log_prob or one.log_probs
            with_ids.setdefault(file, []).append(one.with_ids)
            here += one.found
            for key, seen in one.strange.items():
                strange.setdefault(key, UnknownKey(seen.first)).rows += seen.rows
        here += validate_rows.unknown_keys(strange)
        found += (
            v if v.file else v._replace(file=file)
            for v in downgrade_t205(sorted(here, key=_place), report.tokens > before)
        )
    found += across.finish() + behavior.finish()
    settings = (run or {}).get("identity") or {}
    # Without a single log-probability none is biased.
    if any_log_prob and (biases := sampling_biases({**({"temperature": 0.0} if sampled_greedily else {}), **settings})):
        found.append(Violation("L304", 0, detail=", ".join(biases), file=report.files[0] if report.files else None))
    report.trainable = _without_errors(with_ids, found)
    order = {file: index for index, file in enumerate(report.files)}
    report.violations = sorted(selection.apply(found), key=lambda v: (order.get(v.file or "", 0), *_place(v)))
    return report


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
    found: list[Violation] = field(default_factory=list)
    strange: dict[str, UnknownKey] = field(default_factory=dict)


@dataclass(slots=True)
class _Check:
    """The checks of a file or a part of one."""

    digests: bool
    behaves: bool
    vocab_size: int | None
    reward_named: bool
    reader: Reader | None

    def batches(self, source: Source, across: checks.AcrossRows, behavior: Behavior) -> Iterator[_Checked]:
        """The findings, batch by batch; ``across`` and ``behavior`` collect the data that they need."""
        file = str(source.path)
        rest = _Checked(file)
        for batch in _scan(source, self.behaves, rest.strange):
            if isinstance(batch, Violation):
                yield _Checked(file, found=[batch])
                continue
            across.add(batch, file)
            made = self._batch(batch, file)
            if self.behaves:
                made.found += behavior.add(batch, file)
            yield made
            # It would grow with the number of batches.
            give_back()
        yield rest

    def _batch(self, batch: Evidence, file: str) -> _Checked:
        found = checks.check_batch(
            batch,
            vocab_size=self.vocab_size,
            reward_named=self.reward_named,
            digests=self.digests,
            reader=self.reader,
        )
        return _Checked(
            file,
            batch.n,
            len(batch.turns),
            batch.n_tokens,
            batch.temperature is not None and bool((batch.temperature == 0).any()),
            bool(np.isfinite(batch.turns.logprobs.values).any()),
            batch.rows[batch.turns.has_ids()],
            found,
        )

    def __call__(self, source: Source) -> Iterator[tuple[list[_Checked], checks.AcrossRows, Behavior]]:
        """All of a file, in a worker."""
        across, behavior = checks.AcrossRows(), Behavior()
        yield list(self.batches(source, across, behavior)), across, behavior


def _checked_in_order(
    check: _Check, sources: Sequence[Source], across: checks.AcrossRows, behavior: Behavior, workers: int
) -> Iterator[_Checked]:
    if workers == 1:
        for source in sources:
            yield from check.batches(source, across, behavior)
        return
    with contextlib.closing(in_order(check, sources, workers, lambda source: str(source.path))) as done:
        for parts, rows, seen in done:
            across.append(rows)
            behavior.append(seen)
            yield from parts


def _without_errors(with_ids: Mapping[str, Sequence[Ints]], found: Iterable[Violation]) -> int:
    """How many of the rows of each file have none of the errors that were found."""
    bad: dict[str | None, list[int]] = {}
    for file, row in rows_with_errors(found):
        bad.setdefault(file, []).append(row)
    whole = {file: np.concatenate(parts) for file, parts in with_ids.items()}
    return sum(int((~np.isin(rows, bad.get(file, []))).sum()) for file, rows in whole.items())


def behavior_of(path: str | Path) -> dict[str, str]:
    """The behavior findings alone, by code: the count, or the text."""
    behavior, found = Behavior(), list[Violation]()
    for source in resolve(path):
        for batch in _scan(source, True, {}):
            if isinstance(batch, Evidence):
                found += behavior.add(batch, str(source.path))
    counts = Counter(v.code for v in found)
    lines = {code: f"{CODES[code].meaning}: {_many(n)}" for code, n in sorted(counts.items())}
    return lines | {v.code: v.detail or CODES[v.code].meaning for v in behavior.finish()}


def _many(n: int) -> str:
    return f"{n:,} time" + ("" if n == 1 else "s")


def downgrade_t205(found: list[Violation], has_ids: bool) -> list[Violation]:
    """T205 is a warning when a whole file has no ids, for then it is a file of texts and not a damaged one."""
    return found if has_ids else [v._replace(severity="warning") if v.code == "T205" else v for v in found]


def _place(v: Violation) -> tuple[int, int, str, int]:
    return v.row, -1 if v.turn is None else v.turn, v.code, v.position or 0


def _scan(source: Source, texts: bool, strange: dict[str, UnknownKey]) -> Iterator[Evidence | Violation]:
    if source.kind == "parquet":
        # Late, so that JSON lines are validated without pyarrow.
        from gymdata.validate import parquet as validate_parquet

        return validate_parquet.scan(source.path, texts, source.part)
    if source.kind == "journal" and not source.path.exists() and (sealed := sealed_twin(source.path)) is not None:
        # The run sealed it since it was found.
        return _scan(sealed, texts, strange)
    return validate_rows.scan(source, strange)


def names_reward(run: Mapping[str, Any]) -> bool:
    """Whether run.json says that its rollouts were to be scored."""
    config = run.get("config") or {}
    places: list[Any] = [run.get("rewards"), run.get("reward")]
    if isinstance(config, Mapping):
        places += [config.get("rewards"), config.get("reward")]
    identity = run.get("identity")
    if isinstance(identity, Mapping):
        places += [identity.get("rewards"), identity.get("reward")]
    return any(bool(p) for p in places)


def vocabulary(run: Mapping[str, Any]) -> int | None:
    """The vocabulary's size from run.json: the model's if the engine reported it, else the tokenizer's."""
    for part in (run.get("engine"), run.get("chat")):
        if isinstance(part, Mapping) and isinstance(part.get("vocab_size"), int):
            return int(part["vocab_size"])
    return None
