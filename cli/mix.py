"""``gymdata mix``."""

from __future__ import annotations

from typing import Annotated

import typer

from gymdata.errors import UsageError
from gymdata.mix.settings import MixConfig

from .console import Watch, command_words, facts, finish, grid
from .flags import DryRun, Json, Output, Overwrite, with_flags

_Sources = Annotated[
    list[str],
    typer.Argument(metavar="SOURCE=WEIGHT…", help="Run folder, file or glob of rollouts or pairs, and its weight."),
]


@with_flags(MixConfig)
def mix(
    path: _Sources,
    output: Output = None,
    *,
    settings: MixConfig,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> int:
    """Tasks are chosen at random and taken with all their rows, so that groups stay whole; no row is repeated. Rows keep the
    order of their sources: trainers shuffle.
    """
    from gymdata.mix.run import mix as run

    weights = dict[str, float]()
    for source in path:
        name, _, weight = source.rpartition("=")
        if name in weights:
            raise UsageError(f"{name} is given twice", hint=f"give it once, with the whole weight: {name}=0.7")
        try:
            weights[name] = float(weight if name else "")
        except ValueError:
            raise UsageError(f"got {source!r}, expected SOURCE=WEIGHT, such as {name or source}=0.7") from None
    with Watch("mix") as watch:
        report = run(
            weights,
            output,
            config=settings,
            dry_run=dry_run,
            overwrite=overwrite,
            command=command_words(),
            progress=watch,
        )

    def show() -> None:
        rows = [
            (s.path, f"{s.weight:g}", s.rows, s.taken, s.taken_tasks, f"{s.share:.1%}", s.near_duplicates)
            for s in report.sources
        ]
        grid(("source", "weight", "rows", "taken", "tasks", "share", "similar tasks"), rows)
        facts("mix", report.rows())

    trainer = "train-dpo" if report.table == "pairs" else "train-sft"
    return finish(report, show, json=json, then=f"{trainer} {{}} -m MODEL -o POLICY")
