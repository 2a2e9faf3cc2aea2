"""Writing a repaired copy of native rollouts: clean rows as they are, faulty ones split, shortened or left out.

Invariants: the source is never written to; the copy validates without errors; the report counts every row that went
in.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa

from gymdata.checks import repair
from gymdata.checks.repair import FixReport
from gymdata.checks.violations import ValidationReport, Violation
from gymdata.commands.validate.run import kind_of, sources_of, validate
from gymdata.errors import UsageError
from gymdata.public import path_of
from gymdata.rollouts.logprobs import sampling_biases
from gymdata.rollouts.messages import RolloutRow
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.turn_columns import from_arrow
from gymdata.store import find_run_json
from gymdata.store.columns import Batch, build, to_rows
from gymdata.store.lineage import lineage
from gymdata.store.lines import decode, encode
from gymdata.store.paths import Source, local_output, read_facts, refuse_inputs
from gymdata.store.reading import reading
from gymdata.store.stage_output import single_file
from gymdata.store.tables import batches, stream_batches

_BATCH_ROWS = 4096


@reading(allow_changed=True)
def fix(path: str | Path, choice: repair.Choice, output: str | Path, *, overwrite: bool = False) -> FixReport:
    """Write a copy of the rollouts at ``path`` without errors, and say what that cost.

    ``choice``: ``split`` starts a new rollout at a break, ``truncate`` keeps the head before the first fault, ``drop``
    leaves the rollout out. ``output``: a new .parquet or .jsonl file. The source is never changed. Raises UsageError
    when ``output`` is the source, StoreError when it has other content (without ``overwrite``), UsageError for rows
    that are no rollouts of gymdata; DataError when a file cannot be read at all.
    """
    target = local_output(output)
    if choice not in repair.CHOICES:
        raise UsageError.unknown_choice("--fix", choice, repair.CHOICES)
    if target.suffix not in (".parquet", ".jsonl"):
        raise UsageError.bad_value("-o", str(output), "a new file ending in .parquet or .jsonl")
    path = path_of(path, "fix")
    sources = sources_of(path)
    refuse_inputs(target, [path], ROLLOUTS, "repaired")
    kinds = {kind_of(source) for source in sources}
    if kinds != {"rollouts"}:
        words = {"nemo": "NeMo Gym rows"}
        held = ", ".join(words.get(kind, kind) for kind in sorted(kinds)) or "nothing"
        hint = f"`gymdata import {path} -o RUN` first" if kinds == {"nemo"} else "give one file or run"
        raise UsageError(f"{path}: holds {held}; --fix repairs rollouts", hint=hint)
    account = FixReport(str(path), str(output), choice)
    with single_file(target, overwrite=overwrite) as temporary:
        account.notes += _unrecorded(target, [path])
        report = validate(path)
        # A changed file is not a fault of its rows.
        account.notes += [f"{v.file}: {v.detail}" for v in report.violations if v.code == "T209" and v.turn is None]
        report.violations = [v for v in report.violations if v.code != "T209" or v.turn is not None]
        rollouts = fixed_rollouts(sources, report, choice, account)
        stream_batches(rollouts, temporary, target.suffix, ROLLOUTS, ROLLOUTS.arrow)
    account.errors_after = validate(target).errors if account.rollouts_out else 0
    return account


def _unrecorded(file: Path, sources: Sequence[str | Path]) -> list[str]:
    """What an output that is one file, and has no run.json, does not record of how ``sources`` were sampled, as a note.

    Raises UsageError for a file in the folder of an output that ``sources`` do not come from: its run.json would be taken
    for that of the file.
    """
    runs = [facts for source in sources for facts in lineage(source)]
    if (around := find_run_json(file)) is not None:
        if read_facts(around) not in runs:
            hint = "give a file elsewhere, or a folder"
            raise UsageError(f"-o {file}: {around} would count as its run.json", hint=hint)
        return []
    identities = [identity for run in runs if (identity := run.get("identity"))]
    biases = sorted({reason for identity in identities for reason in sampling_biases(identity)})
    sampled = f" ({', '.join(biases)}: L304)" if biases else ""
    lost = f"how its rollouts were sampled{sampled}, and with which tokenizer, is not known to later commands"
    return [f"{file} is a single file, without a run.json: {lost}; a folder has one"] if identities else []


def fixed_rollouts(
    sources: Sequence[Source], report: ValidationReport, choice: repair.Choice, account: FixReport
) -> Iterator[pa.RecordBatch]:
    """The repaired rollouts of ``sources``, whose validation gave ``report``; counts in ``account``.

    Raises DataError when a whole file cannot be read, for what it held cannot be counted.
    """
    errors: dict[tuple[str | None, int], list[Violation]] = defaultdict(list)
    for v in report.violations:
        if v.severity == "error":
            errors[v.file, v.row].append(v)
    for source in sources:
        file = str(source.path)
        unreadable = {v.row for of_row in errors.values() for v in of_row if v.file == file and v.code.startswith("S")}
        for part in _readable(source, unreadable):
            account.rollouts_in += len(part.rows)
            errors_of = [errors.get((file, row), []) for row in part.rows.tolist()]
            for is_faulty, group in groupby(enumerate(errors_of), lambda indexed: bool(indexed[1])):
                indexed = list(group)
                if not is_faulty:
                    account.rollouts_out += len(indexed)
                    yield part.data.slice(indexed[0][0], len(indexed))
                    continue
                for index, faults in indexed:
                    # Through JSON, which is what builds a batch from rows.
                    rows = [decode(encode(row)) for row in _rollout(part.data.slice(index, 1), faults, choice, account)]
                    if rows:
                        account.rollouts_out += len(rows)
                        yield build(rows, ROLLOUTS, ROLLOUTS.schema.names, "repaired rollouts", list(range(len(rows))))
        account.rows_unreadable += len(unreadable)


def _readable(source: Source, unreadable: set[int]) -> Iterator[Batch]:
    """The rows of a file without those that are ``unreadable``, to which rows that do not fit are added, and without the
    keys that the table does not have."""
    for part in batches(source, ROLLOUTS, batch_size=_BATCH_ROWS):
        if isinstance(part, Batch):
            sound = part.only(~np.isin(part.rows, list(unreadable)))
            if len(sound.rows):
                yield sound
        elif part.kind == "file":
            raise part.error()
        elif part.kind == "row":
            unreadable.add(part.row)


def _rollout(
    batch: pa.RecordBatch, faults: list[Violation], choice: repair.Choice, account: FixReport
) -> list[RolloutRow]:
    account.rollouts_with_errors += 1
    for code, n in Counter(v.code for v in faults).items():
        account.by_code[code] = account.by_code.get(code, 0) + n
    evidence = from_arrow(batch, 0)
    turns = evidence.turns.structs(0)
    sizes = [len(t["generation_token_ids"]) for t in turns]
    unexpandable = [v.turn for v in faults if v.turn is not None and v.code in ("T205", "T209", "T210")]
    roots = repair.chain_roots(turns[: min(unexpandable, default=len(turns))])
    plans = {c: repair.plan(len(turns), roots, faults, c) for c in repair.CHOICES}
    for name, keep in plans.items():
        account.costs[name].count(sizes, keep)
    if not plans[choice]:
        return []
    (row,) = to_rows(batch)
    extra = json.loads(row["extra"] or "{}")
    extra["fixed"] = {"choice": choice, "rollout_id": row["rollout_id"], "codes": sorted({v.code for v in faults})}
    unread, rows = extra.get("unread_turns"), []
    for repaired, part in zip(repair.parts_of(row, plans[choice]), plans[choice], strict=True):
        if unread is not None:
            # Turns have other numbers in a part.
            extra["unread_turns"] = [n for n, turn in enumerate(part) if turn in unread]
        rows.append({**repaired, "extra": json.dumps(extra)})
    return rows
