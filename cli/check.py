"""``gymdata check``: a chat template or a server before anything is sampled, a reward before it is used."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from gymdata.check.settings import CheckConfig

from .console import Watch, facts, finish, grid, note, say
from .flags import Json, with_flags

if TYPE_CHECKING:
    from gymdata.check.run import ModelReport
    from gymdata.score.trial import RewardCheck

#: Breaks shown; others are only counted.
SHOWN = 3


@with_flags(CheckConfig)
def check(
    settings: CheckConfig,
    named: Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.")] = None,
    json: Json = False,
) -> int:
    """Problems that break multi-turn training are reported, and with --reward SPEC --data RUN what a reward gives to saved
    rollouts: values, parts, faults with file and line, and time. With --data TASKS it scores reference answers, which must
    score above empty and wrong ones. With --recorder URL a scripted engine is served, and the recorder that was started in
    front of it is checked against schemas/SPEC.md. Exit code 1 if there is any problem."""
    from gymdata.check import run as checking
    from gymdata.errors import UsageError

    if settings.agent is not None:
        from gymdata.check.agents import check_agent

        found = check_agent(settings.agent)
        return finish(found, f"agent {settings.agent}", json=json)
    if named is not None and settings.model is not None:
        raise UsageError(f"model: given twice: {named} and {settings.model}", hint="it takes one value: give it once")
    model = settings.model if named is None else named
    if settings.reward or settings.data is not None:
        from gymdata.score.trial import check_reward

        if not settings.reward or settings.data is None:
            raise UsageError(
                "a reward is tried on saved rollouts or on tasks: give both --reward and --data",
                hint="gymdata check --reward rewards.py:score --data runs/x",
            )
        if model is not None or settings.endpoint is not None or settings.chat_template is not None:
            raise UsageError("--reward is checked by itself", hint="check the model or the server with another command")
        with Watch("check") as watch:
            trial = check_reward(
                settings.data, settings.reward, limit=settings.limit, timeout=settings.reward_timeout, progress=watch
            )
        return finish(trial, lambda: _show_reward(trial), json=json)
    if model is not None and model.startswith(("http://", "https://")):
        raise UsageError(
            f"{model}: is a URL, expected the folder of a model", hint="to probe a server: gymdata check --endpoint URL"
        ).at("model", model, "the folder of a model")
    if settings.endpoint is not None:
        served = checking.check_endpoint(settings.endpoint, model)
        details = [f"{f.detail}; {f.cure}" if f.cure else f.detail for f in served.findings]
        table = [(*row, detail) for row, detail in zip(served.rows(), details, strict=True)]
        return finish(served, lambda: grid(("probe", "result", "detail"), table, title=served.endpoint), json=json)
    if settings.recorder is not None:
        from gymdata.check.conformance.run import check_recorder

        recorded = check_recorder(
            settings.recorder, upstream_port=settings.upstream_port, tokenizer=model, wait=settings.wait, say=note
        )
        results = [(case.case, case.result, case.detail) for case in recorded.cases]
        return finish(recorded, lambda: grid(("case", "result", "detail"), results, title=recorded.recorder), json=json)
    if model is None:
        raise UsageError(
            "no model given", hint="gymdata check MODEL, --endpoint URL, --recorder URL, or --reward SPEC --data RUN"
        )
    report = checking.check(model, chat_template=settings.chat_template)
    return finish(report, lambda: _show(report), json=json)


def _show_reward(report: RewardCheck) -> None:
    from gymdata.score.trial import seconds

    names = list(report.parts)
    parts = names if len(names) > 1 else []
    turns = any(one.turns for one in report.rollouts)
    columns = [
        "task",
        "answer" if report.answers else "rollout",
        "reward",
        *parts,
        *(["per turn"] if turns else []),
        "time",
    ]
    rows = []
    for one in report.rollouts:
        spelt = "; ".join(", ".join(map(_number, steps)) for steps in one.turns.values())
        values = ["failed" if name in one.faults else _number(one.parts.get(name)) for name in parts]
        whole = "failed" if one.faults else _number(one.reward)
        which = one.rollout_id if report.answers else one.rollout_index
        rows.append([one.task_id, which, whole, *values, *([spelt] if turns else []), seconds(one.seconds)])
    if any(not one.faults for one in report.rollouts):
        grid(columns, rows)
    faults = Counter(fault for one in report.rollouts for fault in one.faults.values())
    for fault, count in faults.most_common(SHOWN):
        say(f"failed on {count:,}: {fault}")
    if len(faults) > SHOWN:
        say(f"… and {len(faults) - SHOWN} more: --json gives all")
    # Faults are listed above, with their counts.
    facts("check", [row for row in report.rows() if not row[0].endswith(" failed")])


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


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
