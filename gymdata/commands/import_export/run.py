"""``gymdata.import_rollouts`` and ``gymdata.export``: other projects' files to runs and back.

Invariants: every row that goes in comes out as a rollout (or a pair) or is named in rejected.jsonl with its line and
reason; what a format cannot hold is counted and reported; an output appears whole.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymdata.commands.import_export.rendering import rendered, rendered_identity, renderer_of
from gymdata.commands.import_export.splitting import refuse_one_task
from gymdata.commands.import_export.summaries import ExportSummary, ImportSummary
from gymdata.errors import EXIT_FAULTS, DataError, RefusedError, StoreError, UsageError, counted
from gymdata.formats import Format, detect, format_named
from gymdata.formats import exported as exported_formats
from gymdata.formats import imported as imported_formats
from gymdata.formats.conversion.batches import Imported, Reader
from gymdata.formats.conversion.exporting import Export
from gymdata.formats.conversion.importing import ODD, JsonObject, Keys, Rejected, TableRow, reason_of
from gymdata.formats.conversion.rows import NO_TIME
from gymdata.formats.nemo_gym.rows import failures_file, main_file
from gymdata.public import Figures, path_of, paths_of
from gymdata.rollouts.column_names import TEXT_FIELDS, columns_of, fields_in
from gymdata.rollouts.failures import CANCELLED, MASKED, failures_in, short_reason
from gymdata.rollouts.messages import loads, object_of
from gymdata.rollouts.schema import PAIRS, ROLLOUTS, TABLES
from gymdata.scores.chosen import default_score
from gymdata.store import Run, StageOutput, find_run_json, hash_file, read_run_json, resolve
from gymdata.store.columns import to_rows
from gymdata.store.journal import FAILURES, line_of
from gymdata.store.lineage import vocabulary
from gymdata.store.lines import encode_any
from gymdata.store.paths import RUN_JSON, RunFacts, local_output, refuse_inputs
from gymdata.store.reading import check_content, warn
from gymdata.store.run_json import differences, replacing, writing_into
from gymdata.workers.tuning import rare_collections

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.chat.rendering import TextRenderer
    from gymdata.store.paths import Source

REJECTED = "rejected.jsonl"
#: The placeholder of an image in a text, as LLaVA, LLaMA-Factory and ms-swift write it.
_MARK = "<image>"


def import_rollouts(
    files: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    source: str | None = None,
    run_id: str | None = None,
    overwrite: bool = False,
    format: str = "parquet",
    model: str | None = None,
    chat_template: str | Path | None = None,
    failed: str = "keep",
    keep_contradicting: bool = False,
    map: Sequence[str] | Mapping[str, str] = (),
    test_share: float | None = None,
    seed: int = 0,
    command: Sequence[str] = (),
) -> ImportSummary:
    """Import files of another project (JSON or JSON lines, plain or compressed; files or globs) into the run
    ``output``.

    ``source``: a format, detected from the files when not given. Files of pairs become ``output/pairs.parquet``.
    Rows that cannot be imported go to ``output/rejected.jsonl`` with file, line, code, reason and how they begin; all
    others become rollouts, those without token ids as well (they have no turns). Importing the same files again does
    nothing. Raises DataError when a file is missing, cannot be read to its end or is in no known format, StoreError when
    the run is of other files and not ``overwrite``.

    ``model``: a model or tokenizer folder, or a cached hub name. Rows without token ids then get those that its chat
    template, or ``chat_template`` (a file), gives their text; each is marked (T213), has no log-probabilities, and is proven
    (``gymdata.chat.rendering``). What cannot be proven is rejected; RefusedError when that is every row.

    ``failed``: whether rows that their writer masked or cancelled are rollouts without a reward (``keep``) or go to
    failures.jsonl (``drop``), where attempts that failed always go; those that NeMo Gym wrote next to a file
    (``NAME_failures.jsonl``) are read with it. ``map``: columns of answers and preferences as text, as ``prompt=COLUMN``.
    ``test_share``: share of the tasks, drawn with ``seed``, that is held out in ``output/split/test.parquet``; the others
    are in ``train.parquet`` next to it.
    ``keep_contradicting``: also import pairs whose own scores prefer the rejected side.
    """
    if source is not None and source not in (formats := imported_formats()):
        raise UsageError.unknown_choice("--from", source, formats)
    output = local_output(output)
    paths = paths_of(files, "import_rollouts", "the path of a file or a glob, or several of them")
    _refuse_folders(paths)
    sources = [file for path in paths for file in resolve(path, ROLLOUTS)]
    columns = _columns(map)
    rollout_files = [file for file in sources if main_file(file.path) is None] or sources
    known_format = _format_of(source, rollout_files, columns)
    name = known_format.name
    if unread := known_format.without_ids(rollout_files):
        warn(f"{name}: {unread}")
    if name == "nemo-gym":
        listed = {file.path for file in sources}
        sidecars = dict.fromkeys(failures_file(file.path) for file in rollout_files if file.kind != "parquet")
        sources += [file for path in sidecars if path.is_file() and path not in listed for file in resolve(path)]
    if keep_contradicting and known_format.table != PAIRS.name:
        raise UsageError(
            f"--keep-contradicting: is for preference pairs, and these files are {name}", hint="leave it out"
        )
    renderer = None if model is None else renderer_of(model, chat_template, known_format)
    _refuse_one_task(Reader(name, "", columns=columns), sources, renderer, test_share, drop_masked=failed == "drop")
    summary = ImportSummary(str(output), name, files=[str(s.path) for s in sources])
    read = [{"path": str(s.path.resolve()), "bytes": s.path.stat().st_size, "xxh3": hash_file(s.path)} for s in sources]
    identity: Figures = {
        "imported": [f["xxh3"] for f in read],
        "format": name,
        **({"map": columns} if columns else {}),
    } | ({"failed": failed} if failed != "keep" else {})
    identity |= {"keep_contradicting": True} if keep_contradicting else {}
    facts: RunFacts = {
        "stage": "import",
        "format": name,
        "command": list(command),
        "parents": [{"path": f["path"], "run_id": None, "run_json_xxh3": None, "xxh3": f["xxh3"]} for f in read],
        "sources": read,
    }
    if renderer is not None:
        identity |= rendered_identity(renderer, str(model), facts)
    if known_format.table == PAIRS.name:
        with StageOutput(output, "import", overwrite=overwrite) as out:
            if out.facts and not overwrite and (other := differences(out.facts.get("identity") or {}, identity)):
                raise StoreError.other_identity(out.place, other)
            run_id = run_id or Path(output).name
            reader = Reader(name, run_id, keep_contradicting=keep_contradicting, columns=columns)
            facts |= {"identity": identity, "run_id": run_id}
            _import_pairs(reader, sources, out, summary, facts, renderer)
        summary.split(test_share, seed, command)
        return summary
    with Run.open(
        output,
        identity=identity,
        extent={},
        operation={"files": summary.files},
        facts=facts,
        run_id=run_id,
        overwrite=overwrite,
        format="jsonl" if format == "jsonl" else "parquet",
    ) as run:
        findings = _Findings(failed == "drop")
        parts = rendered(Reader(name, run.run_id, columns=columns)(sources), renderer, ROLLOUTS)
        run.write_batches(_counted(findings.gathered(parts), summary, run.rows))
        findings.count(summary)
        _write_lines(Path(output) / REJECTED, _rejected_lines(findings.rejected))
        _write_lines(Path(output) / FAILURES, findings.failures)
        _count_rendered(summary, renderer)
        run.note(counts=_counts(summary))
    summary.split(test_share, seed, command)
    return summary


def _refuse_folders(paths: Sequence[str | Path]) -> None:
    for path in map(Path, paths):
        if path.is_dir() and not (path / RUN_JSON).is_file():
            raise DataError(f"{path}: is a folder, expected files", hint=f"name them, or give a glob: '{path}/*.jsonl'")


def refuse_one_task_of_text(files: Sequence[Source], format: str, model: str, map: Sequence[str], share: float) -> None:
    """Raises UsageError where the rows of ``files`` that ``model`` can be trained on are of one task."""
    renderer = renderer_of(model, None, format_named(format))
    _refuse_one_task(Reader(format, "", columns=_columns(map)), files, renderer, share)


def _refuse_one_task(
    reader: Reader,
    sources: Sequence[Source],
    renderer: TextRenderer | None,
    share: float | None,
    *,
    drop_masked: bool = False,
) -> None:
    """Raises UsageError where a ``share`` of the tasks is to be held out and the rows are of one task, before any of them
    is written."""
    if share is None:
        return
    table = TABLES[format_named(reader.format).table]
    parts = rendered(reader(sources), None if renderer is None else renderer.uncounted(), table)
    refuse_one_task(_Findings(drop_masked).gathered(parts), share)


def _count_rendered(summary: ImportSummary, renderer: TextRenderer | None) -> None:
    """Raises RefusedError when no row was rendered, and none had ids."""
    if renderer is None:
        return
    for name in (count.name for count in fields(renderer.counts)):
        value = getattr(renderer.counts, name)
        setattr(summary, name, dict(value.most_common()) if isinstance(value, Counter) else value)
    if summary.refused and not summary.rollouts + summary.pairs:
        reason, n = next(iter(summary.refused.items()))
        more = f", and {len(summary.refused) - 1} other reasons" if len(summary.refused) > 1 else ""
        raise RefusedError(
            f"{summary.files[0]}: no row can be rendered, of {summary.rows_in:,}: {reason[:150]} ({n:,}{more})",
            hint="give another template with --chat-template FILE, or mend the rows",
        )


def _format_of(name: str | None, files: Sequence[Source], columns: Mapping[str, str]) -> Format:
    """The format of that name, or that ``files`` are in. Raises UsageError for ``columns`` of one that is not text."""
    format = format_named(name) if name is not None else detect(files, columns)
    if columns and not format.holds_text:
        hint = "leave --map out: it is for answers and preferences as text"
        raise UsageError(f"--map: {format.name} has columns of its own", hint=hint)
    return format


def _columns(given: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Field → column of ``map``. Raises UsageError."""
    try:
        return columns_of(fields_in(TEXT_FIELDS)(given))
    except ValueError as error:
        raise UsageError(f"--map: expected {error}") from None


