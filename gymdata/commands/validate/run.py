"""``gymdata.validate``: any path to a report. Joins the native checks, pairs, and foreign formats.

Invariants: the kind of each file is found from its content; NeMo Gym rows are validated without loading pyarrow.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymdata.checks.violations import Selection, ValidationReport, Violation
from gymdata.errors import DataError, GymdataError, MissingExtraError, UsageError
from gymdata.public import path_of
from gymdata.store.formats import ANSWERED, format_of, head, refuse_unknown
from gymdata.store.lines import decode
from gymdata.store.paths import RunFacts, Source, local_output, read_facts, resolve, run_jsons
from gymdata.store.reading import fault_of, reading
from gymdata.store.run_json import agreed, state_of
from gymdata.workers.tuning import rare_collections

if TYPE_CHECKING:
    from gymdata.checks.breaks import Reader
    from gymdata.checks.repair import Choice, FixReport
    from gymdata.commands.validate.rollouts import Kind, UserCheck

__all__ = ["ValidationReport", "Violation", "fix", "validate"]

#: Tokens of which the rollouts are decoded unless all are to be; decoding takes longer than all other checks.
DECODED_TOKENS = 2_000_000


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

    ``path``: a run folder, a Parquet or JSONL file (also .gz, .zst), or a glob; files of every format that is imported are
    read as an import reads them, and those without token ids have T205 as a warning. ``select`` and ``ignore`` take code
    prefixes (``"T2"``). ``strict`` makes warnings errors.
    ``tokenizer``: a folder whose vocabulary bounds the ids, and whose texts show the cause of a break (the default is
    the model folder that run.json names). Generations of a run are compared with their messages' text where its
    tokenizer is here, of about ``DECODED_TOKENS`` tokens, or with ``decode`` all of them. ``check``: checks of your own,
    as ``path.py:Class`` or as classes of ``gymdata.checks.violations.Check``. Raises DataError when nothing can be read
    there, UsageError for an unknown code.
    """
    path = path_of(path, "validate")
    began = time.perf_counter()
    if check:
        from gymdata.commands.validate.rollouts import load_checks

        load_checks(check)  # their codes can be selected
    selection = Selection.of(select, ignore, strict)
    sources = _sources(Path(path), str(path))
    runs = _run_jsons(path)
    run = agreed(list(runs.values()))
    vocab_size = _vocab_size(tokenizer) if tokenizer is not None else None
    # Loaded at the first use, because most files have no break.
    reader = _reader_of(tokenizer, run) if tokenizer is not None or runs else None
    report = ValidationReport(path=str(path))
    split = [(kind, source) for source in sources for kind in [kind_of(source)]]
    _refuse_others(split)
    files_of: dict[Kind, list[Source]] = {}
    for kind, source in split:
        files_of.setdefault(kind, []).append(source)
    rollouts, pairs = files_of.get("rollouts", []), files_of.pop("pairs", [])
    for kind, files in files_of.items():
        from gymdata.commands.validate.rollouts import validate_rollouts

        of_kind = validate_rollouts(
            files,
            selection=selection,
            runs=runs if kind == "rollouts" else {},
            vocab_size=vocab_size,
            reader=reader,
            user_checks=check,
            kind=kind,
        )
        _merge(report, of_kind)
    if pairs:
        from gymdata.commands.validate.pairs import validate_pairs

        _merge(report, validate_pairs(pairs, selection=selection, vocab_size=vocab_size))
    if decode or (rollouts and runs and selection.wants("T207")):
        _decode(report, rollouts, selection, run, tokenizer, reader, decode)
    report.files = [str(s.path) for s in sources]
    if report.rollouts and not report.tokens:
        report.next_step = _next_step(path, sources)
    for run_json, facts in runs.items():
        if rollouts and selection.wants("B809"):
            from gymdata.commands.validate.failures import dependent_failures

            report.violations += selection.apply(dependent_failures(run_json.parent))
        if len(runs) == 1:
            report.state = state_of(run_json, facts)
    changed = [(s.path, fault) for s in sources if (fault := fault_of(s.path, whole=True)) is not None]
    report.violations += selection.apply(
        Violation("T209", 0, detail=fault.message.removeprefix(f"{file}: "), file=str(file)) for file, fault in changed
    )
    report.seconds = time.perf_counter() - began
    return report


