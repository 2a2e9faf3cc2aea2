"""``gymdata check``: does a chat template preserve prefixes, before anything is sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .console import JsonFlag, facts, finish, grid

if TYPE_CHECKING:
    from gymdata.check.run import ModelReport

#: Breaks shown before the rest is only counted.
SHOWN = 3


def check(
    model: Annotated[
        str | None, typer.Argument(help="Model or tokenizer folder; with --endpoint, the served model name.")
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="Base URL of a vLLM server to probe.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="Chat template file that replaces the model's.")] = None,
    as_json: JsonFlag = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show tracebacks of errors.")] = False,
) -> int:
    """Probe a chat template, or a server, for problems that break multi-turn training. Exit code 1 if any is found."""
    from gymdata.check import run as checking
    from gymdata.errors import UsageError

    if model is not None and model.startswith(("http://", "https://")):
        raise UsageError(
            f"{model}: is a URL, expected the folder of a model", hint="to probe a server: gymdata check --endpoint URL"
        )
    if endpoint is not None:
        served = checking.check_endpoint(endpoint, model)
        details = [f.detail for f in served.findings]

        def table() -> None:
            rows = [(*row, detail) for row, detail in zip(served.rows(), details, strict=True)]
            grid(("probe", "result", "detail"), rows, title=served.endpoint)

        return finish(served, table, json=as_json)
    if model is None:
        raise UsageError("no model given", hint="gymdata check MODEL, or gymdata check --endpoint URL")
    report = checking.check(model, chat_template=chat_template)
    return finish(report, lambda: _show(report), json=as_json)


def _show(report: ModelReport) -> None:
    found = report.check
    for b in found.breaks[:SHOWN]:
        print(f"{b.probe}, turn {b.turn}: {b.where} change at token {b.position}")
        print(f"  was  {b.before!r}\n  now  {b.after!r}")
    if len(found.breaks) > SHOWN:
        print(f"… and {len(found.breaks) - SHOWN} more: --json gives all")
    for probe, why in list(found.no_bridge.items())[:1]:
        print(f"{probe}: token IDs cannot be carried over: {why}")
    facts(report.model, report.rows())
