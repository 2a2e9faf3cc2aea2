"""``gymdata filter``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import ConfigFile, JsonFlag, OverwriteFlag, SeedFlag, SetFlag, Watch, emit_json, facts, grid

if TYPE_CHECKING:
    from gymdata.filter.run import FilterReport

_Path = Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folder, file or glob of rollouts.")]
_Output = Annotated[Path | None, typer.Option("-o", "--output", help="Folder or .parquet/.jsonl file to write.")]
_Where = Annotated[list[str] | None, typer.Option("--where", metavar="CONDITION", help='"reward > 0.5"; repeatable.')]
_Group = Annotated[
    list[str] | None, typer.Option("--group-where", metavar="CONDITION", help='Whole groups: "0 < mean_reward < 1".')
]
_BestBy = Annotated[str | None, typer.Option("--best-by", metavar="NUMBER", help="What is best (default: reward).")]
_Balance = Annotated[str | None, typer.Option("--balance", metavar="COLUMN", help="As many of each value of it.")]


def filter_(
    path: _Path,
    output: _Output = None,
    where: _Where = None,
    group_where: _Group = None,
    dedupe: Annotated[bool, typer.Option("--dedupe", help="One of those with equal tokens in a group.")] = False,
    best_n: Annotated[int | None, typer.Option("--best-n", help="So many of each group.")] = None,
    best_by: _BestBy = None,
    balance: _Balance = None,
    split_by: Annotated[str | None, typer.Option("--split-by", help="task: a train and a test file.")] = None,
    test_share: Annotated[float | None, typer.Option("--test-share", help="Of the tasks (default 0.1).")] = None,
    seed: SeedFlag = None,
    config: ConfigFile = None,
    sets: SetFlag = [],  # noqa: B006 - typer copies it
    overwrite: OverwriteFlag = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count only; write nothing.")] = False,
    json: JsonFlag = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show the traceback of an error.")] = False,
) -> None:
    """Keep the rollouts that pass every step, and say how many did not, and why.

    Columns: those of rollouts, reward_NAME, task.FIELD, and of groups n_rollouts, n_scored and mean_, min_, max_, std_ or
    sum_ before a number's name. A comparison with a missing value is not true.
    """
    from gymdata.filter.run import filter_rollouts
    from gymdata.filter.settings import FilterConfig

    flags = {"where": where, "group_where": group_where, "best_n": best_n, "best_by": best_by, "balance": balance,
             "split_by": split_by, "test_share": test_share, "seed": seed, "dedupe": dedupe or None}  # fmt: skip
    settings = FilterConfig.load(config, flags, sets)
    with Watch("filter") as watch:
        report = filter_rollouts(
            path, output, config=settings, write=not dry_run, overwrite=overwrite, command=sys.argv, progress=watch
        )
    if json:
        emit_json(report.to_dict())
    else:
        _show(report)


def _show(report: FilterReport) -> None:
    rows = []
    for step in report.steps:
        why = [f"{reason}: {n:,}" for reason, n in step.dropped.items()] + step.notes
        rows.append([step.name, step.detail, step.rows_in, step.rows_out, step.groups_out, "; ".join(why)])
    if rows:
        grid(("step", "by", "rollouts in", "out", "groups out", "left out, and why"), rows)
    split = len(report.sides) > 1
    sides = [(side, f"{n['rollouts']:,} rollouts of {n['tasks']:,} tasks") for side, n in report.sides.items() if split]
    facts(
        "filter",
        [
            ("rollouts", f"{report.rollouts_out:,} of {report.rollouts_in:,}"),
            ("groups", f"{report.groups_out:,} of {report.groups_in:,}"),
            *sides,
            *(("written to" if not split else f"{side} file", str(path)) for side, path in report.files.items()),
        ],
    )
