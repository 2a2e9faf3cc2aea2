"""``gymdata filter``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import (
    ConfigFile,
    JsonFlag,
    OverwriteFlag,
    SeedFlag,
    SetFlag,
    Watch,
    command_words,
    facts,
    finish,
    grid,
)

if TYPE_CHECKING:
    from gymdata.filter.run import FilterReport

_Path = Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folder, file or glob of rollouts.")]
_Output = Annotated[Path | None, typer.Option("-o", "--output", help="Folder or .parquet/.jsonl file to write.")]
_Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where", metavar="CONDITION", help='Keep rollouts that satisfy this, as "reward > 0.5"; repeatable.'
    ),
]
_Group = Annotated[
    list[str] | None,
    typer.Option(
        "--group-where",
        metavar="CONDITION",
        help='Keep groups that satisfy this, as "0 < mean_reward < 1"; repeatable.',
    ),
]
_BestBy = Annotated[
    str | None,
    typer.Option("--best-by", metavar="NUMBER", help="Number that ranks rollouts for --best-n (default: reward)."),
]
_Balance = Annotated[
    str | None,
    typer.Option("--balance", metavar="COLUMN", help="Keep the same number of rollouts per value of this column."),
]


def filter_(
    path: _Path,
    output: _Output = None,
    where: _Where = None,
    group_where: _Group = None,
    dedupe: Annotated[
        bool, typer.Option("--dedupe", help="Keep one of the rollouts of a group with identical tokens.")
    ] = False,
    best_n: Annotated[int | None, typer.Option("--best-n", help="Keep the best N rollouts per group.")] = None,
    best_by: _BestBy = None,
    balance: _Balance = None,
    split_by: Annotated[
        str | None, typer.Option("--split-by", help="Write a train and a test file, split by task: task.")
    ] = None,
    test_share: Annotated[
        float | None, typer.Option("--test-share", help="Share of tasks in the test file (default: 0.1).")
    ] = None,
    seed: SeedFlag = None,
    config: ConfigFile = None,
    sets: SetFlag = [],  # noqa: B006 - typer copies it
    overwrite: OverwriteFlag = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report counts only; write nothing.")] = False,
    json: JsonFlag = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show the traceback of an error.")] = False,
) -> int:
    """Keep the rollouts that pass every step, and report how many were dropped, by reason.

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
            path,
            output,
            config=settings,
            write=not dry_run,
            overwrite=overwrite,
            command=command_words(),
            progress=watch,
        )
    return finish(report, lambda: _show(report), json=json)


def _show(report: FilterReport) -> None:
    rows = []
    for step in report.steps:
        why = [f"{reason}: {n:,}" for reason, n in step.dropped.items()] + step.notes
        rows.append([step.name, step.detail, step.rows_in, step.rows_out, step.groups_out, "; ".join(why)])
    if rows:
        grid(("step", "by", "rollouts in", "out", "groups out", "dropped (reason)"), rows)
    facts("filter", report.rows())