@reading(allow_changed=True)
def fix(path: str | Path, choice: Choice, output: str | Path, *, overwrite: bool = False) -> FixReport:
    """Write a copy of the rollouts at ``path`` without errors, and say what that cost.

    ``choice``: ``split`` starts a new rollout at a break, ``truncate`` keeps the head before the first fault, ``drop``
    leaves the rollout out. ``output``: a new .parquet or .jsonl file. The source is never changed. Raises UsageError
    when ``output`` is the source, StoreError when it has other content (without ``overwrite``), UsageError for rows
    that are no rollouts of gymdata; DataError when a file cannot be read at all.
    """
    from gymdata.checks.repair import CHOICES, FixReport

    target = local_output(output)
    if choice not in CHOICES:
        raise UsageError.unknown_choice("--fix", choice, CHOICES)
    if target.suffix not in (".parquet", ".jsonl"):
        raise UsageError.bad_value("-o", str(output), "a new file ending in .parquet or .jsonl")
    path = path_of(path, "fix")
    sources = _sources(Path(path), str(path))
    if any(target.exists() and target.samefile(s.path) for s in sources):
        raise UsageError(f"{output}: is the file to be repaired", hint="nothing is repaired in place: give another -o")
    split = [(kind_of(s), s) for s in sources]
    _refuse_others(split)
    kinds = {kind for kind, _ in split}
    if kinds != {"rollouts"}:
        words = {"nemo": "NeMo Gym rows", "foreign": "rows of another project"}
        held_kinds = ", ".join(words.get(kind, kind) for kind in sorted(kinds)) or "nothing"
        hint = f"`gymdata import {path} -o RUN` first" if kinds and kinds <= words.keys() else "give one file or run"
        raise UsageError(f"{path}: holds {held_kinds}; --fix repairs rollouts", hint=hint)
    from gymdata.rollouts.schema import ROLLOUTS
    from gymdata.store import StageOutput
    from gymdata.store.lineage import single_file

    account = FixReport(str(path), str(output), choice)
    with StageOutput(target, "fix", alone=True, overwrite=overwrite) as out:
        account.notes += single_file(target, [path])
        report = validate(path)
        # A changed file is not a fault of its rows.
        report.violations = [v for v in report.violations if v.code != "T209" or v.turn is not None]
        from gymdata.commands.validate.fix import fixed_rollouts

        out.batches(target.name, fixed_rollouts(sources, report, choice, account), ROLLOUTS, ROLLOUTS.arrow)
        out.finish({})
    account.errors_after = validate(target).errors if account.rollouts_out else 0
    return account


def _sources(path: Path, text: str) -> list[Source]:
    sources = resolve(text, "rollouts")
    if not sources and path.is_dir():
        sources = resolve(text, "pairs")
        # The held-out side of a split is beside it.
        for source in list(sources):
            heldout = source.path.with_name(source.path.name.replace("pairs", "heldout", 1))
            if heldout.is_file() and heldout != source.path:
                sources.append(Source(heldout, source.kind, source.compression))
        if not sources:
            from gymdata.store.stage_output import other_than_rows

            if (other := other_than_rows(path)) is not None:
                raise DataError(
                    f"{path}: contains {other}, expected rollouts or pairs",
                    hint="give the run that it was made from, or a folder or file of rollouts or pairs",
                ).at(path, other, "rollouts or pairs")
    return sources


def kind_of(source: Source) -> Kind:
    """The kind of a file's rows, from its metadata or its first row."""
    if source.kind == "segment":
        return "rollouts"
    if (format := format_of(source)) is not None:
        return "pairs" if format.table == "pairs" else "nemo" if format.read_in_place else "foreign"
    if source.kind == "parquet":
        import pyarrow as pa

        from gymdata.store.parquet import parquet_schema

        try:
            schema = parquet_schema(source.path)
        except (pa.ArrowException, OSError):
            return "rollouts"
        of_pairs = "turns" not in schema.names and {"chosen", "rejected"} <= set(schema.names)
        return "pairs" if of_pairs or (schema.metadata or {}).get(b"gymdata.schema") == b"pairs" else "rollouts"
    try:
        lines = head(source)
    except DataError:
        # Unreadable from some line on: the scan says where.
        return "rollouts"
    # A file is of tasks only as a whole.
    if lines and all(map(_is_task, lines)):
        return "tasks"
    for line in lines:
        keys = line[:4096]
        if b'"pair_id"' in keys or (b'"chosen"' in line and b'"rejected"' in line and b'"turns"' not in line):
            return "pairs"
        if b'"turns"' in line or b'"rollout_id"' in line:
            return "rollouts"
    return "rollouts"


