"""``gymdata docs``: the topics and the files for agents, which are installed, and the JSON Schemas of ``--config`` files."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Annotated, Any, NamedTuple

import typer

from gymdata.errors import UsageError

from .console import emit_json, facts, stdout
from .flags import Json

#: Topics in the order of the path from tasks to a checkpoint; each is a file of ``gymdata/docs``.
_TOPICS = """
installing your-data your-reward your-environment your-server record-your-agent
replay validate-codes audit filter-and-score judge
train-and-watch batch-rl stale-rollouts recipes finetune
looking querying viewing python-api settings file-format scale
nemo-gym nemo-agent-toolkit differences without-gymdata
"""
TOPICS = tuple(_TOPICS.split())


class Page(NamedTuple):
    """One topic: its title, its first sentence and its whole text in Markdown."""

    name: str
    title: str
    summary: str
    text: str


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
        "--schema", metavar="COMMAND", help="Print the JSON Schema of a command's --config file, for editors."
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
    words = {"TOPIC": bool(topic), "--skill": skill, "--llms": llms, "--schema": schema is not None}
    given = [word for word, is_given in words.items() if is_given]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other", hint="give one of them")
    if schema is not None:
        emit_json(config_schema(schema))
    elif skill or llms:
        stdout().write(_file("skill.txt" if skill else "llms.txt"))
    elif topic:
        page = read_page("-".join(topic))
        if json:
            emit_json(page._asdict())
        elif stdout().isatty():
            from .markdown import show

            show(page.text, stdout())
        else:
            stdout().write(page.text)
    elif json:
        emit_json({"topics": [{"name": p.name, "title": p.title, "summary": p.summary} for p in pages()]})
    else:
        facts("gymdata docs TOPIC", [(page.name, page.summary) for page in pages()])


def read_page(topic: str) -> Page:
    """A topic by its file name, its title, or a word of its name that no other has. Raises UsageError for an unknown one."""
    from gymdata.checks.violations import CODES
    from gymdata.errors import nearest

    from .main import COMMANDS

    word = _slug(topic.removesuffix(".md"))
    names = [page.name for page in pages() if word in (page.name, _slug(page.title))]
    names = names or [name for name in TOPICS if word in name.split("-")]
    if len(names) == 1:
        return _page(names[0])
    hint = nearest(topic, TOPICS) or "`gymdata docs` lists them with a line each"
    if topic.upper() in CODES:
        hint = f"gymdata validate --explain {topic.upper()}"
    elif topic in COMMANDS:
        hint = f"gymdata {topic} --help"
    raise UsageError.bad_value("topic", topic, f"one of {len(TOPICS)} topics", hint)


def pages() -> list[Page]:
    """Every topic."""
    return [_page(name) for name in TOPICS]


def configurable() -> dict[str, tuple[type[Any], Any]]:
    """Command → (settings, their flags), for the commands with a ``--config`` file of settings."""
    from .main import COMMANDS, body_of

    by_command = {name: getattr(body_of(name), "settings", None) for name in COMMANDS}
    return {name: settings for name, settings in by_command.items() if settings is not None}


def config_schema(command: str) -> dict[str, Any]:
    """The JSON Schema of a command's ``--config`` file. Raises UsageError for a command that has none."""
    from gymdata.settings import DIALECT

    if command == "finetune":
        from gymdata.commands.finetune.settings import IGNORED_KEYS, FinetuneConfig

        spec = FinetuneConfig.model_json_schema(by_alias=True)
        # What files of the NeMo Agent Toolkit have besides, which is not read.
        spec["properties"] |= dict.fromkeys(IGNORED_KEYS, True)
        spec["$defs"]["EvalGeneral"]["properties"] |= {"output_dir": True, "output": True}
        return {"$schema": DIALECT, **spec, "title": "gymdata finetune"}
    commands = configurable()
    if command not in commands:
        raise UsageError.unknown_choice("command with a --config file", command, [*commands, "finetune"])
    spec = commands[command][0].model_json_schema(by_alias=True)
    # Required settings may come from the command line instead.
    spec.pop("required", None)
    if command.startswith("train-"):
        spec["additionalProperties"] = True
        spec["description"] = "Keys that are not listed go to the trainer: those of TRL's settings for this algorithm."
    return {"$schema": DIALECT, **spec, "title": f"gymdata {command}"}


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _file(name: str) -> str:
    return files("gymdata").joinpath("docs", name).read_text(encoding="utf-8")


def _page(name: str) -> Page:
    # Comments are notes to the tests that run the blocks.
    text = re.sub(r"^<!--.*?-->\n", "", _file(f"{name}.md"), flags=re.MULTILINE | re.DOTALL)
    title, summary = text.split("\n\n")[:2]
    return Page(name, title.removeprefix("# "), " ".join(summary.split()), text)
