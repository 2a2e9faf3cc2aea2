"""What the README says exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gymdata.cli.main import COMMANDS, main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    """Every `$ gymdata …` line of the README's console blocks, continuation lines joined."""
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", " ")
    quoted = re.findall(r'^\$ gymdata ((?:[^"\n]|"[^"]*")*)', text, re.MULTILINE)
    return [shlex.split(line.split(" | ")[0]) for line in quoted]


def test_every_command_is_in_the_readme():
    """A command that the README does not name is not documented."""
    assert not [name for name in COMMANDS if f"`{name}`" not in README]


@pytest.mark.parametrize("command", commands(), ids=lambda c: " ".join(c)[:40])
def test_the_readmes_commands_exist_with_their_flags(command: list[str], capsys: pytest.CaptureFixture[str]):
    """Each shown command is known, and every long flag that it uses is in its help."""
    assert main([command[0], "--help"]) == 0
    shown = capsys.readouterr().out
    assert not [word for word in command if word.startswith("--") and word.split("=")[0] not in shown]


@pytest.mark.parametrize("path", sorted(set(re.findall(r"sample_data/[\w./-]+", README))))
def test_the_readmes_files_are_there(path: str):
    """Every file of sample_data that the README names exists."""
    assert (ROOT / path.rstrip(".")).exists()
