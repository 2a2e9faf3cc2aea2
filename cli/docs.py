"""``gymdata docs``: the topics, which are installed files, the page of all settings, and the files for agents and editors.

The page of settings and the JSON Schemas of ``--config`` files are made from the settings classes.
"""

from __future__ import annotations

import re
import sys
import typing
from importlib.resources import files
from typing import Annotated, Any, NamedTuple

import typer

from gymdata.errors import UsageError

from .console import emit_json, facts
from .examples import EXAMPLES
from .flags import Json, described
from .tables import filled

#: Topics in the order of the path from tasks to a checkpoint; each is a file of ``gymdata/docs``.
TOPICS = (
    "installing",
    "your-data",
    "your-reward",
    "your-environment",
    "your-server",
    "record-your-agent",
    "validate-codes",
    "audit",
    "filter-and-score",
    "judge",
    "train-and-watch",
    "batch-rl",
    "recipes",
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

_SETTINGS_HEAD = """# Settings

Every setting of every command: its key in `--config` files, in `--set KEY=VALUE` and in Python, its flag, and its default.

`--set` beats flags, which beat the file. A setting whose flag is `--set` has none of its own. `gymdata COMMAND --help` shows
flags that are no settings as well; [Finetune](finetune.md) has a file of its own.
"""
_SUMMARY = (
    "Turn LLM rollouts into training data, once, on disk, and train from those files: "
    "SFT, DPO, KTO, reward models, batch RL."
)
_USE = (
    "Use it to collect rollouts with vLLM, to check, score, judge, filter, query or look at them, to build preference pairs "
    "or experiences, and to train."
)
_RULES = """\
- Path first, settings as flags, `--config FILE` or `--set KEY=VALUE`. `-m` is the model, `-o` the output, `-n` a limit.
- `--json` prints one JSON object on stdout, errors included; everything else goes to stderr.
- Exit codes: 0 done, 1 faults found or some rows failed, 2 usage, 3 an outside system failed, 130 interrupted.
- An error names what was got, what is expected, where, and after `→` what to do. Follow the arrow.
- Rerun a command to resume it; `--overwrite` starts over; `--dry-run`, where there is one, checks and writes nothing.
- A fault has a code: `gymdata validate --explain CODE`. A module that is missing is named with the command that installs it.
- Never repair token ids by tokenizing text again: what is trained is what was sampled. `gymdata validate --fix` repairs."""


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
        sys.stdout.write(_skill() if skill else _llms())
    elif topic:
        page = read_page("-".join(topic))
        if json:
            emit_json(page._asdict())
        elif sys.stdout.isatty():
            from .markdown import show

            show(page.text)
        else:
            sys.stdout.write(page.text)
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
        return _page(names[0], settings_page() if names[0] == "settings" else filled(_written(names[0])))
    hint = nearest(topic, TOPICS) or "`gymdata docs` lists them with a line each"
    if topic.upper() in CODES:
        hint = f"gymdata validate --explain {topic.upper()}"
    elif topic in COMMANDS:
        hint = f"gymdata {topic} --help"
    raise UsageError.bad_value("topic", topic, f"one of {len(TOPICS)} topics", hint)


def pages() -> list[Page]:
    """Every topic, for lists: of the page of settings its head alone, without loading the classes."""
    return [_page(name, _SETTINGS_HEAD if name == "settings" else _written(name)) for name in TOPICS]


def settings_page() -> str:
    """The page of every setting of every command, in Markdown."""
    lines = [_SETTINGS_HEAD]
    for command, (kind, flags) in configurable().items():
        lines.append(f"## {command}\n")
        for name, field in kind.model_fields.items():
            flag = "`--set`" if name in kind.key_only else f"`{flags[name]}`" if name in flags else "an argument"
            choices = ", ".join(f"`{choice}`" for choice in _choices_of(field.annotation))
            lines.append(f"- `{name}` ({flag}{f': {choices}' if choices else ''}). {described(field)}")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def configurable() -> dict[str, tuple[type[Any], Any]]:
    """Command → (settings, their flags), for the commands with a ``--config`` file of settings."""
    from .main import COMMANDS, body_of

    by_command = {name: getattr(body_of(name), "settings", None) for name in COMMANDS}
    return {name: settings for name, settings in by_command.items() if settings is not None}


def config_schema(command: str) -> dict[str, Any]:
    """The JSON Schema of a command's ``--config`` file. Raises UsageError for a command that has none."""
    if command == "finetune":
        from gymdata.commands.finetune.json_schema import schema

        return schema()
    from gymdata.settings import DIALECT

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


def _skill() -> str:
    """A SKILL.md: when to use gymdata, its commands with an example of each, the rules that all share, and the topics."""
    import json

    from .main import GROUPS

    about = f"---\nname: gymdata\ndescription: {json.dumps(f'{_SUMMARY} {_USE}')}\n---\n\n# gymdata\n\n{_SUMMARY}\n"
    lines = [about, f"## Rules\n\n{_RULES}\n", "## Commands\n"]
    lines.append(
        "`gymdata COMMAND --help` has every flag. `runs/x` is a run folder that `collect` or `import` wrote.\n"
    )
    for group, commands in GROUPS.items():
        lines.append(f"### {group}\n")
        for name, (_, _, summary) in commands.items():
            example = EXAMPLES[name][0].replace("\n", "\n  ")
            lines.append(f"- `{name}`: {summary}\n\n  ```bash\n  {example}\n  ```")
        lines.append("")
    lines.append("## Topics\n\n`gymdata docs TOPIC` prints one.\n")
    return "\n".join([*lines, *(f"- `{page.name}`: {page.summary}" for page in pages())]) + "\n"


def _llms() -> str:
    """An llms.txt: one line for each topic, with its file in the repository."""
    head = "`gymdata docs TOPIC` prints a topic, `gymdata docs --skill` a SKILL.md."
    lines = [f"# gymdata\n\n> {_SUMMARY}\n\n{head}\n\n## Topics\n"]
    for page in pages():
        # The page of settings is made from their classes: there is no file of it.
        linked = page.title if page.name == "settings" else f"[{page.title}](gymdata/docs/{page.name}.md)"
        lines.append(f"- {linked}: {page.summary}")
    return "\n".join(lines) + "\n"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _written(name: str) -> str:
    return files("gymdata").joinpath("docs", f"{name}.md").read_text(encoding="utf-8")


def _page(name: str, source: str) -> Page:
    # Comments are notes to the tests that run the blocks.
    text = re.sub(r"^<!--.*?-->\n", "", source, flags=re.MULTILINE | re.DOTALL)
    title, summary = text.split("\n\n")[:2]
    return Page(name, title.removeprefix("# "), " ".join(summary.split()), text)


def _choices_of(hint: object) -> tuple[str, ...]:
    """The words that a setting may be."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return next((choices for part in typing.get_args(hint) if (choices := _choices_of(part))), ())
