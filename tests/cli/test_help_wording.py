"""Help texts in the field's words."""

from __future__ import annotations

import re

import pytest

from gymdata.cli.main import COMMANDS, main

#: "Rollouts a task" for "rollouts per task", "seconds a request": a number of things followed by a unit.
RATE = re.compile(
    r"\b(rollouts?|tokens?|calls?|turns?|judgements?|seconds?|rows?|bytes|alternatives|attempts|lines?|steps?|pairs?|logprobs)"
    r" an? (token|rollout|turn|task|epoch|group|request|batch|comparison|training|stage|file|second|step|row)\b",
    re.IGNORECASE,
)
DIALECT = re.compile(
    r"\b(told|said|says?|asked?|anew|owed|goes on|go on|gives? back|is none|so many|drawn|seats?|log-prob\w*)\b",
    re.IGNORECASE,
)


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words, "--help"]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_states_rates_with_per(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A rate is "per token", never "a token"."""
    assert [match[0] for match in RATE.finditer(help_of(capsys, command))] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_uses_standard_verbs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No help text has a word of the project's old dialect."""
    assert [match[0] for match in DIALECT.finditer(help_of(capsys, command))] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_defaults_are_in_brackets_with_a_colon(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A default reads "(default: 1024)", in every command."""
    assert re.findall(r".{20}\bdefault \d\S*|.{20}\(default\)", help_of(capsys, command)) == []


def test_the_list_of_commands_uses_standard_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor has the list of commands."""
    assert [match[0] for match in DIALECT.finditer(help_of(capsys))] == []


def test_the_patterns_find_what_they_name() -> None:
    """Both patterns match the phrases that they are for, and not their replacements."""
    assert RATE.search("Rollouts a task (default 1).")
    assert RATE.search("Keep the K best alternatives a token.")
    assert not RATE.search("Rollouts per task (default: 1).")
    assert DIALECT.search("(default: told from it)")
    assert not DIALECT.search("(default: auto-detect)")
