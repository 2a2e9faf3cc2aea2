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

from gymdata.commands.filter import conditions
from gymdata.commands.filter.columns import RolloutColumns, category_name, is_of_group, load_columns
from gymdata.commands.filter.settings import FilterConfig
from gymdata.commands.filter.steps import Funnel, Step
from gymdata.errors import RefusedError, UsageError, counted
from gymdata.progress import NullProgress, Progress
from gymdata.public import Figures, Report, Row, paths_of
from gymdata.rollouts.messages import split_tasks
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.scores.chosen import taken
from gymdata.store import StageOutput, files_of, resolve
from gymdata.store.lineage import Paths, chosen_rows, common_identity, parents_of, refuse_other_settings
from gymdata.store.paths import RUN_JSON, files_apart, matches
from gymdata.store.stage_output import described_by


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

    ``config`` is a ``FilterConfig``; conditions are DuckDB expressions over the columns of one rollout and its group.
    ``output``: a folder (``rollouts.parquet``; with a split ``train.parquet`` and ``test.parquet``) or a .parquet/.jsonl
    file (its test side is ``NAME.test.SUFFIX``). With ``dry_run`` (or ``write`` false) nothing is written.
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
        funnel = _run(plan, columns)
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
    """The parsed conditions, each with its step, and the columns that all steps name, each with where it was named."""

    def __init__(self, config: FilterConfig, *, several: bool) -> None:
        self.config = config
        texts = [("where", text) for text in config.where] + [("group-where", text) for text in config.group_where]
        self.conditions = [(step, conditions.parse(text, f"--{step}")) for step, text in texts]
        self.best_by = conditions.parse(config.best_by, "--best-by", number=True) if config.best_n else None
        self.balance = category_name(config.balance) if config.balance else None
        if not several and not any((texts, config.dedupe, config.best_n, config.balance, config.share)):
            raise UsageError(
                "there is nothing to filter by",
                hint="give --where, --group-where, --dedupe, --best-n, --balance, --split-by task or several inputs",
            )
        self.all = [*(condition for _, condition in self.conditions), *([self.best_by] if self.best_by else [])]
        self.named = {name: condition.where for condition in self.all for name in condition.names}
        if self.balance:
            self.named.setdefault(self.balance, "--balance")
        if config.dedupe:
            self.named |= dict.fromkeys(("generation_hash", "n_generated_tokens"), "--dedupe")


def _run(plan: _Plan, columns: RolloutColumns) -> Funnel:
    config, values, rows = plan.config, columns.values, len(columns.groups)
    funnel = Funnel(columns.table["rollout_id"], columns.groups)
    index = columns.table["rollout_index"].to_numpy()
    for name in (name for step, condition in plan.conditions if step == "group-where" for name in condition.names):
        if not is_of_group(name):
            hint = f"its group has mean_{name}, min_{name}, max_{name}, std_{name} and sum_{name} of a number"
            raise UsageError(f"--group-where: {name!r} is no column of groups", hint=hint)
    # All are checked before the first is evaluated.
    for condition in plan.all:
        conditions.check(condition, values)
    for step, condition in plan.conditions:
        answer = conditions.evaluate(condition, values, rows)
        unknown = np.asarray(answer.is_null().to_numpy(zero_copy_only=False), bool)
        funnel.condition(step, condition.text, conditions.is_true(answer), unknown)
    score = None
    if plan.best_by:
        ranks = conditions.evaluate(plan.best_by, values, rows)
        score = ranks.cast("float64", safe=False).to_numpy(zero_copy_only=False)
    if config.dedupe:
        # A hash of all that each rollout generated; 0 where nothing was.
        keys = pc.if_else(pc.greater(values["n_generated_tokens"], 0), values["generation_hash"], 0)
        funnel.dedupe(pc.fill_null(keys, 0).to_numpy(), index, score)
    if plan.best_by and config.best_n and score is not None:
        funnel.best(config.best_n, plan.best_by.text, score, index)
    if plan.balance:
        of = values[plan.balance]
        # 0.0 and -0.0 are one value.
        of = pc.add(of, 0.0) if pa.types.is_floating(of.type) else of
        encoded = of.cast(pa.string()).dictionary_encode()
        codes = pc.fill_null(encoded.indices, -1).to_numpy()
        funnel.balance(plan.balance, codes, encoded.dictionary.to_pylist(), config.seed)
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
