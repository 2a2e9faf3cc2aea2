"""``gymdata filter``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gymdata.commands.filter.settings import FilterConfig

from .console import Watch, command_words, finish
from .flags import DryRun, Json, Output, Overwrite, RunFiles, with_flags

if TYPE_CHECKING:
    from gymdata.commands.filter.steps import Step

#: Notes of a step that its row lists.
_NOTES = 8


@with_flags(FilterConfig)
def filter_(
    path: RunFiles,
    output: Output = None,
    *,
    settings: FilterConfig,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> int:
    """Several inputs become one output, with or without a condition. Columns: those of rollouts, reward_NAME, task.FIELD,
    and of groups n_rollouts, n_scored and mean_, min_, max_, std_ or sum_ before a number's name. A comparison with a
    missing value is not true.

    Exit code 1 when no rollout is left; nothing is written then.
    """
    from gymdata.commands.filter.run import filter as run

    with Watch("filter") as watch:
        report = run(
            path,
            output,
            config=settings,
            write=not dry_run,
            overwrite=overwrite,
            command=command_words(),
            progress=watch,
        )

    rows = [
        (f"{step.name} {step.detail}", step.rows_in, step.rows_out, step.groups_out, _why_dropped(step) or "none")
        for step in report.steps
    ]
    columns = ("step", "rollouts in", "out", "groups out", "dropped")
    then = "train-sft {} -m MODEL -o POLICY"
    return finish(report, "filter", json=json, then=then, above=[(columns, rows, "")])


def _why_dropped(step: Step) -> str:
    more = len(step.notes) - _NOTES
    notes = [*step.notes[:_NOTES], *([f"{more:,} more (--json lists all)"] if more > 0 else [])]
    return "; ".join([f"{reason}: {n:,}" for reason, n in step.dropped.items()] + notes)
