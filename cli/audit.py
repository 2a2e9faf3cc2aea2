"""``gymdata audit``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gymdata.commands.audit.settings import AuditConfig

from .console import Grid, Watch, command_words, finish
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
    title = f"audit against {report.model['path']} ({report.model['dtype']}, {report.model['device']})"
    below = [*report.first, *report.notes, *report.verdict()]
    return finish(report, title, json=json, above=[] if report.ok else _tables(report), below=below)


def _tables(report: AuditReport) -> Iterator[Grid]:
    """Where the log-probabilities differ."""
    for title, name, places in (
        ("place in the generation", "positions", report.positions),
        ("turn", "turns", report.turns),
    ):
        rows = [[row[column] for column in (name, "tokens", "mean_abs", "max_abs")] for row in places]
        yield (title, "tokens", "mean |Δ|", "max |Δ|"), rows, ""
    tokens = []
    for row in report.worst:
        text = row.get("token", f"<id {row['token_id']}>")
        position = f"{row['rollout_id']} {row['turn']} {row['position']}"
        shown = f"{row.get('before', '')[-32:]!r} → {text!r}"
        tokens.append((position, shown, row["saved"], row["recomputed"], row["difference"]))
    yield ("rollout turn position", "token", "saved", "recomputed", "Δ"), tokens, "the tokens furthest apart"
