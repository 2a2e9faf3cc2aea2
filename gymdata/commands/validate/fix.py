"""Writing a repaired copy of native rollouts: clean rows as they are, faulty ones split, shortened or left out.

Invariants: the source is never written to; the copy validates without errors; the report counts every row that went
in.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
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
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.turn_columns import from_arrow
from gymdata.store import find_run_json
from gymdata.store.columns import Fault, build, to_rows
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
    for source in sources:
        if (kind := kind_of(source)) != "rollouts":
            content, hint = (
                ("NeMo Gym rows", f"`gymdata import {path} -o RUN` first") if kind == "nemo" else (kind, None)
            )
            raise UsageError(f"{source.path}: holds {content}; --fix repairs rollouts", hint=hint)
    account = FixReport(str(path), str(output), choice)
    with single_file(target, overwrite=overwrite) as temporary:
        account.notes += _unrecorded(target, path)
        report = validate(path)
        account.notes += [f"{v.file}: {v.detail}" for v in report.violations if v.code == "T209" and v.turn is None]
        rollouts = fixed_rollouts(sources, report, choice, account)
        stream_batches(rollouts, temporary, target.suffix, ROLLOUTS, ROLLOUTS.arrow)
    account.errors_after = validate(target).errors if account.rollouts_out else 0
    return account


def _unrecorded(file: Path, path: str | Path) -> list[str]:
    """What an output that is one file, and has no run.json, does not record of how ``path`` was sampled, as a note.

    Raises UsageError for a file in the folder of an output that ``path`` does not come from: its run.json would be taken
    for that of the file.
    """
    runs = list(lineage(path))
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
    """The repaired rollouts of ``sources``, whose validation gave ``report``, without the keys that the table does not have;
    counts in ``account``.

    Raises DataError when a whole file cannot be read, for what it held cannot be counted.
    """
    errors: dict[tuple[str | None, int], list[Violation]] = defaultdict(list)
    for v in report.violations:
        # A changed file is not a fault of its rows.
        if v.severity == "error" and (v.code != "T209" or v.turn is not None):
            errors[v.file, v.row].append(v)
    for source in sources:
        file = str(source.path)
        unreadable = {
            row for (name, row), of_row in errors.items() if name == file and any(v.code[0] == "S" for v in of_row)
        }
        for part in batches(source, ROLLOUTS, batch_size=_BATCH_ROWS):
            if isinstance(part, Fault):
                if part.kind == "file":
                    raise part.error()
                unreadable |= {part.row} if part.kind == "row" else set()
                continue
            sound = part.only(~np.isin(part.rows, list(unreadable)))
            rows, start = sound.rows.tolist(), 0
            account.rollouts_in += len(rows)
            for end in [*(index for index, row in enumerate(rows) if (file, row) in errors), len(rows)]:
                pieces = [sound.data.slice(start, end - start)]
                if end < len(rows):
                    pieces += _repaired(sound.data.slice(end, 1), errors[file, rows[end]], choice, account)
                for piece in filter(len, pieces):
                    account.rollouts_out += len(piece)
                    yield piece
                start = end + 1
        account.rows_unreadable += len(unreadable)


def _repaired(
    batch: pa.RecordBatch, faults: list[Violation], choice: repair.Choice, account: FixReport
) -> list[pa.RecordBatch]:
    """What a rollout with ``faults`` becomes."""
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
        # Through JSON, which is what builds a batch from rows.
        rows.append(decode(encode({**repaired, "extra": json.dumps(extra)})))
    return [build(rows, ROLLOUTS, ROLLOUTS.schema.names, "repaired rollouts", list(range(len(rows))))]