def _is_task(line: bytes) -> bool:
    """Whether a row is a prompt without an answer."""
    if any(key in line for key in (b'"response"', b'"rollout_id"', b'"pair_id"')):
        return False
    try:
        row = decode(line)
    except ValueError:
        return False
    if not isinstance(row, dict) or row.keys() & (ANSWERED - {"turns"}):
        return False
    if "turns" in row:
        turns = row["turns"]
        return isinstance(turns, list) and bool(turns) and isinstance(turns[0], str)
    return bool(row.get("messages")) or any(row.get(key) is not None for key in ("prompt", "responses_create_params"))


def _refuse_others(split: list[tuple[Kind, Source]]) -> None:
    """Raises DataError for tasks and for rows of no known format."""
    for kind, source in split:
        if kind == "tasks":
            raise DataError.other_table(source.path, "tasks", "rollouts or pairs")
        if kind in ("rollouts", "pairs") and format_of(source) is None:
            refuse_unknown(source, "rollouts or pairs")


def _next_step(path: str | Path, sources: Sequence[Source]) -> str:
    """What gives files without token ids some, for people."""
    from gymdata.formats import format_named

    formats = [(source, format_named(format.name)) for source in sources if (format := format_of(source)) is not None]
    unread = dict.fromkeys(format.without_ids([source]) for source, format in formats)
    file = shlex.quote(str(path)) if len(formats) == len(sources) else "FILE"
    step = f"no token ids: `gymdata import {file} -m MODEL -o RUN` renders ids of its text (T213)"
    return "; ".join(filter(None, (*unread, step)))


def _run_jsons(path: str | Path) -> dict[Path, RunFacts]:
    return {file: read_facts(file) for file in run_jsons(path)}


def _vocab_size(folder: str | Path) -> int:
    """Ids that a tokenizer folder can mean: one above its largest."""
    file = Path(folder, "tokenizer.json") if Path(folder).is_dir() else Path(folder)
    if not file.is_file():
        from gymdata.models._transformers import load_tokenizer

        return len(load_tokenizer(folder))
    value = json.loads(file.read_bytes())
    vocab = (value.get("model") or {}).get("vocab") or {}
    ids = [*vocab.values()] if isinstance(vocab, dict) else range(len(vocab))
    added = [token["id"] for token in value.get("added_tokens") or []]
    return max([*ids, *added], default=-1) + 1


def _reader_of(tokenizer: str | Path | None, run: RunFacts) -> Reader:
    """Loads the tokenizer, once."""

    @functools.cache
    def load() -> Any:
        from gymdata.models._transformers import reader_of

        load = reader_of(tokenizer, run)
        try:
            return None if load is None else load()
        except MissingExtraError:
            if tokenizer is not None:
                raise
            return None

    return load


def _merge(report: ValidationReport, more: ValidationReport) -> None:
    report.rollouts += more.rollouts
    report.trainable += more.trainable
    report.turns += more.turns
    report.tokens += more.tokens
    report.violations += more.violations


def _decode(
    report: ValidationReport,
    sources: list[Source],
    selection: Selection,
    run: RunFacts,
    tokenizer: str | Path | None,
    reader: Reader | None,
    complete: bool,
) -> None:
    """Add T207. Unless it is to be ``complete``, of rollouts spread over the files, where their tokenizer is here."""
    from gymdata.commands.validate.decode import decoded_faults

    if complete:
        folder = tokenizer or (run.get("identity") or {}).get("model")
        if folder is None:
            raise UsageError("--decode needs a tokenizer, and no run.json names a model", hint="give --tokenizer DIR")
        from gymdata.models._transformers import load_reader

        reading: Any = load_reader(folder)
    else:
        reading = None
        with contextlib.suppress(GymdataError):  # nothing is known of the texts then
            reading = None if reader is None else reader()
    if reading is None:
        return
    step = 1 if complete else -(-report.tokens // DECODED_TOKENS) or 1
    violations = selection.apply(decoded_faults(sources, reading, step))
    if violations and not complete and tokenizer is None:
        from gymdata.models._transformers import load_tokenizer
        from gymdata.models.model_identity import hash_of_tokenizer
        from gymdata.models.vocabulary import find_tokenizer

        # Not where the tokenizer that lies where run.json names it is known to be another than that of the run.
        file, sampled_with = find_tokenizer(run), (run.get("identity") or {}).get("tokenizer_hash")
        if file is not None and sampled_with is not None:
            with contextlib.suppress(GymdataError):  # without its library it cannot be known
                if hash_of_tokenizer(load_tokenizer(file.parent)) != sampled_with:
                    return
    report.violations += violations
