"""Options that are given more than once."""

from __future__ import annotations

import pytest

from gymdata.cli.main import main, parsed
from gymdata.commands.pairs.settings import PairsConfig

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--seed", "1", "--seed", "2"], "seed", 2),
        (["-c", "1", "--concurrency", "2"], "concurrency", 2),
        (["--keep-reasoning", "--no-keep-reasoning"], "keep_reasoning", False),
        (["--json", "--json"], "json", True),
        (["--reward", "a", "--reward", "b"], "reward", ["a", "b"]),
    ],
)
def test_the_last_one_wins_and_lists_stay_lists(words: list[str], name: str, value: object) -> None:
    """As in every other program; under any of its names, and on and off."""
    assert parsed("collect", words)[name] == value


def test_the_last_value_of_a_key_wins() -> None:
    """Of ``--set``, whose values are read as those of a file."""
    assert PairsConfig.load(sets=["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize("command", ["collect", "train-dpo", "judge"])
def test_an_unknown_option_is_answered_with_the_way_to_give_a_setting(command: str, capsys: Capture) -> None:
    """Most settings of engines and trainers have no option of their own."""
    assert main([command, "x", "--learning-rate", "1e-5"]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "No such option: --learning-rate" in shown
    assert f"a setting without an option is given as --set KEY=VALUE; options: gymdata {command} --help" in shown
