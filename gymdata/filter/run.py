"""``gymdata filter``: rollouts in, the chosen ones out, and an account of every step.

Invariants: a kept row is the row that was read, token for token and byte for byte; the choice is made on columns
without tokens (and a hash of them for ``dedupe``), so memory does not grow with the tokens; every rollout that is not in
the output is counted under one reason; the output's run.json leads back to the input.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import RefusedError, UsageError, counted
from gymdata.filter import conditions
from gymdata.filter.columns import RolloutColumns, category_name, load_columns
from gymdata.filter.settings import FilterConfig
from gymdata.filter.steps import Funnel, Step
from gymdata.progress import NullProgress, Progress
from gymdata.public import Figures, Report, Row, paths_of
from gymdata.rollouts.messages import split_tasks
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.scores.chosen import taken
from gymdata.store import StageOutput, files_of, resolve, scan_batches
from gymdata.store.lineage import Paths, chosen_rows, common_identity, parents_of, refuse_other_settings
from gymdata.store.paths import RUN_JSON, files_apart, matches
from gymdata.store.stage_output import described_by

#: Rollouts whose tokens are in memory at a time.
_BATCH_ROWS = 4_096


@dataclass(frozen=True, slots=True, repr=False)
class FilterReport(Report):
    """What ``gymdata.filter`` kept, and why the rest is not there.

    ``sides``: side ("kept", or "train" and "test") → rollouts and tasks; ``files``: side → file, empty after a dry run.
    """

    rollouts_in: int
    rollouts_out: int
    groups_in: int
    groups_out: int
    steps: list[Step]
    sides: dict[str, dict[str, int]]
    files: dict[str, Path] = field(default_factory=dict)

    def to_dict(self) -> Figures:
        return asdict(self) | {"files": {side: str(path) for side, path in self.files.items()}}

    def rows(self) -> list[Row]:
        split = len(self.sides) > 1
        sides = {
            side: f"{counted(n['rollouts'], 'rollout')} of {counted(n['tasks'], 'task')}"
            for side, n in self.sides.items()
        }
        return [
            ("rollouts", f"{self.rollouts_out:,} of {self.rollouts_in:,}"),
            ("groups", f"{self.groups_out:,} of {self.groups_in:,}"),
            *(sides.items() if split else ()),
            *((f"{side} file" if split else "written to", str(path)) for side, path in self.files.items()),
        ]


def filter(
    path: Paths,
    output: str | Path | None = None,
    *,
    config: FilterConfig | None = None,
    write: bool = True,
    dry_run: bool = False,
    overwrite: bool = False,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    **settings: Any,
) -> FilterReport:
    """Write the rollouts under ``path`` (run folder, file, glob, or several of them) that pass every step.

    ``config`` is a ``FilterConfig``; ``gymdata.filter.conditions`` describes the conditions. ``output``: a folder
    (``rollouts.parquet``; with a split ``train.parquet`` and ``test.parquet``) or a .parquet/.jsonl file (its test side
    is ``NAME.test.SUFFIX``). With ``dry_run`` (or ``write`` false) nothing is written.
    Several inputs become one output, with or without a condition.
    Raises UsageError for a condition that cannot be read or names an unknown column, and for a single input without one;
    RefusedError when nothing would be left, and (D701) for a rollout that is there twice; StoreError when the output holds
    rollouts that were filtered with other settings, or something else.
    """
    config = FilterConfig.called_with(filter, config, settings)
    sources = paths_of(path, "filter")
    for source in sources:
        files_of(source)
    with contextlib.ExitStack() as stack:
        out, targets = None, dict[str, Path]()
        if write and not dry_run:
            targets = files_apart(
                output, "rollouts.parquet", sources, ROLLOUTS, "filtered", split=config.share is not None
            )
            names = [target.name for target in targets.values()]
            described = described_by(next(iter(targets.values())), "rollouts.parquet", "train.parquet", "test.parquet")
            out = stack.enter_context(StageOutput(described, "filter", names, overwrite=overwrite))
            # By a side, or the sides of another split.
            noun = "rollouts that were filtered"
            out.refuse_other("config", config, noun, keep=_read_by(sources), parents=parents_of(sources))
            for target in targets.values():
                # The test side of a file may have been the -o of another filter.
                refuse_other_settings(target, config, noun, out.overwrite)
        plan = _Plan(config, several=sum(len(matches(source)) for source in sources) > 1)
        columns = load_columns(sources, plan.named)
        funnel = _run(plan, columns, sources)
        if not funnel.alive.any():
            reasons = "; ".join(f"{s.name}: {reason} {n:,}" for s in funnel.steps for reason, n in s.dropped.items())
            most = max(funnel.steps, key=lambda step: step.rows_in - step.rows_out)
            dropped = f"dropped {sum(most.dropped.values()):,} ({most.detail})"
            raise RefusedError(
                f"none of {counted(len(funnel.alive), 'rollout')} is left ({reasons})",
                hint=f"nothing was written; loosen --{most.name}, which {dropped}",
            )
        sides, task_ids = {"kept": funnel.alive}, columns.table["task_id"]
        if config.share is not None:
            test_tasks = split_tasks(task_ids.filter(pa.array(funnel.alive)).to_pylist(), config.share, config.seed)
            in_test = pc.is_in(task_ids, value_set=pa.array(sorted(test_tasks), pa.string())).to_numpy()
            sides = {"train": funnel.alive & ~in_test, "test": funnel.alive & in_test}
        report = FilterReport(
            rollouts_in=len(funnel.alive),
            rollouts_out=int(funnel.alive.sum()),
            groups_in=int(columns.groups.max()) + 1,
            groups_out=len(np.unique(columns.groups[funnel.alive])),
            steps=funnel.steps,
            sides={
                side: {
                    "rollouts": int(mask.sum()),
                    "tasks": int(pc.count_distinct(task_ids.filter(pa.array(mask))).as_py()),
                }
                for side, mask in sides.items()
            },
        )
        if out is not None:
            _write(report, columns, sides, targets, sources, config, command, progress or NullProgress(), out)
        return report


class _Plan:
    """The parsed conditions and the columns that all steps name, each with where it was named."""

    def __init__(self, config: FilterConfig, *, several: bool) -> None:
        self.config = config
        self.where = [conditions.parse(text, "--where") for text in config.where]
        self.group_where = [conditions.parse(text, "--group-where") for text in config.group_where]
        self.best_by = conditions.parse(config.best_by, "--best-by")
        self.balance = category_name(config.balance) if config.balance else None
        steps = (self.where, self.group_where, config.dedupe, config.best_n, config.balance, config.share)
        if not several and not any(steps):
            raise UsageError(
                "there is nothing to filter by",
                hint="give --where, --group-where, --dedupe, --best-n, --balance, --split-by task or several inputs",
            )
        used = [(e, "--where") for e in self.where] + [(e, "--group-where") for e in self.group_where]
        used += [(self.best_by, "--best-by")] if config.best_n else []
        self.named = {name: where for expression, where in used for name in expression.names}
        if self.balance:
            self.named.setdefault(self.balance, "--balance")


def _run(plan: _Plan, columns: RolloutColumns, sources: Sequence[str | Path]) -> Funnel:
    config, table = plan.config, columns.table
    funnel = Funnel(table["rollout_id"], columns.groups)
    index = table["rollout_index"].to_numpy()
    # All are checked before the first is evaluated.
    for expression in plan.where:
        conditions.check(expression, columns.kinds, "--where")
    kinds = {name: kind for name, kind in columns.kinds.items() if name in columns.of_group}
    for expression in plan.group_where:
        for name in expression.names:
            if name in columns.kinds and name not in kinds:
                numeric = columns.kinds[name] == "number"
                hint = f"mean_{name}, min_{name}, max_{name}, std_{name} and sum_{name} are" if numeric else None
                raise UsageError(f"--group-where: {name!r} is no column of groups", hint=hint)
        conditions.check(expression, kinds, "--group-where")
    if config.best_n:
        conditions.check(plan.best_by, columns.kinds, "--best-by", "number")
    for name, expressions in (("where", plan.where), ("group-where", plan.group_where)):
        for expression in expressions:
            answer = conditions.evaluate(expression, columns.values, table.num_rows)
            unknown = np.asarray(answer.is_null().to_numpy(zero_copy_only=False), bool)
            funnel.condition(name, expression.text, conditions.is_true(answer), unknown)
    score = None
    if config.best_n:
        ranks = conditions.evaluate(plan.best_by, columns.values, table.num_rows)
        score = ranks.cast("float64", safe=False).to_numpy(zero_copy_only=False)
    if config.dedupe:
        # A hash of all that each rollout generated; 0 where nothing was.
        keys = [
            pc.if_else(pc.greater(batch.column("n_generated_tokens"), 0), batch.column("generation_hash"), 0)
            for source in sources
            for batch in scan_batches(source, ROLLOUTS, ("generation_hash", "n_generated_tokens"), _BATCH_ROWS)
        ]
        # More rows may have been collected since the choice was made.
        funnel.dedupe(np.asarray(pc.fill_null(pa.chunked_array(keys), 0).to_numpy()[: len(index)]), index, score)
    if config.best_n and score is not None:
        funnel.best(config.best_n, plan.best_by.text, score, index)
    if plan.balance:
        # The place of each value's name among all names, -1 where there is no value; and the names.
        encoded = columns.values[plan.balance].dictionary_encode()
        # 3.0 is 3, for the numbers of a task are floats here.
        names = [
            str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else str(value)
            for value in encoded.dictionary.to_pylist()
        ]
        # Two numbers may have one name: 0.0 and -0.0.
        codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
        of = np.array([codes[name] for name in names] + [-1], np.int32)
        funnel.balance(plan.balance, *(of[pc.fill_null(encoded.indices, -1).to_numpy()], list(codes)), config.seed)
    return funnel


def _write(
    report: FilterReport,
    columns: RolloutColumns,
    sides: dict[str, np.ndarray],
    targets: dict[str, Path],
    sources: Sequence[str | Path],
    config: FilterConfig,
    command: Sequence[str],
    progress: Progress,
    out: StageOutput,
) -> None:
    done = 0
    for side, target in targets.items():

        def batches(mask: np.ndarray = sides[side]) -> Iterator[pa.RecordBatch]:
            nonlocal done
            for batch in chosen_rows(sources, ROLLOUTS, columns.table["rollout_id"], mask):
                done += batch.num_rows
                yield batch
                progress.update(done=done, total=report.rollouts_out)

        out.batches(target.name, batches(), ROLLOUTS, ROLLOUTS.arrow, side=side)
        report.files[side] = target
    facts = {
        "command": list(command),
        "config": config.model_dump(mode="json"),
        "parents": parents_of([*sources, *columns.scored_by]),
        "scored_by": [taken(sources, name) for name in dict.fromkeys(columns.scores)],
        "identity": common_identity(sources),
        "counts": {key: value for key, value in report.to_dict().items() if key != "files"},
    }
    # Files of an earlier filter in the folder would be read as part of this one: they are removed, unless they are the
    # input.
    in_folder = out.run_json.name == RUN_JSON
    out.finish(facts, keep=_read_by(sources), copies=() if in_folder else out.names[1:])


def _read_by(sources: Sequence[str | Path]) -> list[Path]:
    return [file.path for source in sources for file in resolve(source, ROLLOUTS)]
