"""``gymdata filter``: rollouts in, the chosen ones out, and an account of every step.

Invariants: a kept row is the row that was read, token for token and byte for byte; the choice is made on columns
without tokens (and a hash of them for ``dedupe``), so memory does not grow with the tokens; every rollout that is not in
the output is counted under one reason; the output's run.json leads back to the input.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.commands.filter.columns import Scores, category_name, evaluate, is_of_group
from gymdata.commands.filter.conditions import Expression, about, connection
from gymdata.commands.filter.settings import FilterConfig
from gymdata.commands.filter.steps import Funnel, Step
from gymdata.errors import DataError, RefusedError, UsageError, counted, option
from gymdata.progress import NullProgress, Progress
from gymdata.public import Figures, Report, Row, paths_of
from gymdata.rollouts.messages import split_tasks
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.scores.chosen import taken
from gymdata.store import StageOutput, files_of
from gymdata.store.lineage import (
    Paths,
    chosen_rows,
    common_identity,
    parents_of,
    refuse_duplicates,
)
from gymdata.store.paths import local_output, matches, refuse_inputs

#: A hash of all that a rollout generated, none where nothing was.
_GENERATED = "CASE WHEN n_generated_tokens > 0 THEN nullif(generation_hash, 0) END"


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
            *((f"{side} file", path) if split else ("written to", path.parent) for side, path in self.files.items()),
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
    ``output``: a folder (``rollouts.parquet``; with a split ``train.parquet`` and ``test.parquet``), or a .parquet/.jsonl
    file, which has no run.json. With ``dry_run`` (or ``write`` false) nothing is written.
    Several inputs become one output, with or without a condition.
    Raises UsageError for a condition that cannot be read or names an unknown column, and for a single input without one;
    RefusedError when nothing would be left, and (D701) for a rollout that is there twice; StoreError when the output holds
    rollouts that were filtered with other settings, or something else.
    """
    config = FilterConfig.called_with(filter, config, settings)
    sources, progress = paths_of(path, "filter"), progress or NullProgress()
    for source in sources:
        files_of(source)
    with contextlib.ExitStack() as stack:
        out = _output(output, sources, overwrite) if write and not dry_run else None
        if out is not None:
            stack.enter_context(out)
            out.refuse_other("config", config, "rollouts that were filtered", parents=parents_of(sources))
        expressions = _expressions(config)
        several = sum(len(matches(source)) for source in sources) > 1
        if not (several or expressions or config.share):
            raise UsageError(
                "there is nothing to filter by",
                hint="give --where, --group-where, --dedupe, --best-n, --balance, --split-by task or several inputs",
            )
        con = stack.enter_context(connection())
        scores = evaluate(con, expressions, sources)
        rollouts = con.sql("SELECT rollout_id FROM rows ORDER BY row").to_arrow_table()
        if not rollouts.num_rows:
            raise DataError.empty(sources[0], "rollouts")
        refuse_duplicates(rollouts, sources)
        with about("filter"):
            funnel = Funnel(con)
            _, groups_in = funnel.counts()
            _run_steps(funnel, config, expressions)
            left = funnel.left()
        steps = funnel.steps
        if not left.num_rows:
            reasons = "; ".join(f"{s.name}: {reason} {n:,}" for s in steps for reason, n in s.dropped.items())
            most = max(steps, key=lambda step: step.rows_in - step.rows_out)
            dropped = f"dropped {sum(most.dropped.values()):,} ({most.detail})"
            raise RefusedError(
                f"none of {counted(rollouts.num_rows, 'rollout')} is left ({reasons})",
                hint=f"nothing was written; loosen --{most.name}, which {dropped}",
            )
        sides = {"kept": left}
        if config.share is not None:
            test_tasks = split_tasks(left["task_id"].to_pylist(), config.share, config.seed)
            in_test = pc.is_in(left["task_id"], value_set=pa.array(sorted(test_tasks), pa.string()))
            sides = {"train": left.filter(pc.invert(in_test)), "test": left.filter(in_test)}
        report = FilterReport(
            rollouts_in=rollouts.num_rows,
            rollouts_out=left.num_rows,
            groups_in=groups_in,
            groups_out=pc.count_distinct(left["group_id"]).as_py(),
            steps=steps,
            sides={
                side: {"rollouts": rows.num_rows, "tasks": pc.count_distinct(rows["task_id"]).as_py()}
                for side, rows in sides.items()
            },
        )
        if out is not None:
            _write(report, rollouts["rollout_id"], scores, sides, sources, config, command, progress, out)
        return report


