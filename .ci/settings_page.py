"""Writes gymdata/docs/settings.md: every setting of every command, from the settings classes.

``python .ci/settings_page.py --write``; without it the text is printed.
"""

from __future__ import annotations

import importlib
import sys
import typing
from pathlib import Path

from gymdata.cli.flags import described
from gymdata.cli.main import COMMANDS

PAGE = Path(__file__).parent.parent / "gymdata" / "docs" / "settings.md"
HEAD = """# Settings

Every setting of every command: its key in `--config` files, in `--set KEY=VALUE` and in Python, its flag, and its default.

`--set` beats flags, which beat the file. A setting whose flag is `--set` has none of its own. `gymdata COMMAND --help` shows
flags that are no settings as well; [Finetune](finetune.md) has a file of its own.
"""


def page() -> str:
    """The whole page in Markdown."""
    lines = [HEAD]
    for command, (module, function, _) in COMMANDS.items():
        body = getattr(importlib.import_module(f"gymdata.cli.{module}"), function)
        if (made := getattr(body, "settings", None)) is None:
            continue
        kind, called = made
        lines.append(f"## {command}\n")
        for name, field in kind.model_fields.items():
            flag = "`--set`" if name in kind.key_only else f"`{called[name]}`" if name in called else "an argument"
            choices = ", ".join(f"`{choice}`" for choice in choices_of(field.annotation))
            lines.append(f"- `{name}` ({flag}{f': {choices}' if choices else ''}). {described(field)}")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def choices_of(hint: object) -> tuple[str, ...]:
    """The words that a setting may be."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return next((found for part in typing.get_args(hint) if (found := choices_of(part))), ())


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")  # noqa: T201 - what it is for
