"""Options that are made of settings: text, choices and defaults are those of the field; a typo is answered alike."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import get_args

import pytest

import gymdata
from gymdata.cli.docs import configurable
from gymdata.cli.flags import described
from gymdata.cli.main import COMMANDS, GROUPS, main
from gymdata.commands.demo.run import DemoConfig
from gymdata.commands.finetune.settings import FinetuneFlags
from gymdata.commands.import_export.settings import ExportConfig, ImportConfig
from gymdata.commands.train.settings import TRAINERS
from gymdata.commands.validate.settings import ValidateConfig
from gymdata.formats import exported, imported
from gymdata.settings import Config
from tests.cli.parsers import flags_of, help_of, parser_of

Capture = pytest.CaptureFixture[str]
SETTINGS = {command: kind for command, (kind, _) in configurable().items()} | {"finetune": FinetuneFlags}


@pytest.mark.parametrize("command", SETTINGS)
def test_every_setting_has_one_description_which_its_flag_shows(command: str) -> None:
    """Fields have texts; each is an argument, a key of --set only, or a flag whose help begins with that text."""
    kind, there = SETTINGS[command], {param.name: param for param in parser_of(command).params}
    assert [name for name, field in kind.model_fields.items() if not field.description] == []
    assert kind.key_only - set(kind.model_fields) == set() or issubclass(kind, tuple(TRAINERS.values()))
    for name, field in kind.model_fields.items():
        if name in kind.key_only:
            assert name not in there
        else:
            assert there[name].help.startswith(described(field))


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_of_several_commands_means_the_same(command: str) -> None:
    """--json, --verbose, --overwrite, --dry-run, --config, --set and --allow-changed have one text and one form."""
    shared = {"json", "verbose", "overwrite", "dry_run", "config", "set_", "allow_changed"}
    texts = {
        (param.name, tuple(param.opts), param.help)
        for name in ("collect", "pairs")
        for param in parser_of(name).params
        if param.name in shared
    }
    own = {
        (p.name, tuple(p.opts), p.help) for p in parser_of(command).params if p.name in shared and command != "finetune"
    }
    assert own - texts == set()
    assert any(param.name == "verbose" for param in parser_of(command).params)


@pytest.mark.parametrize(
    ("words", "flag", "got", "near"),
    [
        (["pairs", "run", "--strategy", "best-wrst"], "--strategy", "best-wrst", "best-worst"),
        (["export", "run", "-o", "x.jsonl", "--format", "varl"], "--format", "varl", "verl"),
        (["validate", "run", "--fix", "splitt"], "--fix", "splitt", "split"),
    ],
)
def test_a_misspelt_choice_names_the_flag_and_the_nearest(
    words: list[str], flag: str, got: str, near: str, capsys: Capture
) -> None:
    """Exit code 2, with what was got, what may be given, and what was probably meant."""
    assert main(words) == 2
    said = capsys.readouterr().err
    assert re.search(rf"error: {flag}: got '{got}', expected one of .*\b{near}\b", said)
    assert f"did you mean '{near}'?" in said


def test_choices_are_shown_in_the_help() -> None:
    """A short list stands beside the flag; a long one in the text."""
    assert "--truncated <keep|drop>" in help_of("pairs")
    said = " ".join(help_of("export").split())
    assert "--format FORMAT" in said
    assert "trl-messages" in said


def test_a_choice_that_is_left_out_is_named_with_its_values(capsys: Capture) -> None:
    """The hint for a setting without a default has what it may be."""
    assert main(["export", "run", "-o", "x.jsonl"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "format is missing → give --format, one of atif, input-ids-labels, nat-dpo," in said


def test_a_wrong_number_names_the_flag_or_the_key(capsys: Capture) -> None:
    """A flag is called as it was typed; a key of --set as it stands there, whether it is out of range or no number."""
    assert main(["collect", "t.jsonl", "-r", "zero"]) == 2
    assert capsys.readouterr().err.startswith("error: -r / --num-rollouts: got 'zero', expected a valid integer\n")
    assert main(["collect", "t.jsonl", "-m", "model", "--set", "num_rollouts=zero"]) == 2
    assert "num_rollouts: got 'zero', expected a valid integer\n" in capsys.readouterr().err
    assert main(["collect", "t.jsonl", "--temperature", "-1"]) == 2
    assert "error: --temperature: got -1.0, expected" in capsys.readouterr().err
    assert main(["collect", "t.jsonl", "-n", "0"]) == 2
    assert "error: -n / --limit: got 0, expected" in capsys.readouterr().err
    assert main(["collect", "t.jsonl", "--set", "temperature=-1"]) == 2
    assert "error: --set temperature: got -1, expected" in capsys.readouterr().err


def test_a_list_that_is_not_given_leaves_the_file_alone(tmp_path: Path, capsys: Capture) -> None:
    """Rewards of a --config file are used when there is no --reward."""
    file = tmp_path / "c.yaml"
    file.write_text("reward: [numerik]\n")
    tasks = tmp_path / "t.jsonl"
    tasks.write_text('{"prompt": "a"}\n')
    policy = Path(__file__).parents[2] / "sample_data" / "policy"
    assert main(["collect", str(tasks), "-m", str(policy), "--config", str(file), "--dry-run"]) == 2
    assert "did you mean 'numeric'?" in capsys.readouterr().err


def test_check_takes_its_model_by_place_or_by_flag(tmp_path: Path, capsys: Capture) -> None:
    """``check MODEL``, ``check -m MODEL``; both are a contradiction."""
    for words in (["nowhere"], ["-m", "nowhere"], ["--model", "nowhere"]):
        assert main(["check", *words]) == 2
        assert "nowhere: no such folder" in capsys.readouterr().err
    assert main(["check", "a", "-m", "b"]) == 2
    assert "given twice: a and b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        ("validate", ValidateConfig),
        ("import_rollouts", ImportConfig),
        ("demo", DemoConfig),
        ("finetune", FinetuneFlags),
    ],
)
def test_a_function_takes_the_settings_of_its_command(function: str, kind: type[Config]) -> None:
    """Each setting is a keyword of the public function, with the same default."""
    keywords = inspect.signature(getattr(gymdata, function)).parameters
    for name, field in kind.model_fields.items():
        default = field.get_default(call_default_factory=True)
        assert (keywords[name].default or None) == (default or None), name


def test_formats_are_those_that_exist() -> None:
    """The choices of import and export are the formats that are implemented."""
    assert sorted(get_args(ExportConfig.model_fields["format"].annotation)) == sorted(exported())
    source, _ = get_args(ImportConfig.model_fields["source"].annotation)
    assert sorted(get_args(source)) == sorted(imported())


def test_every_command_is_in_one_group_of_the_help(capsys: Capture) -> None:
    """`gymdata --help` lists commands by what they are for, each once."""
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line[:-1] in GROUPS] == [f"{group}:" for group in GROUPS]
    assert [name for name in COMMANDS if len(re.findall(rf"^  {name}  ", said, re.MULTILINE)) != 1] == []
    assert sum(map(len, GROUPS.values())) == len(COMMANDS)


def test_help_and_version_have_short_ways(capsys: Capture) -> None:
    """`gymdata help pairs` is `gymdata pairs --help`, `gymdata help` the list, `-V` the version."""
    assert main(["pairs", "--help"]) == 0
    long = capsys.readouterr().out
    assert main(["help", "pairs"]) == 0
    assert capsys.readouterr().out == long
    assert main(["help"]) == 0
    assert "Exchange:" in capsys.readouterr().out
    assert main(["-V"]) == 0
    assert capsys.readouterr().out == f"gymdata {gymdata.__version__}\n"
    assert main(["help", "pears"]) == 2
    assert "'pairs'" in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_the_terminal(width: int, command: str) -> None:
    """No line is wider than the terminal, no name or text is cut, and the summary of the list begins the help."""
    lines = help_of(command, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert "..." not in " ".join(lines)
    assert [name for name in flags_of(command) if name.startswith("-") and name not in "\n".join(lines)] == []
    assert lines[2].strip() == COMMANDS[command][2]