def _output(output: str | Path | None, sources: Sequence[str | Path], overwrite: bool) -> StageOutput:
    """Where the rollouts go. Raises UsageError for a place where they may not go."""
    if output is None:
        without = f"; {option('dry_run', True)} only counts"
        raise UsageError("-o is missing", hint=f"-o FOLDER{without}")
    out = StageOutput(local_output(output), "filter", overwrite=overwrite)
    refuse_inputs(out.place, sources, ROLLOUTS, "filtered")
    return out


def _expressions(config: FilterConfig) -> dict[str, Expression]:
    """What the steps take of each rollout, by its name in the table ``rows``."""
    named = {f"where_{k}": Expression(text, "--where") for k, text in enumerate(config.where)}
    for k, text in enumerate(config.group_where):
        condition = named[f"group_where_{k}"] = Expression(text, "--group-where")
        if name := next((name for name in condition.names() if not is_of_group(name)), None):
            hint = f"its group has mean_{name}, min_{name}, max_{name}, std_{name} and sum_{name} of a number"
            raise UsageError(f"--group-where: {name!r} is no column of groups", hint=hint)
    if config.best_n:
        named["score"] = Expression(config.best_by, "--best-by", "number")
    if config.dedupe:
        named["key"] = Expression(_GENERATED, "--dedupe", "value")
    if config.balance:
        category = category_name(config.balance)
        path = category.split(".") if category.startswith("task.") else [category]
        quoted = ".".join('"' + name.replace('"', '""') + '"' for name in path)
        named["category"] = Expression(quoted, "--balance", "value")
    return named


def _run_steps(funnel: Funnel, config: FilterConfig, expressions: Mapping[str, Expression]) -> None:
    categories = funnel.categories() if config.balance else []
    for name, expression in expressions.items():
        if expression.kind == "condition":
            funnel.condition(expression.where.removeprefix("--"), expression.line, name)
    if config.dedupe:
        funnel.dedupe(ranked="score" in expressions)
    if config.best_n:
        funnel.best(config.best_n, expressions["score"].line)
    if config.balance:
        funnel.balance(category_name(config.balance), categories, config.seed)


def _write(
    report: FilterReport,
    ids: pa.ChunkedArray,
    scores: Scores,
    sides: Mapping[str, pa.Table],
    sources: Sequence[str | Path],
    config: FilterConfig,
    command: Sequence[str],
    progress: Progress,
    out: StageOutput,
) -> None:
    done = 0
    for side, rows in sides.items():
        target = out.place / ("rollouts.parquet" if side == "kept" else f"{side}.parquet")
        mask = np.zeros(len(ids), bool)
        mask[rows["row"].to_numpy()] = True

        def batches(mask: npt.NDArray[np.bool_] = mask) -> Iterator[pa.RecordBatch]:
            nonlocal done
            for batch in chosen_rows(sources, ids, mask):
                done += batch.num_rows
                yield batch
                progress.update(done=done, total=report.rollouts_out)

        out.batches(target.name, batches(), ROLLOUTS, ROLLOUTS.arrow, side=side)
        report.files[side] = target
    facts = {
        "command": list(command),
        "config": config.model_dump(mode="json"),
        "parents": parents_of([*sources, *scores.files]),
        "scored_by": [taken(sources, name) for name in dict.fromkeys(scores.names)],
        "identity": common_identity(sources),
        "counts": {key: value for key, value in report.to_dict().items() if key != "files"},
    }
    out.finish(facts)
