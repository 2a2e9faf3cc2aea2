"""``gymdata.import_rollouts`` and ``gymdata.export``: other projects' files to runs and back.

Invariants: every row that goes in comes out as a rollout (or a pair) or is named in rejected.jsonl with its line and
reason; what a format cannot hold is counted and reported; an output appears whole.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gymdata.commands.import_export.rendering import count_rendered, rendered, rendered_identity, renderer_of
from gymdata.commands.import_export.rows import REJECTED, ImportedRows
from gymdata.commands.import_export.splitting import SPLIT, split_by_task
from gymdata.commands.import_export.summaries import ExportSummary, ImportSummary
from gymdata.errors import EXIT_FAULTS, DataError, StoreError, UsageError, abridged, counted, option
from gymdata.formats import Format, detect, format_named
from gymdata.formats import exported as exported_formats
from gymdata.formats import imported as imported_formats
from gymdata.formats.conversion.batches import imported_batches
from gymdata.formats.conversion.exporting import Export
from gymdata.formats.conversion.importing import ODD, Importing, Numbering, reason_of
from gymdata.formats.nemo_gym.rows import failures_file, main_file
from gymdata.public import Figures, path_of, paths_of
from gymdata.rollouts.column_names import TEXT_FIELDS, columns_of, fields_in
from gymdata.rollouts.messages import split_tasks
from gymdata.rollouts.schema import PAIRS, ROLLOUTS, TABLES
from gymdata.scores.chosen import default_score
from gymdata.store import StageOutput, find_run_json, hash_file, resolve
from gymdata.store.lineage import vocabulary
from gymdata.store.paths import RunFacts, local_output, refuse_inputs
from gymdata.store.reading import check_content, warn
from gymdata.store.run import refuse_made_from
from gymdata.store.run_json import differences
from gymdata.store.stage_output import Part, single_file
from gymdata.workers.tuning import rare_collections

if TYPE_CHECKING:
    from gymdata.store.paths import Source

#: What lists the formats.
_LIST = "`gymdata docs your-data`"


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
    keep_contradicting: bool = False,
    map: Sequence[str] | Mapping[str, str] = (),
    test_share: float | None = None,
    seed: int = 0,
    command: Sequence[str] = (),
) -> ImportSummary:
    """Import files of another project (JSON or JSON lines, plain or compressed; files or globs) into the run
    ``output``.

    ``source``: a format, detected from the files when not given. Files of pairs become ``output/pairs.parquet`` (or
    ``.jsonl``, as ``format`` says).
    Rows that cannot be imported go to ``output/rejected.jsonl`` with file, line, code, reason and how they begin; all
    others become rollouts, those without token ids as well (they have no turns). Importing the same files again does
    nothing. Raises DataError when a file is missing, cannot be read to its end or is in no known format, StoreError when
    the run is of other files and not ``overwrite``.

    ``model``: a model or tokenizer folder, or a cached hub name. Rows without token ids then get those that its chat
    template, or ``chat_template`` (a file), gives their text; each is marked (T213), has no log-probabilities, and is proven
    (``gymdata.chat.rendering``). What cannot be proven is rejected; RefusedError when that is every row.

    Rows that their writer masked or cancelled are rollouts without a reward, attempts that failed go to failures.jsonl;
    those that NeMo Gym wrote next to a file (``NAME_failures.jsonl``) are read with it. ``map``: columns of answers and
    preferences as text, as ``prompt=COLUMN``.
    ``test_share``: share of the tasks, drawn with ``seed``, that is held out in ``output/split/test.parquet``; the others
    are in ``train.parquet`` next to it.
    ``keep_contradicting``: also import pairs whose own scores prefer the rejected side.
    """
    if source is not None and source not in (formats := imported_formats()):
        raise UsageError.unknown_choice("--from", source, formats, listed=_LIST)
    output = local_output(output)
    columns = _columns(map)
    paths = paths_of(files, "import_rollouts", "the path of a file or a glob, or several of them")
    sources, foreign = foreign_sources(paths, source, columns)
    table = TABLES[foreign.table]
    if keep_contradicting and table is not PAIRS:
        what = f"is for preference pairs, and these files are {foreign.name}"
        raise UsageError(f"--keep-contradicting: {what}", hint="leave it out")
    renderer = None if model is None else renderer_of(model, chat_template, foreign)
    read = [{"path": str(s.path.resolve()), "bytes": s.path.stat().st_size, "xxh3": hash_file(s.path)} for s in sources]
    parents = [{"path": f["path"], "run_id": None, "run_json_xxh3": None, "xxh3": f["xxh3"]} for f in read]
    facts: RunFacts = {"format": foreign.name, "command": list(command), "parents": parents, "sources": read}
    identity: Figures = {"imported": [f["xxh3"] for f in read], "from": foreign.name, "format": format, "map": columns}
    identity |= {"keep_contradicting": keep_contradicting}
    if renderer is not None:
        identity |= rendered_identity(renderer, str(model), facts)
    summary = ImportSummary(str(output), foreign.name, files=[str(s.path) for s in sources])
    if overwrite:
        refuse_made_from(output)
    with StageOutput(output, "import", overwrite=overwrite) as out:
        was = out.facts.get("counts") or {}
        # One that took no row may be replaced.
        if not overwrite and any(was.get(name) for name in ("rollouts", "pairs", "failed")):
            _refuse_other(out, read, identity, run_id)
            summary.recall(out.facts)
        else:
            run_id = run_id or secrets.token_hex(8)
            rows = ImportedRows(summary)
            numbering = Numbering(text=foreign.holds_text)
            importing = Importing(run_id, numbering, rows.rejected.append, keep_contradicting, columns)
            parts = imported_batches(foreign, sources, importing)
            parts = parts if renderer is None else rendered(parts, renderer, table, importing)
            rows.write((part.batch for part in parts), table, out, format)
            warn_of_unread(foreign, importing)
            if renderer is not None:
                count_rendered(summary, renderer)
            if test_share is not None and rows.tasks:
                split_tasks(rows.tasks, test_share)  # refuses one task before anything is written
            out.finish({**facts, "identity": identity, "run_id": run_id, "counts": summary.counts()})
    if test_share is not None:
        summary.tasks = split_by_task(output, table, output / SPLIT, test_share, seed, command)
    return summary


def warn_of_unread(foreign: Format, importing: Importing) -> None:
    """Warn of what was not read of rows."""
    for what, n in (+importing.unread).items():
        warn(f"{foreign.name}: {what} of {counted(n, 'row')} are not read")


def _refuse_other(out: StageOutput, read: Sequence[Figures], identity: Figures, run_id: str | None) -> None:
    """Raises StoreError when the import that is there was made of files with other content than ``read``, or with other
    settings."""
    was = {str(file["path"]): file["xxh3"] for file in out.facts.get("sources") or []}
    if list(was.values()) != [file["xxh3"] for file in read]:
        changed = [path for file in read if was.get(path := str(file["path"]), file["xxh3"]) != file["xxh3"]]
        now = abridged(str(file["path"]) for file in read)
        what = f"before {abridged(changed)} changed" if changed else f"from {abridged(was)}, got {now}"
        hint = f"{option('overwrite', True)} replaces it; another output folder keeps both"
        raise StoreError(f"{out.place}: was imported {what}", hint=hint)
    other = differences(out.facts.get("identity") or {}, identity)
    if run_id not in (None, known_id := out.facts.get("run_id")):
        other.insert(0, ("run_id", known_id, run_id))
    if other:
        raise StoreError.other_identity(out.place, other)


def foreign_sources(
    paths: Sequence[str | Path], name: str | None, columns: Mapping[str, str]
) -> tuple[list[Source], Format]:
    """The files of ``paths``, with the failures that NeMo Gym wrote beside them, and their format, of that name or detected.
    Raises UsageError for ``columns`` of a format that is not text."""
    files = [file for path in paths for file in resolve(path, ROLLOUTS)]
    of_rollouts = [file for file in files if main_file(file.path) is None] or files
    format = format_named(name) if name is not None else detect(of_rollouts, columns)
    if columns and not format.holds_text:
        hint = "leave --map out: it is for answers and preferences as text"
        raise UsageError(f"--map: {format.name} has columns of its own", hint=hint)
    if format.name != "nemo-gym":
        return files, format
    listed = {file.path for file in files}
    beside = dict.fromkeys(failures_file(file.path) for file in of_rollouts if file.kind != "parquet")
    more = [file for path in beside if path.is_file() and path not in listed for file in resolve(path)]
    return [*files, *more], format


def _columns(given: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Field → column of ``map``. Raises UsageError."""
    try:
        return columns_of(fields_in(TEXT_FIELDS)(given))
    except ValueError as error:
        raise UsageError(f"--map: expected {error}") from None


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
    ``verl-sft`` write Parquet, ``verl-skip`` a batch of torch (``.pt``); ``nat-trajectories`` and ``nat-dpo-items`` write
    a collection to ``.json`` and a trajectory per line to ``.jsonl``; ``atif`` a trajectory per line, or one to ``.json``;
    the others JSON lines.
    Raises UsageError for an unknown format, StoreError for a file that is there and has other content (without
    ``overwrite``), DataError when there is nothing to export, RefusedError for ids or log-probabilities that no
    consumer may take (T206, L301 to L303) and for a rollout that is there twice (D701).
    """
    path = path_of(path, "export")
    target = local_output(output)
    if format not in (formats := exported_formats()):
        raise UsageError.unknown_choice("--format", format, formats, listed=_LIST)
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
    refuse_inputs(target, [path], TABLES[to.table], "exported")
    with single_file(target, overwrite=overwrite) as temporary:
        account = Export(str(path), format, TABLES[to.table], vocabulary(path), reward)
        with _naming_the_row(account):
            sources = resolve(path, to.table)
            batches = (batch for source in sources for batch in account.batches(source, to.columns, to.unread))
            to.save(to.convert(batches, account), Part(target.name, temporary), account)
        account.refuse_repeats(sources)
        if not account.read:
            hint = "`gymdata validate` shows what the files hold"
            run_json = find_run_json(path)
            if run_json is not None and (run_json.parent / REJECTED).is_file():
                hint = f"rows of the import were rejected: {run_json.parent / REJECTED} has their lines and reasons"
            raise DataError(f"{path}: got 0 {to.table}, expected at least 1 to export", hint=hint)
    return ExportSummary.of(str(target), account)


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
