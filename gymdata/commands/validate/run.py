"""``gymdata.validate``: any path to a report over its rollouts and pairs.

Invariants: the kind of each file is found from its content; violations come in the order of files and rows; NeMo Gym rows
are validated without loading pyarrow.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gymdata.checks.batches import Checks, sort_key
from gymdata.checks.violations import Selection, ValidationReport, Violation, rows_with_errors
from gymdata.commands.validate.rollouts import Kind, UserCheck, biased, check_rollouts, load_checks, settings_of
from gymdata.errors import DataError, UsageError, counted
from gymdata.public import path_of
from gymdata.store.formats import table_of
from gymdata.store.lines import row_lines
from gymdata.store.paths import Source, read_facts, resolve, run_jsons
from gymdata.store.reading import fault_of, reading, rows_recorded
from gymdata.store.run_json import agreed, state_of
from gymdata.workers.tuning import rare_collections

_EXPECTED = "rollouts or pairs"


# Changed files are checked as usual, and are a fault themselves; damaged lines are violations.
@reading(allow_changed=True, report=lambda _: None)
@rare_collections()
def validate(
    path: str | Path,
    *,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    strict: bool = False,
    tokenizer: str | Path | None = None,
    decode: bool = False,
    check: Sequence[UserCheck] = (),
) -> ValidationReport:
    """Check rollouts or pairs, token for token, and name every fault.

    ``path``: a run folder, a Parquet or JSONL file (also .gz, .zst), or a glob, of gymdata's own rows or of NeMo Gym's.
    ``select`` and ``ignore`` take code prefixes (``"T2"``). ``strict`` makes warnings errors. ``tokenizer``: a folder whose
    vocabulary bounds the ids, and whose texts show the cause of a break (the default is the model folder that run.json
    names); with ``decode`` generations are compared with their messages' text. ``check``: checks of your own, as
    ``path.py:Class`` or as classes of ``gymdata.checks.violations.Check``. Raises DataError when nothing can be read there
    or it is imported first, UsageError for an unknown code.
    """
    path = path_of(path, "validate")
    began = time.perf_counter()
    user_checks = load_checks(check)  # their codes can be selected
    selection = Selection.of(select, ignore, strict)
    kinds = {source: kind_of(source) for source in sources_of(path)}
    runs = {file: read_facts(file) for file in run_jsons(path)}
    run = agreed(list(runs.values()))
    report = ValidationReport(path=str(path), files=[str(source.path) for source in kinds])
    reader = None
    if tokenizer is not None or runs or decode:
        from gymdata.models._transformers import reader_of

        # A model that has a name and no folder is loaded to decode, and not for the cause of a break.
        reader = reader_of(tokenizer or (run.get("identity", {}).get("model") if decode else None), run)
    vocab_size = _vocab_size(tokenizer) if tokenizer is not None else None
    checks = Checks(settings_of(run, vocab_size, reader), selection, user_checks)
    checked = []
    for source, kind in kinds.items():
        if kind == "pairs":
            from gymdata.commands.validate.pairs import check_pairs  # late: it loads pyarrow

            checked.append(check_pairs(source, checks, report))
        else:
            checked.append(check_rollouts(source, kind, checks, report))
    violations = [violation for file in checked for violation in file.violations]
    violations += [*checks.finish(), *biased(checked, runs)]
    bad = rows_with_errors(violations)
    report.trainable = sum(file.n_trainable(bad.get(file.name, ())) for file in checked)
    violations += _of_whole_files(kinds, runs)  # no faults of rows
    if decode:
        from gymdata.commands.validate.decode import decoded_faults

        if reader is None:
            raise UsageError("--decode needs a tokenizer, and no run.json names a model", hint="give --tokenizer DIR")
        violations += decoded_faults((source for source, kind in kinds.items() if kind == "rollouts"), reader())
    order = {file: index for index, file in enumerate(report.files)}
    counting = selection.apply(violations)
    report.violations = sorted(counting, key=lambda v: (order.get(v.file or "", len(order)), *sort_key(v)))
    if len(runs) == 1:
        report.state = state_of(*next(iter(runs.items())))
    report.seconds = time.perf_counter() - began
    return report


def _of_whole_files(files: Iterable[Source], runs: Iterable[Path]) -> Iterator[Violation]:
    """T209 of files that are not those that run.json describes; of runs B809, and S101 in their failures."""
    for source in files:
        if (fault := fault_of(source.path, whole=True)) is not None:
            detail = fault.message.removeprefix(f"{source.path}: ")
            yield Violation("T209", 0, detail=detail, file=str(source.path))
        elif (recorded := rows_recorded(source.path)) is not None and (rows := _rows_in(source)) not in (
            None,
            recorded,
        ):
            detail = f"holds {counted(rows, 'row')}, and its run.json says {recorded:,}"
            yield Violation("T209", 0, detail=detail, file=str(source.path))
    for run_json in runs:
        from gymdata.commands.validate.failures import faults_of_failures

        yield from faults_of_failures(run_json.parent)


def _rows_in(source: Source) -> int | None:
    """The number of rows in a file; None for one that cannot be read, of which its reader says what is wrong."""
    with contextlib.suppress(DataError):
        if source.kind != "parquet":
            return sum(1 for _ in row_lines(source))
        from gymdata.store.parquet import group_rows, opened_parquet

        with opened_parquet(source.path) as file:
            return sum(group_rows(file.metadata))
    return None


def sources_of(path: str | Path) -> list[Source]:
    """The files of rollouts under a path argument, else those of pairs. Raises DataError for a folder of others."""
    sources = resolve(path, "rollouts")
    if sources or not Path(path).is_dir():
        return sources
    for source in resolve(path, "pairs"):
        sources.append(source)
        # The held-out side of a split is beside it.
        heldout = source.path.with_name(source.path.name.replace("pairs", "heldout", 1))
        if heldout.is_file() and heldout != source.path:
            sources.append(Source(heldout, source.kind))
    if not sources:
        from gymdata.store.stage_output import other_than_rows

        if (other := other_than_rows(Path(path))) is not None:
            raise DataError.other_table(path, other, _EXPECTED)
    return sources


def kind_of(source: Source) -> Kind:
    """The kind of a file's rows. Raises DataError as ``table_of``, and for another table than those that are checked."""
    held = table_of(source, _EXPECTED)
    if held.table not in ("rollouts", "pairs"):
        raise DataError.other_table(source.path, held.table, _EXPECTED)
    return "nemo" if held.foreign is not None else "pairs" if held.table == "pairs" else "rollouts"


def _vocab_size(tokenizer: str | Path) -> int:
    """Ids that a tokenizer can mean: one above its largest."""
    from gymdata.models.vocabulary import load_vocabulary

    if (pieces := load_vocabulary(tokenizer)) is not None:
        return max(pieces.pieces, default=-1) + 1
    from gymdata.models._transformers import load_tokenizer

    return len(load_tokenizer(tokenizer))
