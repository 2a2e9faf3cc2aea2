"""``gymdata demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gymdata.demo.run import DemoConfig, planned
from gymdata.demo.run import demo as run

from .console import emit_json, facts, note
from .flags import DryRun, Json, Overwrite, with_flags


@with_flags(DemoConfig)
def demo(
    settings: DemoConfig,
    output: Annotated[Path, typer.Option("-o", "--output", help="Output folder (default: runs/demo).")] = Path(
        "runs/demo"
    ),
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Held-out accuracy is measured before and after."""
    if dry_run:
        plan = planned(output, **settings.model_dump(exclude={"threshold"}))
        if json:
            emit_json(plan)
        else:
            typer.echo("\n".join(plan["steps"]))
            note("the shipped files are there; nothing was run")
            if plan["install"]:
                note(f"the steps need more than is installed here: {plan['install']}")
        return
    summary = run(output, **dict(settings), overwrite=overwrite, say=note)
    if json:
        emit_json(summary)
    else:
        facts("demo", _rows(summary, output))


def _rows(summary: dict[str, Any], output: Path) -> list[tuple[str, object]]:
    before, judged = summary["before"], summary.get("judged")
    return [
        ("held-out before", f"{_rate(before)}, {before['successes']} of {before['n']}"),
        *_after(summary, ""),
        ("tokens sampled", summary["tokens_sampled"]),
        ("tokens trained", summary["tokens_trained"]),
        ("pairs", summary["pairs"]),
        ("breaks", summary["breaks"]),
        *(_judged(judged) if judged else []),
        ("seconds", summary["seconds"]),
        ("written to", output / "summary.json"),
    ]


def _judged(judged: dict[str, Any]) -> list[tuple[str, object]]:
    """One round whose pairs come from the judge."""
    accuracy, bias = judged["accuracy"], judged["bias"]
    counts = judged["comparisons"]
    rates = {
        "the better one first": accuracy["first_position"],
        "the better one second": accuracy["second_position"],
        "position bias (first wins)": bias["position_bias"],
        "position inconsistency": bias["position_inconsistency"],
        "longer wins": bias["longer_wins"],
        "ties": bias["ties"],
        "failures": bias["failures"],
    }
    return [
        *_after(judged, "judged: "),
        ("judged: comparisons", f"{sum(counts.values()):,}, {counts['judged']:,} judged"),
        *((f"judged: {name}", _rate(part)) for name, part in rates.items() if part["n"]),
        ("judged: pairs", judged["pairs"]),
    ]


def _after(part: dict[str, Any], which: str) -> list[tuple[str, object]]:
    after = part["after"]
    rise = _rate(part["difference"]).replace(" %  (", " points  (")
    return [
        (f"{which}held-out after", f"{_rate(after)}, {after['successes']} of {after['n']}"),
        (f"{which}improvement", rise),
    ]


def _rate(part: dict[str, Any]) -> str:
    low, high = part["ci95"]
    return f"{100 * part['rate']:.1f} %  (95 % {100 * low:.1f} to {100 * high:.1f})"
