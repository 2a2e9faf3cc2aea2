"""``gymdata scan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import Watch, command_words, facts, finish, grid, say
from .flags import Json, Output, Overwrite

_Path = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run folder, file or glob of rollouts, pairs or other tables.")
]
_Redact = Annotated[bool, typer.Option("--redact", help="Write a copy of the rows without what is found to -o.")]
_Tokenizer = Annotated[
    Path | None, typer.Option("--tokenizer", help="Tokenizer folder of the policy (default: the run's own).")
]
#: Findings that people are shown; --json has all.
_LISTED = 20


def scan(
    path: _Path,
    output: Output = None,
    redact: _Redact = False,
    tokenizer: _Tokenizer = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> int:
    """Every text is searched: prompts, answers, tool calls and results, tasks, environment facts, run.json and logs.
    A redacted copy has [redacted:KIND] in their place; tokens that hold a part of one are replaced and not trained.

    Exit code 1 when something was found, or a rollout is left out of the copy.
    """
    from gymdata.scan.run import scan as run

    with Watch("scan") as watch:
        report = run(
            path,
            output,
            redact=redact,
            tokenizer=tokenizer,
            overwrite=overwrite,
            command=command_words(),
            progress=watch,
        )

    def show() -> None:
        listed = report.findings[:_LISTED]
        if listed:
            rows = [(f.kind, f.shown, f.rollout_id or f.file, f.row, f.field) for f in listed]
            more = len(report.findings) - len(listed)
            grid(("kind", "value", "rollout or file", "row", "field"), rows)
            if more:
                say(f"{more:,} more (--json lists all)")
        facts("scan", report.rows())

    return finish(report, show, json=json)
