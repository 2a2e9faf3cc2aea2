"""Writes what is made from the settings classes: gymdata/docs/settings.md, every setting of every command, and
schemas/config/COMMAND.json, the JSON Schemas of ``--config`` files.

``python .ci/settings_page.py --write``; without it the text is printed.
"""

from __future__ import annotations

import json
import sys
import typing
from pathlib import Path

from gymdata.cli.flags import described
from gymdata.cli.for_programs import config_schema, configurable

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "gymdata" / "docs" / "settings.md"
HEAD = """# Settings

Every setting of every command: its key in `--config` files, in `--set KEY=VALUE` and in Python, its flag, and its default.

`--set` beats flags, which beat the file. A setting whose flag is `--set` has none of its own. `gymdata COMMAND --help` shows
flags that are no settings as well; [Finetune](finetune.md) has a file of its own.
"""


def page() -> str:
    """The whole page in Markdown."""
    lines = [HEAD]
    for command, (kind, called) in configurable().items():
        lines.append(f"## {command}\n")
        for name, field in kind.model_fields.items():
            flag = "`--set`" if name in kind.key_only else f"`{called[name]}`" if name in called else "an argument"
            choices = ", ".join(f"`{choice}`" for choice in choices_of(field.annotation))
            lines.append(f"- `{name}` ({flag}{f': {choices}' if choices else ''}). {described(field)}")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def files() -> dict[Path, str]:
    """Every file that this writes."""
    schemas = {
        ROOT / "schemas" / "config" / f"{command}.json": json.dumps(config_schema(command), indent=1) + "\n"
        for command in configurable()
    }
    return {PAGE: page(), **schemas}


def choices_of(hint: object) -> tuple[str, ...]:
    """The words that a setting may be."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return next((found for part in typing.get_args(hint) if (found := choices_of(part))), ())


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        for file, text in files().items():
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
    else:
        print(page(), end="")  # noqa: T201 - what it is for
