"""``gymdata demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import JsonFlag, OverwriteFlag, finish, note


def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Output folder.")] = Path("runs/demo"),
    rounds: Annotated[int, typer.Option(help="Rounds of collect, pairs and train-dpo.", min=1)] = 2,
    num_rollouts: Annotated[int, typer.Option("-r", "--num-rollouts", help="Rollouts per training task.", min=2)] = 8,
    limit: Annotated[int | None, typer.Option("-n", "--limit", help="Use only the first N tasks.", min=1)] = None,
    judged_groups: Annotated[
        int, typer.Option(help="Groups compared by the judge; 0 disables the judge.", min=0)
    ] = 300,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    threshold: Annotated[bool, typer.Option(help="Fail unless held-out accuracy improves by 10 points.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, and print the steps; run nothing.")] = False,
    overwrite: OverwriteFlag = False,
    json: JsonFlag = False,
) -> int:
    """Run the whole path on the shipped policy and tasks, and measure the improvement in held-out accuracy."""
    from gymdata.demo import demo as run
    from gymdata.demo import planned

    if dry_run:
        plan = planned(
            output, rounds=rounds, num_rollouts=num_rollouts, limit=limit, judged_groups=judged_groups, seed=seed
        )

        def steps() -> None:
            typer.echo("\n".join(plan.steps))
            note("the shipped files are there; nothing was run")
            if plan.install:
                note(f"the steps need more than is installed here: {plan.install}")

        return finish(plan, steps, json=json)
    report = run(
        output, rounds=rounds, num_rollouts=num_rollouts, limit=limit, judged_groups=judged_groups, seed=seed,
        threshold=threshold, overwrite=overwrite, say=note,
    )  # fmt: skip
    return finish(report, "demo", json=json)
