"""``gymdata.import_rollouts`` and ``gymdata.export``: other projects' files to runs and back.

Invariants: every row that goes in comes out as a rollout (or a pair) or is named in rejected.jsonl with its line and
reason; what a format cannot hold is counted and reported; an output appears whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymdata.errors import DataError, StoreError, UsageError
from gymdata.interop import formats
from gymdata.interop.exporting import Export
from gymdata.interop.formats import FORMATS as FORMATS
from gymdata.interop.formats import SOURCES as SOURCES
from gymdata.interop.importing import ODD, Keys
from gymdata.interop.in_pieces import chat_of, fits, imported
from gymdata.public import Report, Row, path_of, paths_of
from gymdata.remote.reading import size_of
from gymdata.rollouts.schema import PAIRS, ROLLOUTS, TABLES, Table
from gymdata.scores.chosen import default_score, rescorings
from gymdata.store import Run, StageOutput, find_run_json, hash_file, read_run_json, resolve
from gymdata.store.columns import build
from gymdata.store.lineage import vocabulary
from gymdata.store.lines import encode_any
from gymdata.store.paths import RUN_JSON, beside, placed_output
from gymdata.store.reading import warn
from gymdata.store.run_json import differences, replacing
from gymdata.workers.tuning import rare_collections

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.chat.template import TransformersChat
    from gymdata.interop.importing import Rejected
    from gymdata.interop.nemo_gym.rebuild import PromptRebuilder
    from gymdata.store.paths import Source

REJECTED = "rejected.jsonl"
NOT_REBUILT = "not_rebuilt.jsonl"


@dataclass(slots=True, repr=False)
class ImportSummary(Report):
    """Summary of an import. ``rows_in`` (``rows`` in JSON) = ``rollouts`` + ``pairs`` + ``rejected``; ``reasons``
    counts rejected rows by code, ``duplicates`` the rollouts that are the same as an earlier one (D701; they are in the
    run as well).

    ``prompts_rebuilt`` and ``prompts_refused``: prompts that calls with generations lacked, when a tokenizer was given.
    """

    run: str
    format: str
    rows_in: int = 0
    rollouts: int = 0
    pairs: int = 0
    rejected: int = 0
    turns: int = 0
    breaks: int = 0
    without_token_data: int = 0
    without_reward: int = 0
    duplicates: int = 0
    prompts_rebuilt: int = 0
    prompts_refused: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """False when a row was rejected or there was none at all."""
        return not self.rejected and self.rows_in > 0

    def to_dict(self) -> dict[str, Any]:
        return {"rows" if name == "rows_in" else name: value for name, value in asdict(self).items()}

    def rows(self) -> list[Row]:
        rejected: list[Row] = [(f"  rejected, {code}", n) for code, n in self.reasons.items()]
        first: list[Row] = [("format", self.format), ("rows", self.rows_in), *rejected]
        if SOURCES[self.format] == "pairs":
            return [*first, ("pairs, without token data", self.pairs), ("written to", self.run)]
        rebuilt: list[Row] = [("prompts rebuilt", self.prompts_rebuilt), ("prompts not rebuilt", self.prompts_refused)]
        return [
            *first,
            ("rollouts", self.rollouts),
            ("turns with token ids", self.turns),
            ("breaks", self.breaks),
            ("rollouts without token data", self.without_token_data),
            ("rollouts without reward", self.without_reward),
            ("duplicate rollouts", self.duplicates),
            *(rebuilt if self.prompts_rebuilt or self.prompts_refused else ()),
            ("written to", self.run),
        ]

    def count_rejected(self, rejected: Sequence[Rejected]) -> None:
        """Add up after the last row."""
        self.rejected = len(rejected)
        self.rows_in = self.rollouts + self.pairs + self.rejected
        self.reasons = dict(sorted(Counter(r.code for r in rejected).items()))


@dataclass(slots=True, repr=False)
class ExportSummary(Report):
    """Summary of an export: ``rows_out`` rows (``rows`` in JSON). ``lost``: what the format cannot hold → in how many
    rows; ``skipped``: rows without a place in it."""

    output: str
    format: str
    rows_out: int = 0
    skipped: int = 0
    turns: int = 0
    turns_lost: int = 0
    lost: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """False when the format could hold no row: a script must not continue with an empty file."""
        return self.rows_out > 0

    def to_dict(self) -> dict[str, Any]:
        return {"rows" if name == "rows_out" else name: value for name, value in asdict(self).items()}

    def rows(self) -> list[Row]:
        return [
            ("rows", self.rows_out),
            *([("left out", self.skipped)] if self.skipped else []),
            *((f"  lost: {what}", n) for what, n in self.lost.items()),
            *([("turns delivered", self.turns - self.turns_lost)] if self.format == "nemo-gym" else []),
            ("written to", self.output),
        ]


def import_rollouts(
    files: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    source: str | None = None,
    run_id: str | None = None,
    overwrite: bool = False,
    format: str = "parquet",
    tokenizer: str | None = None,
    workers: int = 1,
    command: Sequence[str] = (),
) -> ImportSummary:
    """Import files of another project (JSON or JSON lines, plain or compressed; files or globs) into the run
    ``output``.

    ``source``: one of ``SOURCES``, detected from the files when not given. Files of pairs become ``output/pairs.parquet``.
    Rows that cannot be imported go to ``output/rejected.jsonl`` with file, line, code, reason and how they begin; all
    others become rollouts, those without token ids as well (they have no turns). Importing the same files again does
    nothing. Raises DataError when a file is missing, cannot be read to its end or is in no known format, StoreError when
    the run is of other files and not ``overwrite``.

    ``tokenizer``: the policy's folder. Missing prompts of NeMo Gym calls with captured generations are then rebuilt
    with its template; ``extra`` names their turns (``prompts_rebuilt``), an export writes them and marks them. What
    cannot be proved stays without ids and is named in ``output/not_rebuilt.jsonl``, with the position and the decoded
    windows of both sides. Without it nothing is rebuilt. ``workers``: processes that read parts of NeMo Gym files; the
    run is the same.
    """
    if source is not None and source not in SOURCES:
        raise UsageError.unknown_choice("--from", source, SOURCES)
    output = placed_output(output)
    given = paths_of(files, "import_rollouts", "the path of a file or a glob, or several of them")
    for path in map(Path, given):
        if path.is_dir() and not (path / RUN_JSON).is_file():
            raise DataError(f"{path}: is a folder, expected files", hint=f"name them, or give a glob: '{path}/*.jsonl'")
    sources = [one for path in given for one in resolve(path, ROLLOUTS)]
    name = source or formats.detect(sources)
    if tokenizer is not None and name != "nemo-gym":
        raise UsageError(
            f"--tokenizer {tokenizer}: prompts are rebuilt in NeMo Gym rows only, and these files are {name}",
            hint="leave --tokenizer out",
        )
    summary = ImportSummary(str(output), name, files=[str(s.path) for s in sources])
    read = [{"path": str(s.path.resolve()), "bytes": size_of(s.path), "xxh3": hash_file(s.path)} for s in sources]
    identity = {"imported": [f["xxh3"] for f in read], "format": name}
    parents = [{"path": f["path"], "run_id": None, "run_json_xxh3": None, "xxh3": f["xxh3"]} for f in read]
    facts: dict[str, Any] = {
        "stage": "import",
        "format": name,
        "command": list(command),
        "parents": parents,
        "sources": read,
    }
    if SOURCES[name] == "pairs":
        run_id = run_id or Path(output).name
        with StageOutput(
            Path(output) / RUN_JSON, "import", ["pairs.parquet"], overwrite=overwrite, kind="import-pairs"
        ) as out:
            if out.facts and not overwrite and (other := differences(out.facts.get("identity") or {}, identity)):
                raise StoreError.other_identity(out.folder, other)
            return _import_pairs(sources, out, summary, identity, facts, run_id)
    rejected: list[Rejected] = []
    shapes: list[dict[str, Any]] = []
    rebuild: PromptRebuilder | None = None
    if tokenizer is not None:
        chat = chat_of(tokenizer)
        rebuild = _rebuilder(chat)
        facts["tokenizer"] = {"path": tokenizer, **chat.facts()}
        identity |= {key: facts["tokenizer"][key] for key in ("tokenizer_hash", "chat_template_hash")}
    with Run.open(
        output,
        identity=identity,
        extent={},
        operation={"files": summary.files},
        facts=facts,
        run_id=run_id,
        overwrite=overwrite,
        take_over=overwrite,
        format="jsonl" if format == "jsonl" else "parquet",
    ) as run:
        # An import that was stopped after it had met an unfit row is resumed with the rows that it had found fit.
        careful = bool(read_run_json(run.folder).get("rows_tried_alone"))

        def write(careful: bool) -> None:
            if workers > 1 and name == "nemo-gym":
                made = imported(
                    sources,
                    workers,
                    run_id=run.run_id,
                    tokenizer=tokenizer,
                    careful=careful,
                    rejected=rejected,
                    rebuild=rebuild,
                )
                _write_batches(run, made, summary)
            else:
                _write_rollouts(run, name, sources, summary, rejected, shapes, rebuild, fits if careful else None)

        try:
            write(careful)
        except ODD:
            if careful:
                raise
            # Rows are turned into columns many at a time. This time each is tried alone, so that only unfit ones are lost.
            run.note(rows_tried_alone=True)
            rejected.clear()
            shapes.clear()
            summary = ImportSummary(str(output), name, files=summary.files)
            rebuild = _rebuilder(chat) if rebuild is not None else None
            write(careful=True)
        summary.count_rejected(rejected)
        _write_lines(Path(output) / REJECTED, _rejected_lines(rejected))
        if rebuild is not None:
            summary.prompts_rebuilt, summary.prompts_refused = rebuild.rebuilt, len(rebuild.refused)
            left = (
                {"file": str(one.file), "line": one.line, "rollout_id": one.rollout_id, **asdict(one.refused)}
                for one in rebuild.refused
            )
            _write_lines(Path(output) / NOT_REBUILT, [encode_any(one) + b"\n" for one in left])
        run.note(counts={k: v for k, v in summary.to_dict().items() if k not in ("run", "files", "format")})
        if shapes:
            run.note(documents=shapes)
    return summary


def _write_rollouts(
    run: Run,
    name: str,
    sources: list[Source],
    summary: ImportSummary,
    rejected: list[Rejected],
    shapes: list[dict[str, Any]],
    rebuild: PromptRebuilder | None,
    check: Callable[[Mapping[str, Any]], None] | None,
) -> None:
    # The order of rows is that of the files, so what an import that was stopped has written is their beginning.
    done = run.sealed_rows
    rows = formats.read(
        name, sources, run_id=run.run_id, reject=rejected.append, shapes=shapes, rebuild=rebuild, check=check
    )
    counted = _counted(rows, summary)
    with rare_collections():
        for _ in islice(counted, done):
            pass
        run.write(counted)


def _write_batches(run: Run, batches: Iterator[pa.RecordBatch], summary: ImportSummary) -> None:
    """The same for batches of rows."""
    skip, seen = run.sealed_rows, Keys()

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal skip
        for batch in batches:
            summary.rollouts += batch.num_rows
            turns, breaks = (batch.column(name).to_numpy() for name in ("n_turns", "n_breaks"))
            summary.turns += int(turns.sum())
            summary.breaks += int(breaks.sum())
            summary.without_token_data += int((turns == 0).sum())
            summary.without_reward += batch.column("reward").null_count
            summary.duplicates += sum(not seen.add(name) for name in batch.column("rollout_id").to_pylist())
            done = min(skip, batch.num_rows)
            skip -= done
            if done < batch.num_rows:
                yield batch.slice(done)

    run.write_batches(counted())


def _import_pairs(
    sources: list[Source],
    out: StageOutput,
    summary: ImportSummary,
    identity: Mapping[str, Any],
    facts: Mapping[str, Any],
    run_id: str,
) -> ImportSummary:
    import pyarrow as pa

    from gymdata.interop.trajectories import nat_pairs

    rejected: list[Rejected] = []
    shapes: list[dict[str, Any]] = []
    required = [column for column in PAIRS.schema.names if column not in PAIRS.optional]

    def write(check: Callable[[Mapping[str, Any]], None] | None) -> None:
        rows = nat_pairs.table_rows(sources, run_id=run_id, reject=rejected.append, shapes=shapes, check=check)
        # References to a reference model's log-probabilities are there when our own pairs were exported with them.
        first = next(rows, None)
        optional = [c for c in PAIRS.schema.names if c in PAIRS.optional and first is not None and c in first[0]]
        columns = [*required, *optional]
        every = chain([] if first is None else [first], rows)

        def batches() -> Iterator[Any]:
            # Few at a time: a row as Python objects is ten times as large as in columns.
            for chunk in iter(lambda: list(islice(every, 512)), []):
                summary.pairs += len(chunk)
                yield build([row for row, _ in chunk], PAIRS, columns, "imported pairs", [line for _, line in chunk])

        schema = pa.schema([PAIRS.schema.field(column) for column in columns], metadata=PAIRS.metadata)
        out.batches("pairs.parquet", batches(), PAIRS, schema)

    try:
        write(None)
    except ODD:
        # As with rollouts: each row alone, so that only unfit ones are lost.
        rejected.clear()
        shapes.clear()
        summary.pairs = 0
        write(partial(fits, table=PAIRS))
    summary.count_rejected(rejected)
    if rejected:
        part = out.part(REJECTED)
        with part.path.open("wb") as file:
            file.writelines(_rejected_lines(rejected))
        part.rows = len(rejected)
    counts = {k: v for k, v in summary.to_dict().items() if k not in ("run", "files", "format")}
    out.finish({**facts, "identity": identity, "run_id": run_id, "counts": counts, "documents": shapes})
    return summary


def _counted(rows: Iterable[dict[str, Any]], summary: ImportSummary) -> Iterator[tuple[dict[str, Any], int]]:
    seen = Keys()
    for row in rows:
        summary.rollouts += 1
        summary.duplicates += not seen.add(row["rollout_id"])
        summary.turns += row["n_turns"]
        summary.breaks += row["n_breaks"]
        summary.without_token_data += not row["n_turns"]
        summary.without_reward += row["reward"] is None
        yield row, row["n_context_tokens"] + row["n_generated_tokens"]


def _rejected_lines(rejected: Sequence[Rejected]) -> list[bytes]:
    lines = []
    for b in rejected:
        # A reason may quote a lone surrogate, which no output file can hold.
        reason = b.reason.encode("utf-8", "replace").decode()
        one = {"file": str(b.file), "line": b.line, "code": b.code, "reason": reason, "text": b.text}
        lines.append(encode_any(one) + b"\n")
    return lines


def _write_lines(path: Path, lines: Sequence[bytes]) -> None:
    if not lines:
        path.unlink(missing_ok=True)
        return
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.writelines(lines)


def _rebuilder(chat: TransformersChat) -> PromptRebuilder:
    from gymdata.interop.nemo_gym.rebuild import PromptRebuilder

    return PromptRebuilder(chat)


def export(
    path: str | Path,
    output: str | Path,
    format: str,
    *,
    reward: str | None = None,
    overwrite: bool = False,
    workers: int = 1,
    command: Sequence[str] = (),
) -> ExportSummary:
    """Write the rollouts under ``path`` in another project's format, one of ``FORMATS``.

    ``reward``: the score that is written as the reward, by default the newest, else the total reward of ``collect``.

    ``nemo-gym``, ``nat-trajectories`` and ``atif`` keep ids and log-probabilities, with whole prompts; the others are text.
    ``trl-preference``, ``nat-dpo`` and ``nat-dpo-items`` are made from pairs: ``path`` is a pairs file or folder, or a run
    that holds one. ``verl`` writes Parquet; ``nat-trajectories`` and ``nat-dpo-items`` write a collection to ``.json`` and a
    trajectory per line to ``.jsonl``; ``atif`` a trajectory per line, or one to ``.json``; the others JSON lines. Raises
    UsageError for an unknown format or an output that exists, DataError when there is nothing to export, RefusedError for
    ids or log-probabilities that no consumer may take (T206, L301 to L303). ``workers``: processes that make rows of parts
    of the files; what is written is the same.
    """
    path = path_of(path, "export")
    target = placed_output(output)
    if format not in FORMATS:
        raise UsageError.unknown_choice("--format", format, FORMATS)
    suffixes = formats.SUFFIXES.get(format, (".jsonl",))
    if target.suffix not in suffixes:
        raise UsageError.bad_value("-o", str(output), f"a name ending in {' or '.join(suffixes)}, for {format}")
    if format in formats.WITH_REWARD:
        reward, note = default_score([path], reward)
        if note:
            warn(note)
    elif reward is not None:
        raise UsageError(f"--reward {reward}: {format} holds no rewards", hint="leave it out")
    sources = resolve(path, formats.table_of(format))
    if any(target.exists() and target.samefile(s.path) for s in sources):
        raise UsageError(f"-o {target}: is one of the files that are exported", hint="give another name")
    settings = {"format": format, "path": str(Path(path).resolve()), **({"reward": reward} if reward else {})}
    with StageOutput(beside(target), "export", [target.name], overwrite=overwrite) as out:
        out.refuse_other("config", settings, "an export that was made")
        described = {"command": list(command), "config": settings}
        return _export(
            path, sources, target, Export(str(path), format, vocabulary(path), reward), workers, out, described
        )


def _export(
    path: str | Path,
    sources: Sequence[Source],
    target: Path,
    account: Export,
    workers: int,
    out: StageOutput,
    facts: Mapping[str, Any],
) -> ExportSummary:
    format = account.format
    summary = ExportSummary(str(target), format)
    part = out.part(target.name)
    try:
        with rare_collections():
            rows = account.made(sources, workers)
            summary.rows_out = formats.write(format, rows, part, target, formats.shapes_of(path, format))
    except DataError:
        raise
    except ODD as error:
        raise account.unwritable(error) from error
    part.rows = summary.rows_out
    if not account.seen:
        raise _nothing_there(path, TABLES[formats.table_of(format)])
    summary.turns, summary.turns_lost = account.turns, account.turns_lost
    summary.skipped = account.seen - summary.rows_out
    lost = {**account.lost, "turns that no message names": account.turns_lost}
    summary.lost = {what: n for what, n in lost.items() if n}
    from gymdata.store.lineage import parent_of

    scored_in = rescorings([path], account.score) if account.score else []
    out.finish({**facts, "parents": [parent_of(one) for one in (path, *scored_in)], "counts": summary.to_dict()})
    return summary


def _nothing_there(path: str | Path, table: Table) -> DataError:
    """Why there is no row to export, and what to do."""
    found = find_run_json(path)
    facts = read_run_json(found) if found is not None else {}
    counts = facts.get("counts") or {}
    if facts.get("stage") == "import" and counts.get("rejected"):
        where = found.parent / REJECTED if found is not None else REJECTED
        hint = f"all {counts['rejected']:,} rows of the import were rejected: {where} has their lines and reasons"
    elif table is PAIRS:
        hint = "`gymdata pairs` makes pairs of scored rollouts, and prints what became of every group"
    else:
        hint = "`gymdata validate` shows what the files hold"
    return DataError(f"{path}: got 0 {table.name}, expected at least 1 to export", hint=hint)
