"""``gymdata check``: a chat template, a server or an environment before anything is sampled; rollouts before training."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from json import loads
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from gymdata.commands.check.settings import CheckConfig
from gymdata.errors import UsageError, counted

from .console import Grid, facts, finish, grid, note, paragraphs, say
from .flags import Json, with_flags

if TYPE_CHECKING:
    from gymdata.commands.check.environment import EnvironmentCheck
    from gymdata.commands.check.rollouts import DataReport
    from gymdata.commands.check.run import ModelReport
    from gymdata.environments.port import StepResult
    from gymdata.environments.python_tools import ToolEpisode
    from gymdata.rollouts.messages import Message

#: Findings that are shown.
WORST = 3


@with_flags(CheckConfig)
def check(
    settings: CheckConfig,
    named: Annotated[
        str | None,
        typer.Argument(metavar="PATH", help="Rollouts or pairs, with --model for that model; or a model folder."),
    ] = None,
    json: Json = False,
) -> int:
    """Of rollouts or pairs (a run folder, a file, a glob, another project's dump): whether they can be trained, in one
    screen; nothing is written. -m bounds their ids by that model's vocabulary and renders text. Of a model or a server,
    problems that break multi-turn training are reported. With --env, an environment's tools are called with sampled
    arguments and played, by chance and (--play) by hand; its faults have file and line. Exit code 1 if there is any
    problem: training on the data would be wrong."""
    from gymdata.commands.check import run as checking

    model = settings.model
    if named is not None and settings.endpoint is None and settings.env is None:
        from gymdata.commands.check.rollouts import check_rollouts, is_rollouts

        if is_rollouts(named):
            checked = check_rollouts(named, model=model, chat_template=settings.chat_template)
            return finish(checked, lambda: _of_rollouts(checked), json=json)
    if named is not None and settings.env is not None:
        raise UsageError(f"{named}: has no effect with --env", hint="leave it out")
    if named is not None and model is not None:
        hint = "a model is checked alone, or with -m after rollouts or pairs: a file, a glob or a run folder"
        raise UsageError(f"model: given twice: {named} and {model}", hint=hint)
    model = model if named is None else named
    if settings.env is not None:
        from gymdata.commands.check.environment import check_environment

        tried = check_environment(
            settings.env,
            settings.tasks,
            map=settings.map,
            limit=settings.limit,
            timeout=settings.tool_timeout,
            arguments=settings.env_args or None,
            human=_ask if settings.play else None,
        )
        title = "the environment passes" if tried.ok else "the environment has errors"
        return finish(tried, title, json=json, above=_of_environment(tried))
    if model is not None and model.startswith(("http://", "https://")):
        raise UsageError(
            f"{model}: is a URL, expected the folder of a model", hint="to probe a server: gymdata check --endpoint URL"
        ).at("model", model, "the folder of a model")
    if settings.endpoint is not None:
        served = checking.check_endpoint(settings.endpoint, model)
        return finish(served, served.endpoint, json=json)
    if model is None:
        raise UsageError("no model given", hint="gymdata check MODEL, --endpoint URL, or --env path.py:Name")
    report = checking.check(model, chat_template=settings.chat_template)
    return finish(report, report.model, json=json, above=_of_template(report))


def _of_template(report: ModelReport) -> Iterator[Grid]:
    breaks = [(b.probe, b.turn, b.where, b.position, repr(b.before), repr(b.after)) for b in report.check.breaks]
    yield ("probe", "turn", "change", "at token", "was", "now"), breaks, ""
    yield ("probe", "why token IDs cannot be carried over"), [*report.check.no_bridge.items()], ""


def _of_rollouts(checked: DataReport) -> None:
    """One screen: the answer, the facts, what each trainer could use, and the worst findings with their pages."""
    facts(f"{checked.path}: {checked.verdict}", checked.rows())
    usable = [(use.trainer, use.rollouts, use.tokens, use.why) for use in checked.trainers]
    grid(("could be used by", checked.table, "tokens", ""), usable)
    worst = [finding for finding in checked.findings if finding.severity != "info"][:WORST]
    for finding in worst:
        paragraphs(f"{finding.severity}: {finding.code} {finding.name}, {finding.times:,}; first: {finding.where}", 4)
        if finding.detail:
            paragraphs(f"    {finding.detail:.200}", 0)
        say(f"    {finding.page}")
    if more := len(checked.findings) - len(worst):
        lists = "after import, `gymdata validate RUN` lists" if checked.is_imported else "`gymdata validate` lists"
        say(f"{counted(more, 'other finding')}: {lists} rows, --json codes")
    if checked.is_imported and checked.ok:
        say(f"next: gymdata import {quote(checked.path)} -o RUN")


def _of_environment(tried: EnvironmentCheck) -> Iterator[Grid]:
    tools = []
    for tool in (tool["function"] for tool in tried.tools):
        arguments = (tool.get("parameters") or {}).get("properties") or {}
        named = ", ".join(f"{name}: {schema.get('type', 'any')}" for name, schema in arguments.items())
        tools.append((tool["name"], named, tool.get("description", "")))
    plays = []
    for play in tried.plays:
        state = ", ".join(f"{name} {value}" for name, value in play.state.items())
        plays.append((play.policy, play.task_id, play.steps, play.reward, play.ended, state or None))
    findings = [(f"{finding.severity}: {finding.where}", finding.what, finding.detail) for finding in tried.findings]
    yield ("tool", "arguments", "description"), tools, ""
    yield ("policy", "task", "steps", "reward", "ended", "state"), plays, ""
    yield ("finding", "what", "detail"), findings, ""


def _ask(episode: ToolEpisode, result: StepResult | None) -> Message | None:
    """A person's next message, from standard input: text, or TOOL and its arguments as JSON; end of file ends the play."""
    from gymdata.commands.check.environment import calling

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
    while True:
        sys.stderr.write("> ")
        if not (line := sys.stdin.readline()):
            return None
        name, _, rest = line.strip().partition(" ")
        if name not in tools and not rest.lstrip().startswith("{"):
            return {"role": "assistant", "content": line.rstrip("\n")}
        try:
            if name not in tools:
                raise UsageError.unknown_choice("tool", name, tools)
            return calling(name, loads(rest or "{}"))
        except UsageError as error:
            note(str(error))
        except ValueError as error:
            note(f"the arguments of {name} are no JSON ({error})")
