"""``gymdata check``: does a chat template preserve prefixes, before anything is sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gymdata.check.settings import CheckConfig

from .console import emit_json, facts, grid
from .flags import Json, with_flags

if TYPE_CHECKING:
    from gymdata.check.run import ModelReport

#: Breaks shown before the rest is only counted.
SHOWN = 3


@with_flags(CheckConfig)
def check(
    settings: CheckConfig,
    named: Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.")] = None,
    json: Json = False,
) -> int:
    """Problems that break multi-turn training are reported. Exit code 1 if any is found."""
    from gymdata.check import run as checking
    from gymdata.errors import UsageError

    if named is not None and settings.model is not None:
        raise UsageError(f"model: given twice: {named} and {settings.model}", hint="it takes one value: give it once")
    model = settings.model if named is None else named
    if model is not None and model.startswith(("http://", "https://")):
        raise UsageError(
            f"{model}: is a URL, expected the folder of a model", hint="to probe a server: gymdata check --endpoint URL"
        ).at("model", model, "the folder of a model")
    if settings.endpoint is not None:
        served = checking.check_endpoint(settings.endpoint, model)
        if json:
            emit_json(served.to_dict())
        else:
            rows = [(f.name, "yes" if f.ok else ("NO" if f.needed else "no"), f.detail) for f in served.findings]
            grid(("probe", "result", "detail"), rows, title=served.endpoint)
        return 0 if served.ok else 1
    if model is None:
        raise UsageError("no model given", hint="gymdata check MODEL, or gymdata check --endpoint URL")
    report = checking.check(model, chat_template=settings.chat_template)
    if json:
        emit_json(report.to_dict())
    else:
        _show(report)
    return 0 if report.ok else 1


def _show(report: ModelReport) -> None:
    found, cure = report.check, report.cure
    for b in found.breaks[:SHOWN]:
        print(f"{b.probe}, turn {b.turn}: {b.where} change at token {b.position}")
        print(f"  was  {b.before!r}\n  now  {b.after!r}")
    if len(found.breaks) > SHOWN:
        print(f"… and {len(found.breaks) - SHOWN} more: --json gives all")
    for probe, why in list(found.no_bridge.items())[:1]:
        print(f"{probe}: token IDs cannot be carried over: {why}")
    rows: list[tuple[str, object]] = [
        ("template", report.template_name or "not one that is known"),
        ("prefix-preserving", found.prefix_preserving),
        ("carries token IDs over", found.bridges),
        ("strips from earlier turns", ", ".join(found.strips) or "nothing"),
        ("never writes", ", ".join(found.ignores) or "–"),
        ("refuses", "; ".join(f"{name} ({why})" for name, why in found.refused.items()) or "nothing"),
        ("end of turn", ", ".join(f"{text} ({i})" for i, text in found.end_of_turn)),
        ("generation mask", report.generation_mask or "no markers"),
        ("text round-trips", found.text_stable),
        ("random ids round-trip", f"{found.random_ids_stable:.0%} of runs of 8"),
        (
            "template patch",
            "none known" if cure is None else f"{cure.name} ({'keeps' if cure.check.ok else 'also changes'} turns)",
        ),
        ("verdict", _verdict(report)),
    ]
    facts(report.model, rows)


def _verdict(report: ModelReport) -> str:
    if report.ok:
        return "the template is prefix-preserving"
    cure = report.cure
    if cure is not None and cure.check.ok:
        return f"not prefix-preserving; `gymdata collect` uses {cure.name} unless --no-keep-reasoning"
    if report.check.bridges:
        return "not prefix-preserving; `gymdata collect` extends the token IDs, so its rollouts have no breaks"
    return "not prefix-preserving, and no template patch is known"
