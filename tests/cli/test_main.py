"""The command line's frame: exit codes, wording, and one real command at a time."""

from __future__ import annotations

import importlib
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import gymdata
from gymdata.cli.main import COMMANDS, main
from tests.rollout_files import rollout, two_turns, write_run


@pytest.mark.parametrize("module", ["gymdata", "gymdata.cli"])
def test_the_package_runs_as_a_module(module: str):
    """``python -m gymdata`` is the script where no script is on the PATH."""
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"gymdata {gymdata.__version__}\n"), done.stderr


def test_a_process_ends_without_a_word_from_the_libraries_that_it_loaded(tmp_path: Path):
    """What DuckDB or another library prints about itself as Python ends is not on stderr of a command that succeeded."""
    run = write_run(tmp_path / "run", [rollout("t", k, float(k), two_turns(4, 20 + k)) for k in range(2)])
    program = "from gymdata.cli import run; run()"
    line = [sys.executable, "-c", program, "query", "SELECT 1 FROM rollouts", str(run)]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_words_at_all_show_the_help(capsys: pytest.CaptureFixture[str]):
    """Bare `gymdata` exits 2 with the help on stderr, which is no error message."""
    assert main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith("Usage: gymdata")
    assert "serve-genrm" in said
    assert "error:" not in said
    assert "→" not in said


def test_no_command_is_described_by_half_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The list of commands fits 80 columns with every summary whole."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert [name for name, (_, _, summary) in COMMANDS.items() if f"{name} {summary}" not in shown] == []


def test_an_interrupted_command_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Ctrl-C inside any command ends it with 130 and one word on stderr."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("gymdata.commands.query.statement"), "run_statement", interrupt)
    assert main(["query", "SELECT 1", str(tmp_path)]) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")


@pytest.mark.parametrize(
    ("module", "names", "said"),
    [
        ("pyarrow.parquet", "ParquetFile.iter_batches", "{file}: cannot be read: row group 0: cut off"),
        ("gymdata.commands.import_export.run", "refuse_inputs", "{command}: a file that it reads ends early (cut off)"),
    ],
)
def test_a_file_that_ends_early_is_no_interruption(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    names: str,
    said: str,
) -> None:
    """Typer takes Python's EOFError for Ctrl-D; here it names the file, or the command where it came from elsewhere."""
    write_run(tmp_path / "run", [rollout("t0", 0, 1.0, two_turns(1, 50))])
    monkeypatch.chdir(tmp_path)
    (file,) = Path("run/rollouts").glob("*.parquet")

    def cut_off(*_: object, **__: object) -> None:
        raise EOFError("cut off")

    holder = importlib.import_module(module)
    *classes, name = names.split(".")
    monkeypatch.setattr(getattr(holder, classes[0]) if classes else holder, name, cut_off)
    words = ["export", "run", "-o", "made.jsonl", "--format", "openai"]
    assert main(words) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert said.format(file=file, command=f"gymdata {' '.join(words)}") in shown
    assert "interrupted" not in shown


@pytest.mark.parametrize(
    ("words", "closed", "code"),
    [
        (["pairs", "RUN", "-o", "made", "--json"], ">&-", 0),
        (["pairs", "RUN", "-o", "made"], "<&- >&- 2>&-", 0),
        (["pairs", "nowhere"], "2>&-", 2),
    ],
)
def test_streams_that_the_caller_closed_change_no_exit_code(
    words: list[str], closed: str, code: int, tmp_path: Path
) -> None:
    """Services start commands so: what would be printed is lost, and no output file takes the number of a stream."""
    run = write_run(tmp_path / "run", [rollout("t", k, float(k), two_turns(4, 20 + k)) for k in range(2)])
    line = shlex.join([sys.executable, "-m", "gymdata.cli", *(str(run) if word == "RUN" else word for word in words)])
    done = subprocess.run(["sh", "-c", f"{line} {closed}"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "defect" in done.stderr) == (code, False)
    assert (tmp_path / "made" / "pairs.parquet").is_file() == (code == 0)
