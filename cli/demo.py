"""``gymdata demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from gymdata_cli.console import JsonFlag, OverwriteFlag, emit_json, facts, note


def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for everything it makes.")] = Path("runs/demo"),
    rounds: Annotated[int, typer.Option(help="Rounds of collect, pairs and train-dpo.", min=1)] = 2,
    num_rollouts: Annotated[int, typer.Option("-r", "--num-rollouts", help="Rollouts a training task.", min=2)] = 8,
    limit: Annotated[int | None, typer.Option("-n", "--limit", help="Only so many tasks of each file.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Makes the whole demo repeatable.")] = 0,
    threshold: Annotated[bool, typer.Option(help="Fail unless the held-out rate rises by 10 points.")] = True,
    overwrite: OverwriteFlag = False,
    json: JsonFlag = False,
) -> None:
    """Run the whole path on the shipped policy and tasks, and measure the rise on held-out tasks."""
    from gymdata.api.demo import demo as run

    summary = run(
        output, rounds=rounds, num_rollouts=num_rollouts, limit=limit, seed=seed, threshold=threshold,
        overwrite=overwrite, say=note,
    )  # fmt: skip
    if json:
        emit_json(summary)
    else:
        facts("demo", _rows(summary, output))


def _rows(summary: dict[str, Any], output: Path) -> list[tuple[str, object]]:
    def rate(part: dict[str, Any]) -> str:
        low, high = part["ci95"]
        return f"{100 * part['rate']:.1f} %  (95 % {100 * low:.1f} to {100 * high:.1f})"

    before, after = summary["before"], summary["after"]
    return [
        ("held-out before", f"{rate(before)}, {before['correct']} of {before['n']}"),
        ("held-out after", f"{rate(after)}, {after['correct']} of {after['n']}"),
        ("rise", rate(summary["difference"]).replace(" %  (", " points  (")),
        ("tokens sampled", summary["tokens_sampled"]),
        ("tokens trained", summary["tokens_trained"]),
        ("pairs", summary["pairs"]),
        ("breaks", summary["breaks"]),
        ("seconds", summary["seconds"]),
        ("written to", output / "summary.json"),
    ]
