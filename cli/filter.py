"""``gymdata filter``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from gymdata.commands.filter.settings import FilterConfig

from .console import Watch, command_words, facts, finish, fits, folded, grid, say
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

    def show() -> None:
        steps = [(step.name, step.rows_in, step.rows_out, step.groups_out) for step in report.steps]
        texts = [(step.detail, _why_dropped(step)) for step in report.steps]
        counts = ("step", "rollouts in", "out", "groups out")
        columns = ("step", "by", *counts[1:], "dropped (reason)")
        rows = [(name, by, *numbers, why) for (name, *numbers), (by, why) in zip(steps, texts, strict=True)]
        if rows and fits(columns, rows):
            grid(columns, rows)
        elif rows:
            # Texts in columns of a few characters cannot be read.
            grid(counts, steps)
            for name, by, *_, why in rows:
                say(folded(f"  {name} {by}; dropped: {why or 'none'}", sys.stdout, 4))
        facts("filter", report.rows())

    return finish(report, show, json=json, then="train-sft {} -m MODEL -o POLICY")


def _why_dropped(step: Step) -> str:
    more = len(step.notes) - _NOTES
    notes = [*step.notes[:_NOTES], *([f"{more:,} more (--json lists all)"] if more > 0 else [])]
    return "; ".join([f"{reason}: {n:,}" for reason, n in step.dropped.items()] + notes)
