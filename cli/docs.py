"""``gymdata docs``: the topics that are installed with the package."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .console import emit_json, facts
from .flags import Json
from .topics import TOPICS, pages, read_page

_Topic = Annotated[
    list[str],
    typer.Argument(
        metavar="TOPIC",
        help="Topic to print (default: list all topics).",
        autocompletion=lambda incomplete: [name for name in TOPICS if name.startswith(incomplete)],
    ),
]


_Skill = Annotated[bool, typer.Option("--skill", help="Print a SKILL.md for coding agents.")]
_Llms = Annotated[bool, typer.Option("--llms", help="Print an llms.txt: the topics, a line each.")]
_Schema = Annotated[
    str | None,
    typer.Option(
        "--schema",
        metavar="COMMAND",
        help="Print the JSON Schema of a command's --config file, for editors.",
        autocompletion=lambda incomplete: [name for name in _commands() if name.startswith(incomplete)],
    ),
]


def docs(
    topic: _Topic = [],  # noqa: B006  # typer makes a list of its own
    skill: _Skill = False,
    llms: _Llms = False,
    schema: _Schema = None,
    json: Json = False,
) -> None:
    """Without a topic, all topics are listed."""
    if skill or llms or schema is not None:
        from gymdata.errors import UsageError

        from . import for_programs
        from .settings_page import config_schema

        words = {"TOPIC": bool(topic), "--skill": skill, "--llms": llms, "--schema": schema is not None}
        flags = [word for word, is_given in words.items() if is_given]
        if len(flags) > 1:
            raise UsageError(f"{' and '.join(flags)} exclude each other", hint="give one of them")
        if schema is not None:
            emit_json(config_schema(schema))
        else:
            sys.stdout.write(for_programs.skill(pages()) if skill else for_programs.llms(pages()))
        return
    if topic:
        page = read_page("-".join(topic))
        if json:
            emit_json(page._asdict())
        elif sys.stdout.isatty():
            from .markdown import show

            show(page.text)
        else:
            sys.stdout.write(page.text)
        return
    if json:
        emit_json({"topics": [{"name": p.name, "title": p.title, "summary": p.summary} for p in pages()]})
    else:
        facts("gymdata docs TOPIC", [(page.name, page.summary) for page in pages()])


def _commands() -> list[str]:
    from .settings_page import configurable

    return [*configurable(), "finetune"]
