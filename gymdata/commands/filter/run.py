"""``gymdata filter``: rollouts in, the chosen ones out, and an account of every step.

Invariants: a kept row is the row that was read, token for token and byte for byte; the choice is made on columns
without tokens (and a hash of them for ``dedupe``), so memory does not grow with the tokens; every rollout that is not in
the output is counted under one reason; the output's run.json leads back to the input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gymdata.commands.filter.columns import category_name, evaluate, is_of_group
from gymdata.commands.filter.conditions import Expression, about, connection
from gymdata.commands.filter.settings import FilterConfig
from gymdata.commands.filter.steps import Funnel, Step
from gymdata.commands.query.views import quoted
from gymdata.errors import DataError, RefusedError, UsageError, counted, option
from gymdata.progress import NullProgress, Progress
from gymdata.public import Figures, Report, Row, paths_of
from gymdata.rollouts.messages import split_tasks
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.scores.chosen import taken
from gymdata.store import StageOutput, files_of
from gymdata.store.lineage import Paths, chosen_rows, common_identity, parents_of, refuse_duplicates
from gymdata.store.paths import local_output, matches, refuse_inputs
from gymdata.store.reading import check_content

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
    ``output``: a folder (``rollouts.parquet``; with a split ``train.parquet`` and ``test.parquet``). With ``dry_run`` (or
    ``write`` false) nothing is written. Several inputs become one output, with or without a condition.
    Raises UsageError for a condition that cannot be read or names an unknown column, and for a single input without one;
    RefusedError when nothing would be left, and (D701) for a rollout that is there twice; StoreError when the output holds
    rollouts that were filtered with other settings, or something else.
    """
    config = FilterConfig.called_with(filter, config, settings)
    sources = paths_of(path, "filter")
    for source in sources:
        files_of(source)
    notes = check_content(sources, ROLLOUTS)
    if not write or dry_run:
        return _choose(sources, config)[0]
    if output is None:
        raise UsageError("-o is missing", hint=f"-o FOLDER; {option('dry_run', True)} only counts")
    out = StageOutput(local_output(output), "filter", overwrite=overwrite)
    refuse_inputs(out.place, sources, ROLLOUTS, "filtered")
    with out:
        out.refuse_other("config", config, "rollouts that were filtered", parents=parents_of(sources))
        report, rows, scores = _choose(sources, config)
        _write(out, report, rows, sources, progress or NullProgress())
        rescored = dict.fromkeys(folder for folders in scores.values() for folder in folders)
        facts = {
            "command": list(command),
            "config": config.model_dump(mode="json"),
            "parents": parents_of([*sources, *rescored]),
            "scored_by": [taken(sources, name) for name in scores],
            "identity": common_identity(sources),
            "counts": {key: value for key, value in report.to_dict().items() if key != "files"},
            "notes": notes,
        }
        out.finish(facts)
    return report


def _choose(
    sources: Sequence[str | Path], config: FilterConfig
) -> tuple[FilterReport, pa.Table, dict[str | None, list[Path]]]:
    """Run the steps: what they did; of each rollout, in order, its ``rollout_id`` and the ``side`` that keeps it, null for
    none; and the scores that were used."""
    expressions = _expressions(config)
    several = sum(len(matches(source)) for source in sources) > 1
    if not (several or expressions or config.share):
        raise UsageError(
            "there is nothing to filter by",
            hint="give --where, --group-where, --dedupe, --best-n, --balance, --split-by task or several inputs",
        )
    with connection() as con:
        scores = evaluate(con, expressions, sources)
        with about("filter"):
            steps = _run_steps(con, config, expressions)
            rows = con.sql("SELECT rollout_id, task_id, group_id, is_left FROM rows ORDER BY row").to_arrow_table()
    if not rows.num_rows:
        raise DataError.empty(sources[0], "rollouts")
    refuse_duplicates(rows, sources)
    left = rows.filter(rows["is_left"])
    if not left.num_rows:
        reasons = "; ".join(f"{s.name}: {reason} {n:,}" for s in steps for reason, n in s.dropped.items())
        most = max(steps, key=lambda step: step.rows_in - step.rows_out)
        dropped = f"dropped {sum(most.dropped.values()):,} ({most.detail})"
        raise RefusedError(
            f"none of {counted(rows.num_rows, 'rollout')} is left ({reasons})",
            hint=f"nothing was written; loosen --{most.name}, which {dropped}",
        )
    of_left: pa.Scalar | pa.ChunkedArray = pa.scalar("kept")
    if config.share is not None:
        test_tasks = split_tasks(left["task_id"].to_pylist(), config.share, config.seed)
        in_test = pc.is_in(rows["task_id"], value_set=pa.array(sorted(test_tasks), pa.string()))
        of_left = pc.if_else(in_test, "test", "train")
    rows = rows.append_column("side", pc.if_else(rows["is_left"], of_left, None))
    tasks = {
        side: rows["task_id"].filter(_is_of(rows, side)) for side in (["train", "test"] if config.share else ["kept"])
    }
    report = FilterReport(
        rollouts_in=rows.num_rows,
        rollouts_out=left.num_rows,
        groups_in=pc.count_distinct(rows["group_id"]).as_py(),
        groups_out=pc.count_distinct(left["group_id"]).as_py(),
        steps=steps,
        sides={side: {"rollouts": len(ids), "tasks": pc.count_distinct(ids).as_py()} for side, ids in tasks.items()},
    )
    return report, rows, scores


def _is_of(rows: pa.Table, side: str) -> pa.ChunkedArray:
    return pc.fill_null(pc.equal(rows["side"], side), False)


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
        named["category"] = Expression(".".join(map(quoted, path)), "--balance", "value")
    return named


def _run_steps(con: Any, config: FilterConfig, expressions: Mapping[str, Expression]) -> list[Step]:
    funnel = Funnel(con)
    for name, expression in expressions.items():
        if expression.kind == "condition":
            funnel.condition(expression.where.removeprefix("--"), expression.line, name)
    if config.dedupe:
        funnel.dedupe(ranked="score" in expressions)
    if config.best_n:
        funnel.best(config.best_n, expressions["score"].line)
    if config.balance:
        funnel.balance(category_name(config.balance), config.seed)
    return funnel.steps


def _write(
    out: StageOutput, report: FilterReport, rows: pa.Table, sources: Sequence[str | Path], progress: Progress
) -> None:
    """Write the rollouts of each side to a file."""
    done = 0

    def batches(side: str) -> Iterator[pa.RecordBatch]:
        nonlocal done
        for batch in chosen_rows(sources, rows["rollout_id"], _is_of(rows, side).to_numpy()):
            done += batch.num_rows
            yield batch
            progress.update(done=done, total=report.rollouts_out)

    for side in report.sides:
        name = "rollouts.parquet" if side == "kept" else f"{side}.parquet"
        out.batches(name, batches(side), ROLLOUTS, ROLLOUTS.arrow, side=side)
        report.files[side] = out.place / name
