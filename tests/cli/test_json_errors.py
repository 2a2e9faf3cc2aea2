"""With ``--json`` an error is one JSON object on stdout, whatever refused the command; the exit code stays."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from gymdata.cli.main import COMMANDS, main
from tests.rollout_files import rollout, two_turns, write_run

Capture = pytest.CaptureFixture[str]
PARTS = {"kind", "code", "message", "where", "got", "expected", "hint", "exit_code"}


def error_of(words: list[str], capsys: Capture) -> dict[str, Any]:
    """What ``words --json`` prints on stdout, which is one error whose exit code is the command's."""
    code = main([*words, "--json"])
    said = capsys.readouterr()
    (error,) = json.loads(said.out).values()
    assert set(error) >= PARTS
    assert error["exit_code"] == code
    assert said.err.strip(), "people who watch the log read it as well"
    return dict(error)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_flag_is_json_in_every_command(command: str, capsys: Capture) -> None:
    """What the parser itself refuses: a usage error with exit code 2."""
    error = error_of([command, "--zork"], capsys)
    assert (error["kind"], error["exit_code"], error["where"]) == ("usage", 2, "--zork")
    assert error["hint"].endswith(f"gymdata {command} --help")


def test_a_missing_argument_and_an_unknown_command(capsys: Capture) -> None:
    """The parser's other refusals."""
    error = error_of(["pairs"], capsys)
    assert "Missing argument" in error["message"]
    assert error["hint"] == "gymdata pairs runs/x; options: gymdata pairs --help"
    assert "'collect'" in error_of(["collec"], capsys)["message"]


def test_a_value_of_a_flag_is_in_its_parts(capsys: Capture) -> None:
    """where, got and expected are fields of their own, so that a program need not read the message."""
    error = error_of(["collect", "t.jsonl", "-r", "zero"], capsys)
    assert (error["where"], error["got"]) == ("-r / --num-rollouts", "zero")
    assert error["expected"] == "a valid integer"
    error = error_of(["pairs", "run", "--strategy", "al"], capsys)
    assert (error["where"], error["got"]) == ("--strategy", "al")
    assert error["hint"] == "did you mean 'all'?"
    error = error_of(["validate", "run", "--fix", "spli"], capsys)
    assert error["expected"] == "one of split, truncate, drop"


def test_several_faults_are_a_list(capsys: Capture) -> None:
    """Everything that is wrong with a configuration is there, one object for each."""
    error = error_of(["collect", "t.jsonl", "-r", "0", "--temperature", "-1"], capsys)
    assert [fault["where"] for fault in error["faults"]] == ["-r / --num-rollouts", "--temperature"]


@pytest.mark.parametrize(
    "words",
    [
        ["validate", "PATH"],
        ["query", "SELECT 1", "PATH"],
        ["import", "PATH", "-o", "OUT"],
        ["collect", "PATH", "-m", "m"],
    ],
    ids=lambda words: words[0],
)
def test_a_path_that_is_not_there_is_json(words: list[str], tmp_path: Path, capsys: Capture) -> None:
    """Data that cannot be found: exit code 2, and the path is in the message."""
    given = [word.replace("PATH", str(tmp_path / "no")).replace("OUT", str(tmp_path / "out")) for word in words]
    error = error_of(given, capsys)
    assert error["exit_code"] == 2
    assert str(tmp_path / "no") in error["message"]


def test_a_settings_file_that_is_not_there_has_its_parts(tmp_path: Path, capsys: Capture) -> None:
    """As of any other path, its neighbor of nearly the same name included."""
    (tmp_path / "run.yaml").write_text("a: 1")
    error = error_of(["finetune", str(tmp_path / "runn.yaml")], capsys)
    assert (error["where"], error["got"], error["expected"]) == (str(tmp_path / "runn.yaml"), "nothing", "a YAML file")
    assert error["hint"] == "did you mean 'run.yaml'?"


def test_settings_that_do_not_go_together_expect_nothing_in_particular(capsys: Capture) -> None:
    """The sentence that says why they are refused is the message, not the value that was expected."""
    error = error_of(["score", "run"], capsys)
    assert "no reward given" in error["message"]
    assert error["expected"] is None


def test_faults_of_the_system_are_json(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in place of a folder, a defect and an interruption keep their exit codes."""
    run = write_run(tmp_path / "run", [rollout("t", k, float(k), two_turns(4, 20 + k)) for k in range(2)])
    (tmp_path / "file").write_text("in the way")
    error = error_of(["pairs", str(run), "-o", str(tmp_path / "file" / "pairs")], capsys)
    assert (error["exit_code"], str(tmp_path / "file") in error["message"]) == (2, True)
    for raised, code in ((RuntimeError("odd"), 3), (KeyboardInterrupt(), 130), (MemoryError(), 3)):

        def fail(*_: object, raised: BaseException = raised, **__: object) -> None:
            raise raised

        monkeypatch.setattr(importlib.import_module("gymdata.commands.query.statement"), "run_statement", fail)
        assert error_of(["query", "SELECT 1", str(run)], capsys)["exit_code"] == code


def test_without_json_nothing_is_on_stdout(capsys: Capture) -> None:
    """Errors are for people then."""
    assert main(["pairs", "nowhere"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: nowhere: no such file")
