"""``gymdata audit``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gymdata.commands.audit.settings import AuditConfig
from gymdata.errors import counted

from .console import Watch, command_words, facts, finish, grid, say
from .flags import Json, Overwrite, RunFiles, with_flags

if TYPE_CHECKING:
    from gymdata.commands.audit.report import AuditReport

_Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="Folder for the report (default: RUN/audit-MODEL).")
]


@with_flags(AuditConfig)
def audit(
    path: RunFiles, output: _Output = None, *, settings: AuditConfig, overwrite: Overwrite = False, json: Json = False
) -> int:
    """Logprobs are recomputed with a forward pass. Exit code 1 when they are not the model's (L305), by more than rounding
    explains; then the likely cause is named.
    """
    from gymdata.commands.audit.run import audit as run

    with Watch("audit") as watch:
        report = run(path, output=output, config=settings, overwrite=overwrite, command=command_words(), progress=watch)
    return finish(report, lambda: _show(report), json=json)


def _show(report: AuditReport) -> None:
    from gymdata.rollouts.logprobs import MEANS

    for line in report.first:
        say(line)
    summary = report.summary
    if not report.ok:
        _by_place("place in the generation", "positions", report.positions)
        _by_place("turn", "turns", report.turns)
        lines = []
        for row in report.worst:
            text = row.get("token", f"<id {row['token_id']}>")
            before = row.get("before", "")[-32:]
            position = f"{row['rollout_id']} {row['turn']} {row['position']}"
            lines.append((position, f"{before!r} → {text!r}", row["saved"], row["recomputed"], row["difference"]))
        if lines:
            grid(("rollout turn position", "token", "saved", "recomputed", "Δ"), lines, "the tokens furthest apart")
    facts(f"audit against {report.model['path']} ({report.model['dtype']}, {report.model['device']})", report.rows())
    for line in report.notes:
        say(line)
    if report.ok:
        tokens, few = counted(summary["tokens"], "token"), summary["tokens_beyond_tolerance"]
        rest = f": {few:,} of {tokens} more than {report.rounding.token:g} apart, which rounding explains"
        if outliers := summary["tokens_beyond_rounding"]:  # a few do not decide, but are no rounding either
            where = "".join(f", in rollout {token['rollout_id']}, turn {token['turn']}" for token in report.worst[:1])
            mean, furthest = summary["ratio"]["mean"], summary["max_abs_difference"]
            refuses = f"train-rl refuses a mean ratio of {mean:.3g}, unless its loss has no ratios"
            trains = "train-rl trains with them" if MEANS[0] <= mean <= MEANS[1] else refuses
            rest = (
                f", but rounding cannot explain {outliers:,} of {tokens}: the largest difference is {furthest:.4g} nats"
            )
            rest += f"{where}; {trains}"
        print(f"the saved log-probabilities are the model's{rest}")
        return
    if any(v.code == "L306" for v in report.violations):
        print("the saved log-probabilities cannot be a sampler's (L306): export those that the engine returned")
    if off := [v for v in report.violations if v.turn is not None]:
        print(f"L305 in {counted(len(off), 'turn')} of {counted(len({v.row for v in off}), 'rollout')}")
    for line in summary["departures"]:
        print(f"L305: {line}")
    if report.explanation is not None:
        likely = "cause" if report.explanation.certain else "likely cause"
        say(f"{likely}: {report.explanation.text}")
        if report.explanation.after is not None:
            print(f"  with it, mean |Δ| falls from {report.explanation.before:.4g} to {report.explanation.after:.4g}")


def _by_place(title: str, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    lines = [(row[name], row["tokens"], row["mean_abs"], row["max_abs"]) for row in rows]
    grid((title, "tokens", "mean |Δ|", "max |Δ|"), lines)
