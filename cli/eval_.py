"""``gymdata eval``."""

from __future__ import annotations

from typing import Annotated

import typer

from gymdata.commands.collect.task_files import KINDS
from gymdata.commands.eval.settings import EvalConfig

from .console import Grid, Watch, command_words, finish
from .flags import DryRun, Json, with_flags

#: Tasks that regressed in the text output; --json and results.md have all.
_SHOWN = 20


@with_flags(EvalConfig)
def eval_(
    settings: EvalConfig,
    model: Annotated[
        str | None, typer.Argument(help="Model folder, LoRA adapter folder, or served model name.")
    ] = None,
    tasks: Annotated[str | None, typer.Argument(help=f"Task file or glob: {KINDS}.")] = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> int:
    """The rollouts are an ordinary run: an existing one is resumed. Intervals are over tasks."""
    from gymdata.commands.eval import run as evaluating

    with Watch("eval") as watch:
        report = evaluating.evaluate(config=settings, dry_run=dry_run, progress=watch, command=command_words())
    if isinstance(report, evaluating.CollectPlan):
        return finish(report, "eval (dry run: nothing was sampled or written)", json=json)

    tables: list[Grid] = []
    for name, values in report.by_field.items():
        rows = [(row["value"], f"{100 * row['pass_at_1']:.1f} %", row["tasks"]) for row in values]
        tables.append(((name, "pass@1", "tasks"), rows, ""))
    if report.against is not None and (regressed := report.against["regressed"]):
        columns = ("task_id", "before", "after", "prompt")
        shown = [[row[c] for c in columns] for row in regressed[:_SHOWN]]
        tables.append((columns, shown, f"Regressed ({len(shown):,} of {len(regressed):,})"))
    return finish(report, "eval", json=json, then="view {}", above=tables)
