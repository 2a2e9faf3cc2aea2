"""Completion in real shells: commands, flags, choices and topics."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CASES = {
    "gymdata train-s": {"train-sft"},
    "gymdata validate --expl": {"--explain"},
    "gymdata pairs --strategy ad": {"adjacent"},
    "gymdata docs your-s": {"your-server"},
    "gymdata help exp": {"experience", "export"},
    "gymdata collect --log-level w": {"warning"},
}
#: Each shell runs the script that gymdata prints for it, on every line given, with an empty line after each.
SHELLS = {
    "bash": """
        source <(gymdata --show-completion bash)
        for line in "$@"; do
            read -ra COMP_WORDS <<< "$line"; [[ $line == *" " ]] && COMP_WORDS+=("")
            COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=(); _gymdata_completion gymdata
            printf '%s\\n' "${COMPREPLY[@]}" --
        done""",
    "zsh": """
        compdef() { : }; _arguments() { print -r -- "$*" | sed 's/":"[^"]*"/"/g' | grep -o '"[^"]*"' | tr -d '"' }
        eval "$(gymdata --show-completion zsh)"
        for line in "$@"; do words=(${=line}); CURRENT=$#words; _gymdata_completion; print -- --; done""",
    "fish": """
        gymdata --show-completion fish | source
        for line in $argv; complete -C $line | string split -f1 \\t; echo -- --; end""",
}
START = {"bash": ["bash", "-c"], "zsh": ["zsh", "-f", "-c"], "fish": ["fish", "--no-config", "-c"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a run."""
    (tmp_path / "runs" / "one").mkdir(parents=True)
    return tmp_path


def offered(shell: str, lines: list[str], folder: Path) -> list[set[str]]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    name = [] if shell == "fish" else [shell]
    done = subprocess.run([*START[shell], SHELLS[shell], *name, *lines], cwd=folder, capture_output=True, text=True,
                          env={**os.environ, "PATH": path, "HOME": str(folder)}, timeout=300)  # fmt: skip
    assert done.stderr == ""
    return [set(part.split()) for part in done.stdout.split("--\n")[: len(lines)]]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_offers_what_fits(shell: str, folder: Path) -> None:
    """The script of `--show-completion`, in the real shell; fish adds files that begin so."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    cases = CASES if shell == "bash" else dict(list(CASES.items())[:3])
    found = dict(zip(cases, offered(shell, [*cases], folder), strict=True))
    assert {line: words & found[line] if shell == "fish" else found[line] for line, words in cases.items()} == cases


def test_where_nothing_of_ours_fits_the_shell_completes_file_names(folder: Path) -> None:
    """A path gives no words, and bash's default takes over."""
    assert offered("bash", ["gymdata validate runs/o"], folder) == [set()]
