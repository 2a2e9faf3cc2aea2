"""Messages and hints name only flags that can be given."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import gymdata
from gymdata.cli.docs import configurable
from gymdata.cli.main import COMMANDS, main
from gymdata.errors import COMMAND_LINE, DataError, UsageError, option, with_options
from tests.cli.parsers import flags_of

ROOT = Path(__file__).parents[2]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9]")
SETTINGS = {command: kind for command, (kind, _) in configurable().items()}
#: Flags of other programs, which messages name or which are passed on to them.
OTHERS = {
    "pip install": {"--no-deps"},
    "accelerate launch": {"--num_processes"},
    "nvidia-smi": {"--format", "--query-gpu"},
    "vllm serve": {
        "--enable-auto-tool-choice", "--tool-call-parser",
        "--max-logprobs", "--logprobs-mode", "--max-model-len", "--enable-lora", "--no",
    },
    "slime, miles": {"--save-debug-rollout-data"},
    "codex, claude, qwen": {
        "--skip-git-repo-check", "--allowed", "--auth-type", "--openai-api-key",
        "--openai-base-url", "--yolo",
    },
}  # fmt: skip


@cache
def sources() -> list[tuple[str, list[ast.AST]]]:
    """The files of gymdata/ and cli/, each with all nodes of its syntax tree."""
    files = sorted([*(ROOT / "gymdata").rglob("*.py"), *(ROOT / "cli").glob("*.py")])
    return [(str(file.relative_to(ROOT)), [*ast.walk(ast.parse(file.read_text()))]) for file in files]


@cache
def named(*, docstrings: bool = True) -> list[tuple[str, str]]:
    """(file:line, flag) of every flag in a string of the sources."""
    flags = []
    for file, nodes in sources():
        skipped = set[ast.AST]() if docstrings else {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
                flags += [(f"{file}:{node.lineno}", flag) for flag in FLAG.findall(node.value)]
    return flags


def test_every_flag_that_a_message_names_exists() -> None:
    """Each ``--flag`` in a string of gymdata/ and cli/ is a flag of some command, or of a program that is named here."""
    known = {"--version"}.union(*map(flags_of, COMMANDS), *OTHERS.values())
    assert [f"{where} {flag}" for where, flag in named() if flag not in known] == []


#: Rooms whose functions a Python program calls as often as the command line does.
KERNEL = ("rollouts", "checks", "tables", "store", "workers")
#: What names flags there: the pages of codes, and the advice below them.
PAGES = ("gymdata/checks/codes/", "gymdata/checks/violations.py")


def test_the_kernel_names_no_flag() -> None:
    """It writes ``option("overwrite", True)``, so that a Python program reads ``overwrite=True``."""
    inside = tuple(f"gymdata/{room}/" for room in KERNEL)
    names = [f"{where} {flag}" for where, flag in named(docstrings=False) if where.startswith(inside)]
    assert [name for name in names if not name.startswith(PAGES)] == []


def options_named() -> Iterator[tuple[str, str]]:
    """(file:line, setting) of every ``option("min_margin")``, and of every ``{min_margin}`` in an ``only_with``."""
    for file, nodes in sources():
        for node in nodes:
            called = isinstance(node, ast.Call) and ast.unparse(node.func) == "option"
            if called and isinstance(node.args[0], ast.Constant):
                yield f"{file}:{node.lineno}", node.args[0].value
    for kind in {*SETTINGS.values(), *(getattr(gymdata, name) for name in gymdata.__all__ if name.endswith("Config"))}:
        for text, _ in (*kind.only_with.values(), *kind.not_with.values()):
            yield from ((kind.__name__, name) for name in re.findall(r"\{(\w+)", text))


def test_every_setting_that_a_message_names_is_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``option`` writes on the command line can be given there."""
    monkeypatch.setenv(COMMAND_LINE, "1")
    known = {"--set"}.union(*map(flags_of, COMMANDS))
    assert [f"{where} {name}" for where, name in options_named() if option(name).split()[0] not in known] == []


def test_an_error_names_a_flag_or_a_keyword(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same refusal, from the command line and from Python; a process that the command line starts names flags too."""
    with pytest.raises(UsageError, match=r"judge: got 'x', which has no effect without source='comparisons'"):
        gymdata.pairs(tmp_path, judge="x")
    assert main(["pairs", str(tmp_path), "--judge", "x"]) == 2
    assert "--judge: got 'x', which has no effect without --from comparisons" in capsys.readouterr().err
    assert COMMAND_LINE not in os.environ
    cases = [("overwrite", True), ("thinking", False), ("split", 0.1), ("top_logprobs", None), ("engine.dtype", "half")]
    assert [option(*case) for case in cases] == [
        "overwrite=True", "thinking=False", "split=0.1", "top_logprobs=", "engine={'dtype': 'half'}"
    ]  # fmt: skip
    text = "drop {keep_duplicates:True}, or give {fix:drop}: {pairs!}"
    assert with_options(text) == "drop keep_duplicates=True, or give `gymdata.fix`: {pairs!}"
    monkeypatch.setenv(COMMAND_LINE, "1")
    assert [option(*case) for case in cases] == [
        "--overwrite", "--no-thinking", "--split 0.1", "--top-logprobs", "--set engine.dtype=half"
    ]  # fmt: skip
    assert with_options(text) == "drop --keep-duplicates, or give --fix drop: {pairs!}"


def test_flags_of_other_programs_are_still_named() -> None:
    """The list above holds no flag that no message names any more."""
    used = {flag for _, flag in named()}
    assert set().union(*OTHERS.values()) - used == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_without_arguments_names_its_own_flags(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What ``gymdata COMMAND`` alone complains of can be given as it says."""
    if command in ("demo", "docs", "doctor", "ls", "tour"):
        return  # they need no argument
    monkeypatch.chdir(tmp_path)
    assert main([command]) == 2
    said = capsys.readouterr().err
    assert set(FLAG.findall(said)) <= flags_of(command)


@pytest.mark.parametrize("command", SETTINGS)
def test_a_setting_without_a_default_says_how_it_is_given(command: str) -> None:
    """Every required setting of a command names a flag of that command, or its argument."""
    kind = SETTINGS[command]
    required = {name for name, field in kind.model_fields.items() if field.is_required()}
    for name in required:
        assert "argument" in kind.given_as.get(name, "") or f"--{name.replace('_', '-')}" in flags_of(command)


def test_a_suggestion_is_never_what_was_given(tmp_path: Path) -> None:
    """A path that is there but of another kind, and a link to nothing, say so; a typo still names its neighbour."""
    (tmp_path / "rollouts.jsonl").write_text("")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nothing")
    assert "did you mean 'rollouts.jsonl'?" in str(DataError.missing_path(tmp_path / "rollout.jsonl"))
    for path, said in (
        (tmp_path / "rollouts.jsonl", "is a file, expected a folder with a model"),
        (tmp_path, "is a folder, expected a folder with a model"),
        (tmp_path / "gone.jsonl", f"is a link to {tmp_path / 'nothing'}, which does not exist"),
    ):
        text = str(DataError.missing_path(path, "a folder with a model"))
        assert said in text
        assert "did you mean" not in text
    assert "did you mean" not in str(UsageError.unknown_key("rate", ["rate"], "settings"))
