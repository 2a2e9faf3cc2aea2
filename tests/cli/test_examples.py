"""The examples in the help of every command: shown whole at 80 columns, parsed, and run where no engine is needed."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from gymdata.cli.examples import EXAMPLES
from gymdata.cli.main import COMMANDS, main, parsed
from tests.cli.parsers import help_of
from tests.docs_blocks import forked, prepare, stand_in
from tests.forks import TRAINING, forks

LINES = [(command, line) for command, lines in EXAMPLES.items() for line in lines]
#: What needs a server, torch or a folder that another example makes with torch; those with a dry run are tried with it.
HEAVY = {"collect", "eval", "sweep", "check", "audit", "judge", "serve-genrm", "finetune", "demo"}
HEAVY |= {name for name in COMMANDS if name.startswith("train-")}


def words_of(line: str) -> list[str]:
    return shlex.split(line.replace("\\\n", " "))[1:]


def serves(line: str) -> bool:
    return "--endpoint" in line or (
        line.startswith(("gymdata serve", "gymdata record", "gymdata view")) and "--export" not in line
    )


def run(lines: list[list[str]]) -> None:
    for words in lines:
        assert main(words) == 0, " ".join(words)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the sample data, and the run ``runs/x``, with a copy."""
    prepare(tmp_path)
    stand_in(tmp_path)
    shutil.copytree(tmp_path / "runs" / "x", tmp_path / "runs" / "y")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_has_an_example() -> None:
    """In the order of the commands, each of that command."""
    assert list(EXAMPLES) == list(COMMANDS)
    assert [line for command, line in LINES if words_of(line)[0] != command] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_shows_the_examples_whole_at_80_columns(command: str) -> None:
    """They stand at the end, no line is folded or cut, and each can be copied as it is."""
    shown = help_of(command).partition("Examples:\n")[2]
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert "\n".join(line.removeprefix("  ") for line in shown.splitlines()) == "\n".join(EXAMPLES[command])


@pytest.mark.parametrize(("command", "line"), LINES, ids=[line[:60] for _, line in LINES])
def test_the_parser_takes_every_example(command: str, line: str) -> None:
    """Flags exist, values have the right type, and nothing required is missing."""
    parsed(command, words_of(line)[1:])


def test_the_light_examples_run(folder: Path) -> None:
    """What needs neither engine nor torch runs on the shipped data, in order, in one folder."""
    run([words_of(line) for command, line in LINES if command not in HEAVY and not serves(line)])
    made = ["x/pairs-numeric/pairs.parquet", "good", "gym/run.json", "x.html", "turns.csv", "messages.jsonl"]
    assert [name for name in made if not (folder / "runs" / name).exists()] == []


@pytest.mark.full
@pytest.mark.torch
def test_the_other_examples_pass_their_dry_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models, data and settings of collect, of every training and of demo are accepted, and nothing is written."""
    pytest.importorskip("trl")
    pytest.importorskip("vllm")
    run([["pairs", "runs/x"], ["experience", "runs/x"], ["experience", "runs/x", "--estimator", "gae"]])
    before = sorted(folder.rglob("*"))
    # The run that is here was imported: collect would refuse to resume it.
    fresh = [(command, line.replace("runs/x", "runs/new") if command == "collect" else line) for command, line in LINES]
    tried = [words_of(line) for command, line in fresh if command in HEAVY and not serves(line)]
    dry = [
        [*words, "--dry-run"]
        for words in tried
        if words[0] in ("collect", "eval", "demo") or words[0].startswith("train-")
    ]
    assert len(dry) == 10
    run([words for words in dry if not words[0].startswith("train-")])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    with forks(*TRAINING) as processes:
        for words in dry:
            if words[0].startswith("train-"):
                done = forked(processes)(shlex.join(["gymdata", *words]), folder)
                assert done.returncode == 0, f"{words}\n{done.stdout}"
    assert sorted(folder.rglob("*")) == before


@pytest.mark.torch
def test_the_example_of_check_runs(folder: Path) -> None:
    """The shipped policy's template is fine."""
    pytest.importorskip("transformers")
    run([["check", "sample_data/policy"]])
