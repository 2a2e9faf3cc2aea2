"""Help texts in the field's words."""

from __future__ import annotations

import re

import pytest

from gymdata.cli.main import COMMANDS
from tests.cli.parsers import help_of

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


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_is_in_the_field_s_words(command: str) -> None:
    """A rate is "per token", never "a token"; no word of the project's old dialect; a default reads "(default: 1024)"; no
    title has more than twenty options, for a list that fills a screen has no order that a reader sees."""
    text = " ".join(help_of(command).split())
    assert "--help" in text
    assert "Stands for" not in text
    text += COMMANDS[command][2]
    assert [match[0] for match in RATE.finditer(text)] == []
    assert [match[0] for match in DIALECT.finditer(text)] == []
    assert re.findall(r".{20}\bdefault \d\S*|.{20}\(default\)", text) == []
    sections = re.split(r"^[\w ]+:$", help_of(command), flags=re.MULTILINE)
    assert max(len(re.findall(r"^  -", section, re.MULTILINE)) for section in sections) <= 20


@pytest.mark.parametrize(
    ("command", "titles"),
    [
        ("finetune", ["Configuration", "Tasks", "Server", "Output"]),
        ("score", ["Rewards", "Requests", "Scores"]),
        ("audit", ["Model", "Comparison", "Forward pass"]),
        ("pairs", ["Preferences", "Pairs", "Rollouts"]),
        ("filter", ["Selection", "Split"]),
        ("collect", ["Tasks", "Model", "Sampling", "Environment", "Agent", "Reward", "Output", "Failures"]),
        *((command, ["Model", "Training"]) for command in COMMANDS if command.startswith("train-")),
    ],
)
def test_a_long_help_is_in_groups(command: str, titles: list[str]) -> None:
    """Each option stands under what it is about; those of every command come last."""
    found = re.findall(r"^([\w ]+):$", help_of(command), re.MULTILINE)
    assert found == ["Arguments", *titles, "Options", "Examples"]


def test_the_patterns_find_what_they_name() -> None:
    """Both patterns match the phrases that they are for, and not their replacements."""
    assert RATE.search("Rollouts a task (default 1).")
    assert RATE.search("Keep the K best alternatives a token.")
    assert not RATE.search("Rollouts per task (default: 1).")
    assert DIALECT.search("(default: told from it)")
    assert not DIALECT.search("(default: auto-detect)")
