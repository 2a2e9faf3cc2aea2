"""The flags of every command are a contract: names, short names, and whether one takes a value, several or none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gymdata.cli.main import COMMANDS
from tests.cli.parsers import parser_of

#: One line per flag: command, names (off after a slash), kind, and the default that the help shows.
CONTRACT = Path(__file__).with_name("flags.txt").read_text().splitlines()


def flags_of(command: str) -> list[str]:
    """The lines of ``CONTRACT`` that this command's parser gives."""
    lines = []
    for param in parser_of(command).params:
        if param.param_type_name == "option":
            names = " ".join(param.opts) + "".join(f" / {name}" for name in param.secondary_opts)
            kind = "switch" if param.is_flag else "list" if param.multiple else "value"
            shown = re.search(r"\(default: (.*?)\)", param.help or "")
            zero = param.default == 0 and not param.is_flag
            default = param.default if param.default or zero else (shown[1].replace("\n", " ") if shown else None)
            lines.append(f"{command}: {names}: {kind}: {default}")
    return sorted(lines)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_flags_of_a_command_are_those_of_the_contract(command: str) -> None:
    """A flag that is renamed, dropped, or given another kind or default breaks scripts; one that is added needs no line."""
    assert {line for line in CONTRACT if line.startswith(f"{command}: ")} - set(flags_of(command)) == set()


def test_the_contract_names_no_other_commands() -> None:
    """Every line belongs to a command that exists."""
    assert {line.partition(":")[0] for line in CONTRACT} <= set(COMMANDS)
