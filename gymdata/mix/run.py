"""``gymdata mix``: a part of each of several runs or files, by weight, as one output.

Invariants: a row is the row that was read; tasks stay whole, so that a group is in the output, and on one side of a split,
with all its rows or not at all; no row is there twice; the output's run.json leads back to every source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from gymdata.errors import RefusedError, UsageError, counted, option
from gymdata.mix.near_duplicates import near_duplicates
from gymdata.mix.settings import MixConfig
from gymdata.progress import NullProgress, Progress
from gymdata.public import Figures, Report, Row, path_of
from gymdata.rollouts.messages import joined_contents, split_messages, split_tasks
from gymdata.rollouts.schema import PAIRS, ROLLOUTS, Table
from gymdata.store import StageOutput, scan_batches
from gymdata.store.lineage import chosen_rows, common_identity, parents_of, refuse_duplicates
from gymdata.store.paths import files_apart
from gymdata.store.stage_output import described_by
from gymdata.store.tables import holds_pairs


@dataclass(frozen=True, slots=True)
class MixedSource:
    """``rows`` of a source and its ``tasks``; ``near_duplicates``: tasks that were left out; ``taken``: rows in the output;
    ``share``: of the output."""

    path: str
    weight: float
    rows: int
    tasks: int
    near_duplicates: int
    taken: int
    taken_tasks: int
    share: float


@dataclass(frozen=True, slots=True, repr=False)
class MixReport(Report):
    """What ``gymdata.mix`` took. ``table``: rollouts or pairs; ``similar``: task that was left out → the earlier one that
    its prompt is like; ``sides``: side ("kept", or "train" and "test") → rows; ``files``: side → file, empty after a dry
    run."""

    table: str
    rows_out: int
    sources: list[MixedSource]
    similar: dict[str, str]
    sides: dict[str, int]
    files: dict[str, Path] = field(default_factory=dict)

    def to_dict(self) -> Figures:
        return asdict(self) | {"files": {side: str(path) for side, path in self.files.items()}}

    def rows(self) -> list[Row]:
        split = len(self.sides) > 1
        return [
            (self.table, self.rows_out),
            *((("near-duplicate tasks left out", len(self.similar)),) if self.similar else ()),
            *(((side, rows) for side, rows in self.sides.items()) if split else ()),
            *((f"{side} file" if split else "written to", str(path)) for side, path in self.files.items()),
        ]


def mix(
    path: Mapping[str, float],
    output: str | Path | None = None,
    *,
    config: MixConfig | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    **settings: Any,
) -> MixReport:
    """Write a part of each source: ``path`` is source (run folder, file or glob of rollouts, or of pairs) → weight, the
    share of its rows in the output relative to the other weights.

    ``config`` is a ``MixConfig``. ``output``: a folder (``rollouts.parquet`` or ``pairs.parquet``; with ``test_share``
    ``train.parquet`` and ``test.parquet``) or a .parquet/.jsonl file (its test side is ``NAME.test.SUFFIX``). Tasks are
    drawn by a seeded hash of their names and taken whole, so a share may be below its weight by less than one task. With
    ``dry_run`` nothing is written.
    Raises UsageError for weights that are not numbers above 0, for sources of rollouts and of pairs, or of different
    tokenizers, and for more rows than there are; RefusedError for a rollout (D701) or a pair (P606) that is there twice, and
    when nothing of a source can be taken.
    """
    config = MixConfig.called_with(mix, config, settings)
    if not isinstance(path, Mapping) or not path:
        raise UsageError(
            f"gymdata.mix: got {path!r}, expected source → weight", hint='mix({"runs/a": 0.7, "runs/b": 0.3})'
        )
    for name, weight in path.items():
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < float("inf"):
            raise UsageError.bad_value(f"the weight of {name}", weight, "a number above 0")
    weights = {path_of(name, "mix"): float(weight) for name, weight in path.items()}
    sources = list(weights)
    of_pairs = [holds_pairs(source) for source in sources]
    if any(of_pairs) and not all(of_pairs):
        raise UsageError(
            f"{sources[of_pairs.index(True)]} holds pairs, and {sources[of_pairs.index(False)]} does not",
            hint="mix rollouts with rollouts, or pairs with pairs",
        )
    table = PAIRS if all(of_pairs) else ROLLOUTS
    hashes = {source: common_identity([source]).get("tokenizer_hash") for source in sources}
    tokenizers = {source: value for source, value in hashes.items() if value is not None}
    if len(set(tokenizers.values())) > 1:
        first = next(iter(tokenizers))
        other = next(source for source, value in tokenizers.items() if value != tokenizers[first])
        raise UsageError(
            f"{first} and {other} have the token IDs of different tokenizers",
            hint="one file holds the IDs of one tokenizer: mix runs of models that share it",
        )
    targets = (
        files_apart(output, f"{table.name}.parquet", sources, table, "mixed", split=config.test_share is not None)
        if not dry_run
        else {}
    )
    rows = _Rows(sources, table, config)
    report, sides = _mixed(rows, weights, config)
    if targets:
        _write(report, rows, sides, targets, weights, config, overwrite, command, progress or NullProgress())
    return report


class _Rows:
    """The ids and tasks of all rows, in the order of their sources, and which tasks are too like an earlier one."""

    def __init__(self, sources: Sequence[str | Path], table: Table, config: MixConfig) -> None:
        self.sources, self.table = sources, table
        ids: list[pa.Array] = []
        tasks: list[pa.Array] = []
        lengths: list[int] = []
        prompts: dict[str, str] = {}
        columns = [table.schema.names[0], "task_id"]
        if config.near_duplicates is not None:
            columns += ["prompt"] if table is PAIRS else ["messages", "n_turns"]
        for source in sources:
            start = sum(map(len, tasks))
            for batch in scan_batches(source, table, columns):
                ids.append(batch.column(0))
                tasks.append(batch.column("task_id"))
                if config.near_duplicates is not None:
                    opening = (
                        batch.column("prompt")
                        if table is PAIRS
                        else split_messages(batch.column("messages"), batch.column("n_turns").to_numpy())[0]
                    )
                    for task, text in zip(tasks[-1].to_pylist(), joined_contents(opening).to_pylist(), strict=True):
                        prompts.setdefault(task, text)
            lengths.append(sum(map(len, tasks)) - start)
        self.ids = pa.chunked_array(ids, pa.string())
        if table is ROLLOUTS:
            refuse_duplicates(pa.table({"rollout_id": self.ids}), sources)
        elif extra := len(self.ids) - len(distinct := self.ids.value_counts()):
            first = distinct.filter(pc.greater(distinct.field("counts"), 1))[0]["values"].as_py()
            raise RefusedError(
                f"{counted(extra, 'pair is', 'pairs are')} there more than once (first: {first})",
                code="P606",
                hint="is a source a copy of another? No training takes a pair twice",
            )
        encoded = pa.chunked_array(tasks, pa.string()).combine_chunks().dictionary_encode()
        self.names: list[str] = encoded.dictionary.to_pylist()
        #: Of each row: the place of its task among ``names``, and of its source.
        self.task: npt.NDArray[np.int64] = encoded.indices.to_numpy().astype(np.int64)
        self.source: npt.NDArray[np.int64] = np.repeat(np.arange(len(sources)), lengths)
        limit = config.near_duplicates
        self.similar = {} if limit is None else near_duplicates(prompts.items(), limit)


def _mixed(
    rows: _Rows, weights: Mapping[str | Path, float], config: MixConfig
) -> tuple[MixReport, dict[str, npt.NDArray[np.bool_]]]:
    """What is taken, and which rows are on which side."""
    left_out = np.array([name in rows.similar for name in rows.names], bool)
    usable = ~left_out[rows.task]
    available = np.bincount(rows.source[usable], minlength=len(weights))
    if len(empty := np.flatnonzero(available == 0)):
        why = "every task is like an earlier one" if rows.similar else "there is no row"
        raise RefusedError(
            f"{list(weights)[empty[0]]}: nothing to take: {why}", hint="leave this source out; nothing was written"
        )
    quotas = rows_of_sources(list(weights), np.array(list(weights.values())), available, config.rows)
    # The same for every source, so that a task that two sources hold is taken from both or from neither where it can be.
    keys = np.array([xxhash.xxh3_64_intdigest(name.encode(), config.seed) for name in rows.names], np.uint64)
    selected = np.zeros(len(usable), bool)
    mixed: list[MixedSource] = []
    for number, (path, weight) in enumerate(weights.items()):
        in_source = rows.source == number
        tasks, sizes = np.unique(rows.task[in_source & usable], return_counts=True)
        order = np.argsort(keys[tasks], kind="stable")
        # The tasks, in this order, whose rows fit together.
        chosen, left = list[int](), int(quotas[number])
        for task, size in zip(tasks[order].tolist(), sizes[order].tolist(), strict=True):
            if size <= left:
                chosen.append(task)
                left -= size
        if not chosen:
            raise RefusedError(
                f"{path}: none of its {counted(len(tasks), 'task')} fits into {counted(int(quotas[number]), 'row')}",
                hint=f"give more {option('rows')}, or this source a larger weight",
            )
        drawn = in_source & usable & np.isin(rows.task, chosen)
        selected |= drawn
        all_tasks = np.unique(rows.task[in_source])
        mixed.append(
            MixedSource(
                path=str(path),
                weight=weight,
                rows=int(in_source.sum()),
                tasks=len(all_tasks),
                near_duplicates=int(left_out[all_tasks].sum()),
                taken=int(drawn.sum()),
                taken_tasks=len(chosen),
                share=0.0,
            )
        )
    total = int(selected.sum())
    sides = {"kept": selected}
    if config.test_share is not None:
        names = [rows.names[task] for task in np.unique(rows.task[selected])]
        held_out = split_tasks(names, config.test_share, config.seed)
        in_test = np.array([name in held_out for name in rows.names], bool)[rows.task]
        sides = {"train": selected & ~in_test, "test": selected & in_test}
    report = MixReport(
        table=rows.table.name,
        rows_out=total,
        sources=[MixedSource(**{**asdict(source), "share": source.taken / total}) for source in mixed],
        similar=rows.similar,
        sides={side: int(mask.sum()) for side, mask in sides.items()},
    )
    return report, sides


def rows_of_sources(
    sources: Sequence[str | Path], weights: npt.NDArray[np.float64], available: npt.NDArray[np.int64], rows: int | None
) -> npt.NDArray[np.int64]:
    """The rows to take from each source, by largest remainder; without ``rows`` the most of which none repeats."""
    shares = weights / weights.sum()
    most = int(np.floor((available / shares).min() + 1e-9))
    total = most if rows is None else rows
    exact = shares * total
    counts: npt.NDArray[np.int64] = np.floor(exact + 1e-9).astype(np.int64)
    for index in np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]:
        counts[index] += 1
    if (lacking := np.flatnonzero(counts > available)).size:
        index = int(lacking[0])
        raise UsageError(
            f"{option('rows', total)} would take {counted(int(counts[index]), 'row')} from {sources[index]}, which has "
            f"{int(available[index]):,}",
            hint=f"at most {most:,} rows without repeating one; train more epochs instead of repeating rows",
        )
    return counts


def _write(
    report: MixReport,
    rows: _Rows,
    sides: Mapping[str, npt.NDArray[np.bool_]],
    targets: Mapping[str, Path],
    weights: Mapping[str | Path, float],
    config: MixConfig,
    overwrite: bool,
    command: Sequence[str],
    progress: Progress,
) -> None:
    table, done = rows.table, 0
    described = described_by(next(iter(targets.values())), f"{table.name}.parquet", "train.parquet")
    names = [target.name for target in targets.values()]
    recorded = {**config.model_dump(mode="json"), "weights": {str(source): w for source, w in weights.items()}}
    parents = parents_of(rows.sources)
    with StageOutput(described, "mix", names, overwrite=overwrite) as out:
        out.refuse_other("config", recorded, f"{table.name} that were mixed", parents=parents)

        def batches(side: npt.NDArray[np.bool_]) -> Iterator[pa.RecordBatch]:
            nonlocal done
            for batch in chosen_rows(rows.sources, table, rows.ids, side, table.schema.names):
                done += batch.num_rows
                yield batch
                progress.update(done=done, total=report.rows_out)

        for side, target in targets.items():
            out.batches(target.name, batches(sides[side]), table, table.arrow, side=side)
            report.files[side] = target
        counts = {key: value for key, value in report.to_dict().items() if key not in ("files", "similar")}
        facts = {
            "command": list(command),
            "config": recorded,
            "parents": parents,
            "identity": common_identity(rows.sources),
            "counts": counts,
            "near_duplicates": report.similar,
        }
        out.finish(facts, copies=() if described.name == "run.json" else names[1:])
