"""``gymdata check``: a chat template, a server or an environment before anything is sampled."""

from __future__ import annotations

import sys
from json import loads
from typing import TYPE_CHECKING, Annotated

import typer

from gymdata.commands.check.settings import CheckConfig
from gymdata.environments.port import StepResult
from gymdata.errors import UsageError

from .console import facts, finish, grid, note, say, show
from .flags import Json, with_flags

if TYPE_CHECKING:
    from gymdata.environments.python_tools import ToolEpisode
    from gymdata.rollouts.messages import Message

#: Breaks shown; others are only counted.
SHOWN = 3


@with_flags(CheckConfig)
def check(
    settings: CheckConfig,
    named: Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.")] = None,
    json: Json = False,
) -> int:
    """Problems that break multi-turn training are reported. With --env, an environment's tools are called with sampled
    arguments and played, by chance and (--play) by hand; its faults have file and line. Exit code 1 if there is any
    problem."""
    from gymdata.commands.check import run as checking

    if settings.env is not None:
        return _check_environment(settings, json=json)
    if settings.play or settings.env_args or settings.tasks is not None:
        raise UsageError("an environment is played: give --env", hint="gymdata check --env path.py:Name --play")
    if named is not None and settings.model is not None:
        raise UsageError(f"model: given twice: {named} and {settings.model}", hint="it takes one value: give it once")
    model = settings.model if named is None else named
    if model is not None and model.startswith(("http://", "https://")):
        raise UsageError(
            f"{model}: is a URL, expected the folder of a model", hint="to probe a server: gymdata check --endpoint URL"
        ).at("model", model, "the folder of a model")
    if settings.endpoint is not None:
        served = checking.check_endpoint(settings.endpoint, model)
        details = [f"{f.detail}; {f.cure}" if f.cure else f.detail for f in served.findings]
        table = [(*row, detail) for row, detail in zip(served.rows(), details, strict=True)]
        return finish(served, lambda: grid(("probe", "result", "detail"), table, title=served.endpoint), json=json)
    if model is None:
        raise UsageError("no model given", hint="gymdata check MODEL, --endpoint URL, or --env path.py:Name")
    report = checking.check(model, chat_template=settings.chat_template)

    def summary() -> None:
        for b in report.check.breaks[:SHOWN]:
            print(f"{b.probe}, turn {b.turn}: {b.where} change at token {b.position}")
            print(f"  was  {b.before!r}\n  now  {b.after!r}")
        if (more := len(report.check.breaks) - SHOWN) > 0:
            print(f"… and {more} more: --json gives all")
        for probe, why in list(report.check.no_bridge.items())[:1]:
            print(f"{probe}: token IDs cannot be carried over: {why}")
        facts(report.model, report.rows())

    return finish(report, summary, json=json)


def _check_environment(settings: CheckConfig, *, json: bool) -> int:
    from gymdata.commands.check.environment import check_environment

    if settings.model is not None or settings.endpoint is not None:
        raise UsageError("--env is checked by itself", hint="check the model or server with another command")
    report = check_environment(
        str(settings.env),
        settings.tasks,
        map=settings.map,
        limit=settings.limit,
        timeout=settings.tool_timeout,
        arguments=settings.env_args or None,
        human=_ask if settings.play else None,
    )

    def summary() -> None:
        for tool in report.tools:
            function = tool["function"]
            properties = (function.get("parameters") or {}).get("properties") or {}
            named = ", ".join(f"{name}: {schema.get('type', 'any')}" for name, schema in properties.items())
            say(f"{function['name']}({named}): {function.get('description', '')}")
        rows = [
            (play.policy, play.task_id, play.steps, show(play.reward), play.ended, state)
            for play in report.plays
            for state in [", ".join(f"{name} {value}" for name, value in play.state.items()) or "–"]
        ]
        if rows:
            grid(("policy", "task", "steps", "reward", "ended", "state"), rows)
        for finding in report.findings:
            say(f"{finding.severity}: {finding.where}: {finding.what}: {finding.detail}")
        facts("the environment passes" if report.ok else "the environment has errors", report.rows())

    return finish(report, summary, json=json)


def _ask(episode: ToolEpisode, result: StepResult | None) -> Message | None:
    """A person's next message, from standard input: text, or TOOL and its arguments as JSON; end of file ends the play."""
    tools = [tool["function"]["name"] for tool in episode.tools or []]
    if result is None:
        note(f"a line is a message, TOOL {{JSON}} a call of {', '.join(tools) or 'a tool (it has none)'}; Ctrl-D ends")
    for message in episode.messages if result is None else result.messages:
        note(f"{message['role']}: {message.get('content')}")
    if result is not None and result.reward is not None:
        note(f"reward {result.reward:g}")
    if result is not None and result.done:
        note(f"the rollout has ended: {result.stop_reason or 'no tool was called'}")
        return None
    sys.stderr.write("> ")
    try:
        line = input()
    except EOFError:
        return None
    name, _, rest = line.strip().partition(" ")
    if name not in tools and rest.lstrip().startswith("{"):
        note(str(UsageError.unknown_choice("tool", name, tools)))
        return _ask(episode, StepResult())
    if name in tools:
        from gymdata.commands.check.environment import calling

        try:
            return calling(name, loads(rest or "{}"))
        except ValueError as error:
            note(f"the arguments of {name} are no JSON ({error})")
            return _ask(episode, StepResult())
    return {"role": "assistant", "content": line}
