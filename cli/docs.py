"""``gymdata docs``: the topics that are installed with the package."""

from __future__ import annotations

import re
import sys
from importlib.resources import files
from typing import Annotated, NamedTuple

import typer

from .console import emit_json, facts
from .flags import Json

#: Topics in the order of the path from tasks to a checkpoint; each is a file of ``gymdata/docs``.
TOPICS = (
    "installing",
    "your-data",
    "your-reward",
    "your-environment",
    "your-server",
    "validate-codes",
    "audit",
    "filter-and-score",
    "judge",
    "train-and-watch",
    "batch-rl",
    "finetune",
    "looking",
    "querying",
    "viewing",
    "python-api",
    "settings",
    "file-format",
    "scale",
    "nemo-gym",
    "nemo-agent-toolkit",
    "differences",
    "without-gymdata",
)

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


class Page(NamedTuple):
    """One topic: its title, its first sentence and its whole text in Markdown."""

    name: str
    title: str
    summary: str
    text: str


def docs(
    topic: _Topic = [],  # noqa: B006  # typer makes a list of its own
    skill: _Skill = False,
    llms: _Llms = False,
    schema: _Schema = None,
    json: Json = False,
) -> None:
    """Without a topic, all topics are listed."""
    if skill or llms or schema is not None:
        _for_programs(topic, skill=skill, llms=llms, schema=schema)
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
    pages = [read_page(name) for name in TOPICS]
    if json:
        emit_json({"topics": [{"name": p.name, "title": p.title, "summary": p.summary} for p in pages]})
    else:
        facts("gymdata docs TOPIC", [(page.name, page.summary) for page in pages])


def _for_programs(topic: list[str], *, skill: bool, llms: bool, schema: str | None) -> None:
    from gymdata.errors import UsageError

    from . import for_programs

    given = [name for name, is_given in {
        "TOPIC": bool(topic), "--skill": skill, "--llms": llms, "--schema": schema is not None
    }.items() if is_given]  # fmt: skip
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other", hint="give one of them")
    if schema is not None:
        emit_json(for_programs.config_schema(schema))
    else:
        pages = [read_page(name) for name in TOPICS]
        sys.stdout.write(for_programs.skill(pages) if skill else for_programs.llms(pages))


def _commands() -> list[str]:
    from .for_programs import configurable

    return [*configurable(), "finetune"]


def _elsewhere(topic: str) -> str | None:
    """The hint for a word that is not a topic: a code or a command."""
    from gymdata.rollouts.violations import CODES

    from .main import COMMANDS

    if topic.upper() in CODES:
        return f"gymdata validate --explain {topic.upper()}"
    return f"gymdata {topic} --help" if topic in COMMANDS else None


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def read_page(topic: str) -> Page:
    """A topic by its file name, its title or the words that it alone begins with. Raises UsageError for an unknown one."""
    from gymdata.errors import UsageError

    name = _slug(topic.removesuffix(".md"))
    if name not in TOPICS:
        # A word of one topic's name is enough: reward for your-reward.
        named = [t for t in TOPICS if name in t.split("-")]
        titled = [t for t in TOPICS if _slug(read_page(t).title) == name]
        if len(titled or named) != 1:
            unknown = UsageError.unknown_choice("topic", topic, TOPICS)
            unknown.hint = _elsewhere(topic) or unknown.hint
            raise unknown
        (name,) = titled or named
    source = files("gymdata").joinpath("docs", f"{name}.md").read_text(encoding="utf-8")
    # Comments are notes to the tests that run the blocks.
    text = re.sub(r"^<!--.*?-->\n", "", source, flags=re.MULTILINE | re.DOTALL)
    title, summary = text.split("\n\n")[:2]
    return Page(name, title.removeprefix("# "), " ".join(summary.split()), text)
