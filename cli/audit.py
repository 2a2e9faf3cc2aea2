"""``gymdata audit``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import ConfigFile, JsonFlag, OverwriteFlag, SetFlag, Watch, command_words, facts, finish, grid, say

if TYPE_CHECKING:
    from gymdata.audit.report import AuditReport

_Path = Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folder, file or glob of rollouts.")]
_Model = Annotated[
    str | None, typer.Option("-m", "--model", help="Model or LoRA adapter folder (default: the run's policy).")
]
_Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="Folder for the report (default: RUN/audit-MODEL).")
]
_Limit = Annotated[int | None, typer.Option("-n", "--limit", help="Audit N rollouts, evenly spaced.")]
_Tolerance = Annotated[
    float | None,
    typer.Option("--tolerance", help="Maximum |Δ| accepted as rounding (default: 1e-3 for float32, 0.5 for bfloat16)."),
]
_WriteAs = Annotated[
    str | None, typer.Option("--write-as", help="ref_logprobs: also write recomputed logprobs and entropies.")
]
_Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:N (default: cuda if available).")]
_Dtype = Annotated[str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16 (default: auto).")]
_Batch = Annotated[int | None, typer.Option("--batch-tokens", help="Tokens per forward pass (default: 16384).")]
#: Width of a bar in characters.
_BAR = 24


def audit(
    path: _Path,
    model: _Model = None,
    output: _Output = None,
    limit: _Limit = None,
    tolerance: _Tolerance = None,
    worst: Annotated[int | None, typer.Option("--worst", help="Tokens to show (default: 10).")] = None,
    write_as: _WriteAs = None,
    device: _Device = None,
    dtype: _Dtype = None,
    batch_tokens: _Batch = None,
    config: ConfigFile = None,
    sets: SetFlag = [],  # noqa: B006 - typer copies it
    overwrite: OverwriteFlag = False,
    json: JsonFlag = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show the traceback of an error.")] = False,
) -> int:
    """Recompute logprobs with a forward pass and compare them with the saved ones.

    Exit code 1 when they are not the model's (L305); then the likely cause is named.
    """
    given = locals()
    from gymdata.audit.run import audit as run
    from gymdata.audit.settings import AuditConfig

    settings = AuditConfig.load(config, {k: given[k] for k in AuditConfig.model_fields}, sets)
    with Watch("audit") as watch:
        report = run(path, output=output, config=settings, overwrite=overwrite, command=command_words(), progress=watch)
    return finish(report, lambda: _show(report), json=json)


def _show(report: AuditReport) -> None:
    for line in report.first:
        say(line)
    summary = report.summary
    if not report.ok:
        _bars("place in the generation", "positions", report.positions)
        _bars("turn", "turns", report.turns)
        _worst(report.worst)
    facts(
        f"audit against {report.model['path']} ({report.model['dtype']}, {report.model['device']})",
        report.rows(),
    )
    for line in report.notes:
        say(line)
    if report.ok:
        print(f"the saved log-probabilities are the model's: none is further than {report.tolerance:g} away")
        return
    off = sum(v.turn is not None for v in report.violations)
    print(f"L305 in {off:,} turns of {summary['rollouts_beyond_tolerance']:,} rollouts")
    if report.explanation is not None:
        likely = "cause" if report.explanation.certain else "likely cause"
        say(f"{likely}: {report.explanation.text}")
        if report.explanation.after is not None:
            print(f"  with it, mean |Δ| falls from {report.explanation.before:.4g} to {report.explanation.after:.4g}")


def _bars(title: str, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    most = max(row["mean_abs"] for row in rows) or 1.0
    lines = [
        (row[name], row["tokens"], row["mean_abs"], row["max_abs"], "█" * round(_BAR * row["mean_abs"] / most) or "▏")
        for row in rows
    ]
    grid((title, "tokens", "mean |Δ|", "max |Δ|", ""), lines)


def _worst(rows: Sequence[Mapping[str, Any]]) -> None:
    lines = []
    for row in rows:
        text = row.get("token", f"<id {row['token_id']}>")
        before = row.get("before", "")[-32:]
        place = f"{row['rollout_id']} {row['turn']} {row['position']}"
        lines.append((place, f"{before!r} → {text!r}", row["saved"], row["recomputed"], row["difference"]))
    if lines:
        grid(("rollout turn position", "token", "saved", "recomputed", "Δ"), lines, "the tokens furthest apart")
