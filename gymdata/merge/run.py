"""``gymdata merge``: rollouts of several runs that were collected alike, as one output.

Invariants: a row is the row that was read; a rollout is there once, however many of the runs hold it, and two runs that hold
it with different contents are refused; runs of other settings are refused, by the settings' names; tokens stream, so memory
grows with the ids only; the output's run.json leads back to every run.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import DataError, RefusedError, UsageError, counted
from gymdata.progress import NullProgress, Progress
from gymdata.public import Figures, Report, Row, paths_of
from gymdata.remote.upload import refuse_open
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import StageOutput, find_run_json, read_run_json, resolve, scan_batches
from gymdata.store.journal import FAILURES
from gymdata.store.lineage import Paths, common_identity, parents_of, run_folder
from gymdata.store.lock import refuse_held
from gymdata.store.paths import RunFacts, files_apart, matches
from gymdata.store.reading import warn
from gymdata.store.run_json import differences, state_left
from gymdata.store.stage_output import derived, described_by

__all__ = ["MergeReport", "merge"]

_NAME = "rollouts.parquet"
_BATCH_ROWS = 4_096
#: How many of the settings in which runs differ are named.
_FAULTS = 4
#: Columns in which two attempts at one rollout may differ.
_TIMES = ("started_at", "duration_s")
#: Keys of run.json that later commands read besides its identity.
_ALIKE = ("model", "policy", "chat", "engine")


@dataclass(frozen=True, slots=True, repr=False)
class MergeReport(Report):
    """What ``gymdata.merge`` put together.

    ``rollouts``: in the output; ``duplicates``: that were there before, and dropped; ``shards_missing``: parts of the
    tasks that none of the runs collected; ``not_merged``: stage outputs in the runs, which are not copied;
    ``failures``: files of failed attempts, which stay with their runs; ``file``: None after a dry run.
    """

    runs: list[dict[str, Any]]
    rollouts: int
    duplicates: int
    shards_missing: list[str]
    not_merged: list[str]
    failures: list[str]
    file: Path | None = None

    def to_dict(self) -> Figures:
        return asdict(self) | {"file": str(self.file) if self.file is not None else None}

    def rows(self) -> list[Row]:
        rows: list[Row] = [
            ("runs", len(self.runs)),
            ("rollouts", self.rollouts),
            ("duplicates dropped", self.duplicates),
        ]
        if self.shards_missing:
            rows.append(("shards missing", ", ".join(self.shards_missing)))
        if self.not_merged:
            rows.append(("not merged", ", ".join(self.not_merged)))
        if self.failures:
            rows.append(("failed attempts stay in", ", ".join(self.failures)))
        if self.file is not None:
            rows.append(("written to", str(self.file)))
        return rows


def merge(
    path: Paths,
    output: str | Path | None = None,
    *,
    write: bool = True,
    dry_run: bool = False,
    overwrite: bool = False,
    command: Sequence[str] = (),
    progress: Progress | None = None,
) -> MergeReport:
    """Write the rollouts of the runs ``path`` (run folders, files that a run.json describes, or globs) as one output.

    ``output``: a folder (``rollouts.parquet``) or a .parquet/.jsonl file. Shards of one run (``collect --shard``) become
    that run; runs with other run IDs may differ in their seed, and nothing else.
    With ``dry_run`` (or ``write`` false) nothing is written.
    Raises UsageError for runs of different settings, naming them, RefusedError (D701) for a rollout that two runs hold with
    different contents, StoreError while one of the runs is written, and as ``filter`` for the output.
    """
    paths = [match for pattern in paths_of(path, "merge") for match in matches(pattern)]
    unique: dict[Path, Path] = {}
    for source in paths:
        unique.setdefault(source.resolve(), source)
    for source, times in Counter(source.resolve() for source in paths).items():
        if times > 1:
            warn(f"{source}: given {'twice' if times == 2 else f'{times} times'}; its rollouts are kept once")
    sources = list(unique.values())
    if len(sources) < 2:
        raise UsageError(f"got one run, {sources[0]}, expected two or more", hint="name every run to merge")
    facts = [_facts(source) for source in sources]
    _refuse_others(sources, facts)
    target = None
    if write and not dry_run:
        target = files_apart(output, _NAME, sources, ROLLOUTS, "merged")["kept"]
    ids = [_ids(source) for source in sources]
    counted_ids = pa.chunked_array([chunk for column in ids for chunk in column.chunks], pa.string()).value_counts()
    several = counted_ids.filter(pc.greater(counted_ids.field("counts"), 1))
    # The ids that are there more than once, with how often.
    twice = dict(zip(several.field("values").to_pylist(), several.field("counts").to_pylist(), strict=True))
    duplicates = sum(n - 1 for n in twice.values())
    report = MergeReport(
        runs=[
            {
                "path": str(source),
                "run_id": run_facts.get("run_id"),
                "shard": ", ".join(_shards(run_facts)) or None,
                "rollouts": len(source_ids),
            }
            for source, run_facts, source_ids in zip(sources, facts, ids, strict=True)
        ],
        rollouts=sum(map(len, ids)) - duplicates,
        duplicates=duplicates,
        shards_missing=_missing(facts),
        not_merged=[str(folder) for run in _folders(sources) for folder in derived(run)],
        failures=[str(file) for run in _folders(sources) if (file := run / FAILURES).is_file() and file.stat().st_size],
        file=target,
    )
    _refuse_contradictions(sources, twice)
    if target is not None:
        _write(report, sources, facts, set(twice), target, overwrite, command, progress or NullProgress())
    return report


def _facts(source: Path) -> RunFacts:
    """The run.json of a run; warns of a collected one that lacks rollouts. Raises DataError for an import that was
    stopped."""
    run_json = find_run_json(source)
    if run_json is None:
        resolve(source, ROLLOUTS)  # says what is wrong with the path itself
        raise UsageError(
            f"{source}: no run.json says how these rollouts were made",
            hint="give run folders, or files that gymdata wrote",
        )
    refuse_held(run_json.parent)
    refuse_open(run_json)
    resolve(source, ROLLOUTS)
    facts = read_run_json(run_json)
    if (state := state_left(facts)) == "complete":
        return facts
    rows = len(_ids(source))
    if facts.get("stage") == "import":
        raise DataError(
            f"{source}: the import was {state} with {rows:,} rollouts: how many are missing is not known",
            hint="rerun the same `gymdata import` command to resume, then merge",
        )
    extent = facts.get("extent") or {}
    tasks, per_task = extent.get("tasks"), extent.get("num_rollouts")
    of = f" of {tasks * per_task:,}" if isinstance(tasks, int) and isinstance(per_task, int) else ""
    warn(
        f"{source}: {state}: merged with {rows:,}{of} rollouts; rerun the same `gymdata collect` command for the others"
    )
    return facts


def _refuse_others(sources: Sequence[Path], facts: Sequence[RunFacts]) -> None:
    """Raises UsageError that names each setting in which a run differs from the first, and for shards of one run that were
    collected from task files of different contents."""
    first = facts[0]
    faults = []
    for source, other in zip(sources[1:], facts[1:], strict=True):
        # Runs of one task set may have different seeds; the shards of one run have the same seed. Which files were
        # imported is no setting.
        free = {"imported"}
        free |= {"seed"} if first.get("run_id") is None or first.get("run_id") != other.get("run_id") else set()
        was, now = ({k: v for k, v in (f.get("identity") or {}).items() if k not in free} for f in (first, other))
        faults += [f"{key}: {a!r} in {sources[0]}, {b!r} in {source}" for key, a, b in differences(was, now)]
    if faults:
        kinds = dict.fromkeys(str(f.get("stage")) for f in facts)
        lead = "made with other settings" if len(kinds) == 1 else f"of different kinds ({', '.join(kinds)})"
        more = f"; … and {len(faults) - _FAULTS:,} more settings" if len(faults) > _FAULTS else ""
        raise UsageError(
            f"these runs are {lead}: {'; '.join(faults[:_FAULTS])}{more}",
            hint="merge runs that were collected alike; `gymdata filter RUN RUN --where true -o …` joins any",
        )
    read: dict[object, tuple[Path, list[str]]] = {}
    for source, run_facts in zip(sources, facts, strict=True):
        files = (run_facts.get("tasks") or {}).get("files") or []
        hashes = sorted(str(file.get("xxh3")) for file in files)
        earlier, expected = read.setdefault(run_facts.get("run_id"), (source, hashes))
        if run_facts.get("run_id") is not None and _shards(run_facts) and hashes != expected:
            raise UsageError(
                f"{earlier} and {source} are shards of one run, and their task files differ: "
                f"xxh3 {', '.join(expected)} and {', '.join(hashes)}",
                hint="collect both shards from the same task files",
            )


def _ids(source: Path) -> pa.ChunkedArray:
    return pa.chunked_array((batch.column(0) for batch in scan_batches(source, ROLLOUTS, ["rollout_id"])), pa.string())


def _refuse_contradictions(sources: Sequence[Path], twice: Mapping[str, int]) -> None:
    """Raises RefusedError when copies of a rollout differ in anything but their times."""
    if not twice:
        return
    duplicate_ids = pa.array(list(twice), pa.string())
    first: dict[str, tuple[dict[str, bytes], Path]] = {}
    faults: list[str] = []
    for source in sources:
        for batch in scan_batches(source, ROLLOUTS, None, _BATCH_ROWS):
            for row in batch.filter(pc.is_in(batch.column("rollout_id"), value_set=duplicate_ids)).to_pylist():
                hashes = {
                    name: hashlib.blake2b(orjson.dumps(value, default=str), digest_size=16).digest()
                    for name, value in row.items()
                    if name not in _TIMES and value is not None
                }
                earlier, where = first.setdefault(row["rollout_id"], (hashes, source))
                if other := sorted(
                    name for name in earlier.keys() | hashes.keys() if earlier.get(name) != hashes.get(name)
                ):
                    faults.append(f"{row['rollout_id']} in {where} and {source}: {', '.join(other)}")
    if faults:
        more = f"; … and {len(faults) - 3:,} more" if len(faults) > 3 else ""
        raise RefusedError(
            f"{counted(len(faults), 'rollout is', 'rollouts are')} in several runs with different contents: "
            f"{'; '.join(faults[:3])}{more}",
            code="D701",
            hint="they were sampled twice under one run ID: leave one of the runs out",
        )


def _shards(facts: RunFacts) -> list[str]:
    attempts = [attempt.get("extent") or {} for attempt in facts.get("attempts") or []]
    shards = {extent.get("shard") for extent in attempts} or {None}
    return [] if None in shards else sorted(map(str, shards))


def _missing(facts: Sequence[RunFacts]) -> list[str]:
    """The parts that no run collected, for each split of a run's tasks; none if a run collected all."""
    splits: dict[tuple[object, int], set[int]] = {}
    unsharded = {f.get("run_id") for f in facts if not _shards(f)}
    for run_facts in facts:
        for shard in _shards(run_facts):
            index, count = map(int, shard.split("/"))
            splits.setdefault((run_facts.get("run_id"), count), set()).add(index)
    return [
        f"{index}/{count} of run {run}"
        for (run, count), indices in splits.items()
        for index in sorted(set(range(1, count + 1)) - indices)
        if run not in unsharded
    ]


