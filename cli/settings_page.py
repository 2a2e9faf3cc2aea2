"""What is made from the settings classes: the page of every setting of every command, and the JSON Schemas of ``--config``
files."""

from __future__ import annotations

import importlib
import typing
from typing import Any

from gymdata.errors import UsageError

HEAD = """# Settings

Every setting of every command: its key in `--config` files, in `--set KEY=VALUE` and in Python, its flag, and its default.

`--set` beats flags, which beat the file. A setting whose flag is `--set` has none of its own. `gymdata COMMAND --help` shows
flags that are no settings as well; [Finetune](finetune.md) has a file of its own.
"""


def settings_page() -> str:
    """The whole page in Markdown."""
    from .flags import described

    lines = [HEAD]
    for command, (kind, called) in configurable().items():
        lines.append(f"## {command}\n")
        for name, field in kind.model_fields.items():
            flag = "`--set`" if name in kind.key_only else f"`{called[name]}`" if name in called else "an argument"
            choices = ", ".join(f"`{choice}`" for choice in _choices_of(field.annotation))
            lines.append(f"- `{name}` ({flag}{f': {choices}' if choices else ''}). {described(field)}")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def configurable() -> dict[str, tuple[type[Any], Any]]:
    """Command → (settings, their flags), for the commands with a ``--config`` file of settings."""
    from .main import COMMANDS

    bodies = {name: importlib.import_module(f"gymdata.cli.{m}") for name, (m, _, _) in COMMANDS.items()}
    by_command = {name: getattr(getattr(bodies[name], COMMANDS[name][1]), "settings", None) for name in COMMANDS}
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


def _choices_of(hint: object) -> tuple[str, ...]:
    """The words that a setting may be."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return next((choices for part in typing.get_args(hint) if (choices := _choices_of(part))), ())