@dataclass(slots=True)
class _Findings:
    """What an import found besides rows. ``drop_masked``: rows that their writer masked or cancelled are none."""

    drop_masked: bool = False
    rejected: list[Rejected] = field(default_factory=list)
    #: Lines of failures.jsonl, and how many rows there are of each reason: failed attempts, and masked rollouts.
    failures: list[bytes] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    masked: Counter[str] = field(default_factory=Counter)
    #: Rows with that placeholder in a message.
    marked: int = 0

    def gathered(self, parts: Iterator[Imported]) -> Iterator[pa.RecordBatch]:
        """The batches of ``parts``; all else of them is kept."""
        import pyarrow.compute as pc

        for part in parts:
            self.rejected += part.rejected
            if part.batch is not None:
                messages = part.batch.column("messages" if "messages" in part.batch.schema.names else "prompt")
                marked = pc.match_substring(pc.list_flatten(messages).field("content"), _MARK)
                self.marked += len(pc.list_parent_indices(messages).filter(marked).unique())
                yield self._rollouts(part.batch) if "extra" in part.batch.schema.names else part.batch

    def _rollouts(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """``batch`` without failed attempts, which become lines of failures.jsonl."""
        import pyarrow as pa

        failures = failures_in(batch.column("extra"))
        rollout_kinds = () if self.drop_masked else (MASKED, CANCELLED)
        failed = [row for row, failure in failures.items() if failure.get("kind") not in rollout_kinds]
        self.masked.update(short_reason(failure) for row, failure in failures.items() if row not in failed)
        self.failed.update(short_reason(failures[row]) for row in failed)
        for row, attempt in zip(failed, to_rows(batch.take(pa.array(failed, pa.int64()))), strict=True):
            self.failures.append(line_of(encode_any(_attempt(attempt, failures[row]))))
        rollouts = pa.array([row for row in range(len(batch)) if row not in set(failed)], pa.int64())
        return batch.take(rollouts) if failed else batch

    def count(self, summary: ImportSummary) -> None:
        """After the last row."""
        summary.rejected = len(self.rejected)
        summary.failed, summary.masked = (dict(counts.most_common()) for counts in (self.failed, self.masked))
        summary.rows_in = summary.rollouts + summary.pairs + summary.rejected + self.failed.total()
        summary.reasons = dict(sorted(Counter(row.code for row in self.rejected).items()))
        if self.marked:
            warn(f"{counted(self.marked, 'row')} with {_MARK} in the text: it is trained as text, without an image")


def _counted(batches: Iterator[pa.RecordBatch], summary: ImportSummary, skip: int) -> Iterator[pa.RecordBatch]:
    """Batches of rollouts without the first ``skip`` rows, which an import that was stopped has written: rows have the order
    of the files."""
    rollout_ids = Keys()
    for batch in batches:
        summary.rollouts += batch.num_rows
        turns, breaks = (batch.column(name).to_numpy() for name in ("n_turns", "n_breaks"))
        summary.turns += int(turns.sum())
        summary.breaks += int(breaks.sum())
        summary.without_token_data += int((turns == 0).sum())
        summary.without_reward += batch.column("reward").null_count
        summary.without_time += batch.column("started_at").to_pylist().count(NO_TIME)
        summary.duplicates += sum(not rollout_ids.add(name) for name in batch.column("rollout_id").to_pylist())
        done = min(skip, batch.num_rows)
        skip -= done
        if done < batch.num_rows:
            yield batch.slice(done)


def _attempt(row: TableRow, failure: Mapping[str, Any]) -> JsonObject:
    """A failed attempt as a record of failures.jsonl: where its writer says so, and all that its row would hold."""
    names = ("rollout_id", "run_id", "group_id", "task_id", "rollout_index", "turns", "messages", "duration_s")
    return {
        "kind": failure.get("kind"),
        "place": failure.get("field"),
        "message": failure.get("reason"),
        "attempt": object_of(loads(row["task"])).get("_ng_attempt_index"),
        "counts": True,
        "final": bool(failure.get("final")),
        **{name: row[name] for name in names},
        "at": row["started_at"].isoformat(),
        **{name: row[name] for name in ("policy", "tools", "task", "extra")},
    }


def _import_pairs(
    reader: Reader,
    sources: list[Source],
    out: StageOutput,
    summary: ImportSummary,
    facts: RunFacts,
    renderer: TextRenderer | None,
) -> None:
    import pyarrow as pa

    findings = _Findings()
    batches = findings.gathered(rendered(reader(sources), renderer, PAIRS))
    first = next(batches, None)
    columns = PAIRS.required() if first is None else first.schema.names

    def counted() -> Iterator[pa.RecordBatch]:
        for batch in () if first is None else chain([first], batches):
            summary.pairs += batch.num_rows
            summary.equal_scores += batch.column("margin").to_pylist().count(0.0)
            yield batch

    schema = pa.schema([PAIRS.schema.field(column) for column in columns], metadata=PAIRS.metadata)
    out.batches("pairs.parquet", counted(), PAIRS, schema)
    findings.count(summary)
    _count_rendered(summary, renderer)
    if findings.rejected:
        part = out.part(REJECTED)
        part.path.write_bytes(b"".join(_rejected_lines(findings.rejected)))
        part.rows = len(findings.rejected)
    out.finish({**facts, "counts": _counts(summary)})


def _counts(summary: ImportSummary) -> Figures:
    return {name: value for name, value in summary.to_dict().items() if name not in ("run", "files", "format")}


def _rejected_lines(rejected: Sequence[Rejected]) -> list[bytes]:
    lines = []
    for b in rejected:
        # A reason may quote a lone surrogate, which no output file can hold.
        reason = b.reason.encode("utf-8", "replace").decode()
        row = {"file": str(b.file), "line": b.line, "code": b.code, "reason": reason, "text": b.text}
        lines.append(encode_any(row) + b"\n")
    return lines


def _write_lines(path: Path, lines: Sequence[bytes]) -> None:
    if not lines:
        path.unlink(missing_ok=True)
        return
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.writelines(lines)


def export(
    path: str | Path,
    output: str | Path,
    format: str,
    *,
    reward: str | None = None,
    overwrite: bool = False,
) -> ExportSummary:
    """Write the rollouts under ``path`` in another project's format.

    ``reward``: the score that is written as the reward, by default the only re-scoring, else the total of ``collect``.

    The table in `gymdata docs your-data` says of each format what it is made of (rollouts, pairs or experiences:
    ``path`` is a file or folder of them, or a run that holds one) and whether it has token ids. ``verl`` and
    ``verl-sft`` write Parquet; ``nat-trajectories`` and ``nat-dpo-items`` write a collection to ``.json`` and a
    trajectory per line to ``.jsonl``; ``atif`` a trajectory per line, or one to ``.json``; the others JSON lines.
    Raises UsageError for an unknown format, StoreError for a file that is there and has other content (without
    ``overwrite``), DataError when there is nothing to export, RefusedError for ids or log-probabilities that no
    consumer may take (T206, L301 to L303).
    """
    path = path_of(path, "export")
    target = local_output(output)
    if format not in (formats := exported_formats()):
        raise UsageError.unknown_choice("--format", format, formats)
    to = formats[format]
    check_content([path], TABLES[to.table])
    if target.suffix not in to.suffixes:
        raise UsageError.bad_value("-o", str(output), f"a name ending in {' or '.join(to.suffixes)}, for {format}")
    if to.holds_reward:
        reward, note = default_score([path], reward)
        if note:
            warn(note)
    elif reward is not None:
        raise UsageError(f"--reward {reward}: {format} holds no rewards", hint="leave it out")
    out = StageOutput(target, "export", alone=True, overwrite=overwrite)
    refuse_inputs(target, [path], TABLES[to.table], "exported")
    with out:
        account = Export(str(path), format, TABLES[to.table], vocabulary(path), reward)
        summary = _export(path, resolve(path, to.table), target, account, out)
        out.finish({})
    return summary


def _export(
    path: str | Path, sources: Sequence[Source], target: Path, account: Export, out: StageOutput
) -> ExportSummary:
    summary = ExportSummary(str(target), account.format)
    part, to = out.part(target.name), format_named(account.format)
    with _naming_the_row(account), writing_into(target):
        batches = (batch for source in sources for batch in account.batches(source, to.columns, to.unread))
        to.save(to.convert(batches, account), part, account)
    summary.rows_out = account.written
    if not account.read:
        # Why there is no row to export, and what to do.
        table = account.table
        run_json = find_run_json(path)
        facts = read_run_json(run_json) if run_json is not None else {}
        counts = facts.get("counts") or {}
        if facts.get("stage") == "import" and counts.get("rejected"):
            where = run_json.parent / REJECTED if run_json is not None else REJECTED
            hint = f"all {counts['rejected']:,} rows of the import were rejected: {where} has their lines and reasons"
        elif table is PAIRS:
            hint = "`gymdata pairs` makes pairs of scored rollouts, and prints what became of every group"
        else:
            hint = "`gymdata validate` shows what the files hold"
        raise DataError(f"{path}: got 0 {table.name}, expected at least 1 to export", hint=hint)
    summary.account = account.account()
    turns = summary.account.get("turns", {"read": 0, "lost": 0})
    summary.turns, summary.turns_lost = turns["read"], turns["lost"]
    summary.skipped = account.read + account.further - summary.rows_out
    summary.lost = {kind: n for kind, n in account.lost.items() if n}
    return summary


@contextlib.contextmanager
def _naming_the_row(export: Export) -> Iterator[None]:
    """Raises DataError for a row whose JSON (messages, tools, extra) a writer cannot handle."""
    try:
        with rare_collections():
            yield
    except DataError:
        raise
    except ODD as error:
        kind = "pair" if export.table.name == PAIRS.name else "rollout"
        raise DataError(
            f"{export.path}: {kind} {export.current}: cannot be written as {export.format}: {reason_of(error)}",
            hint="`gymdata validate` names what is odd in a row; `gymdata filter` leaves rollouts out",
            exit_code=EXIT_FAULTS,
        ) from error
