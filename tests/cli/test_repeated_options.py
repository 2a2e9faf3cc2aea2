"""Options that take one value, given more than once."""

from __future__ import annotations

import pytest

from gymdata.cli.main import COMMANDS, main
from tests.cli.parsers import parser_of

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_of_one_value_given_twice_is_refused(command: str, capsys: Capture) -> None:
    """Each such option of each command exits 2 when repeated, under any of its names, and both values are named."""
    options = [param for param in parser_of(command).params if param.param_type_name == "option"]
    single = [option for option in options if not option.is_flag and not option.multiple]
    assert single or command in ("docs", "doctor", "ls")
    for option in single:
        for first, second in ((option.opts[0], option.opts[-1]), (option.opts[-1], option.opts[0])):
            # What follows --ray is its value only where it is an address.
            one, two = ("a:1", "b:2") if "--ray" in option.opts else ("1", "2")
            assert main([command, first, one, second, two]) == 2, option.opts
            assert f"{option.opts[-1]}: given twice: {one} and {two}" in capsys.readouterr().err


def test_three_values_are_all_named(capsys: Capture) -> None:
    """The message counts and lists them; what a URL may keep secret is left out."""
    urls = ["http://u:pw@a/v1", "http://b/v1?key=pw", "http://c"]
    assert main(["check", *(word for url in urls for word in ("--endpoint", url))]) == 2
    said = capsys.readouterr().err
    assert "--endpoint: given 3 times: http://***@a/v1, http://b/v1?key=*** and http://c" in said
    assert "pw" not in said


def test_on_and_off_exclude_each_other(capsys: Capture) -> None:
    """A flag given both ways is refused; the same flag twice means what it means once."""
    assert main(["collect", "--keep-reasoning", "--no-keep-reasoning"]) == 2
    assert "given twice: --keep-reasoning and --no-keep-reasoning" in capsys.readouterr().err
    assert main(["collect", "--json", "--json", "--help"]) == 0


def test_lists_stay_lists(capsys: Capture) -> None:
    """An option that is a list may be repeated; the help of a command is shown whatever else is given."""
    assert main(["collect", "--reward", "nothing-like-it", "--reward", "exact_match", "--dry-run"]) == 2
    assert "given twice" not in capsys.readouterr().err
    assert main(["collect", "--seed", "1", "--seed", "2", "--help"]) == 0


@pytest.mark.parametrize(
    "sets", [("temperature=0.5", "temperature=1"), ("engine.max_model_len=64", "engine.max_model_len=128")]
)
def test_a_key_set_twice_is_refused(sets: tuple[str, str], capsys: Capture) -> None:
    """``--set KEY=1 --set KEY=2`` would take the last in silence."""
    words = [word for text in sets for word in ("--set", text)]
    assert main(["collect", "t.jsonl", *words]) == 2
    key, first = sets[0].split("=")
    assert f"--set {key}: given twice: {first} and {sets[1].split('=')[1]}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["collect", "pairs"])
def test_a_second_setting_after_set_is_answered_with_the_words_to_type(command: str, capsys: Capture) -> None:
    """Also by commands that take several paths, where it would be one; a file of that name is a path."""
    assert main([command, "t.jsonl", "--set", "seed=1", "a.b=x y"]) == 2
    assert "repeat --set: --set seed=1 --set 'a.b=x y'" in capsys.readouterr().err