def _folders(sources: Sequence[Path]) -> list[Path]:
    return [folder for source in sources if source.is_dir() and (folder := run_folder(source)) is not None]


def _write(
    report: MergeReport,
    sources: Sequence[Path],
    facts: Sequence[RunFacts],
    twice: set[str],
    target: Path,
    overwrite: bool,
    command: Sequence[str],
    progress: Progress,
) -> None:
    parents = parents_of(sources)
    run_json = described_by(target, _NAME)
    with StageOutput(run_json, "merge", [target.name], overwrite=overwrite) as out:
        config = {"runs": sorted(str(source.resolve()) for source in sources)}
        out.refuse_other("config", config, "merged rollouts")
        out.batches(target.name, _once(sources, twice, report.rollouts, progress), ROLLOUTS, ROLLOUTS.arrow)
        run_ids = {f.get("run_id") for f in facts}
        alike = {
            key: facts[0][key] for key in _ALIKE if key in facts[0] and all(f.get(key) == facts[0][key] for f in facts)
        }
        counts = {"runs": len(sources), "rollouts": report.rollouts, "duplicates": report.duplicates}
        out.finish(
            {
                **alike,
                **({"run_id": run_ids.pop()} if len(run_ids) == 1 and None not in run_ids else {}),
                "command": list(command),
                "config": config,
                "parents": parents,
                "identity": common_identity(sources),
                "counts": counts | {"shards_missing": report.shards_missing},
            }
        )


def _once(sources: Sequence[Path], twice: set[str], total: int, progress: Progress) -> Iterator[pa.RecordBatch]:
    """Every row, of duplicates the first."""
    several, yielded, done = pa.array(sorted(twice), pa.string()), set(), 0
    for source in sources:
        for batch in scan_batches(source, ROLLOUTS, None, _BATCH_ROWS):
            ids = batch.column("rollout_id")
            unique = batch
            if twice and pc.any(pc.is_in(ids, value_set=several)).as_py():
                keep = []
                for name in ids.to_pylist():
                    keep.append(name not in yielded)
                    if name in twice:
                        yielded.add(name)
                unique = batch.filter(pa.array(keep))
            done += unique.num_rows
            if unique.num_rows:
                yield unique
            progress.update(done=done, total=total)
