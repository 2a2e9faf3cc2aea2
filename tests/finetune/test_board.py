"""The live table of ``gymdata finetune`` on a terminal."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from gymdata.cli.finetune import LiveTable
from gymdata.cli.main import main


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> pytest.MonkeyPatch:
    """A terminal; tests give its width."""
    monkeypatch.setenv("TERM", "xterm")
    # Each phase of a test has streams of its own, of one kind.
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    return monkeypatch


def row(epoch: int, **changed: Any) -> dict[str, Any]:
    return {
        "epoch": epoch, "reward_mean": 0.4123, "reward_ci95": [0.39412, 0.43123], "groups": 1200, "groups_selected": 640,
        "curriculum": {"current_percentile": 0.35}, "trained_tokens": 1_234_567, "training_loss": -0.012345,
        "kl_to_start": 0.00012345, "validation": {"rate": 0.4523, "ci95": [0.4111, 0.4935]}, **changed,
    }  # fmt: skip


def shown(width: int, terminal: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of the table as it was left."""
    terminal.setenv("COLUMNS", str(width))
    with LiveTable() as board:
        board.stage(10, "collect")
        board.epoch(row(10, skipped="no pair"))
        capsys.readouterr()
        board.epoch(row(11))
    # Colours are nothing; where the cursor goes back, the next picture begins.
    plain = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "\n", plain).splitlines()


def test_all_columns_fit_100(terminal: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """At 100 columns nothing is cut or wrapped, the held-out rate with its interval included."""
    lines = shown(100, terminal, capsys)
    last = lines[max(at for at, line in enumerate(lines) if line.split()[:1] == ["11"])]
    assert last.split() == ["11", "0.412", "0.39–0.43", "1,200", "640", "0.35", "1.2M", "-0.0123", "0.000123",
                            "45.2", "%", "(41–49)"]  # fmt: skip
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("width", [80, 60, 40])
def test_a_narrow_terminal_has_fewer_columns(
    width: int, terminal: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is least looked at is left out; epoch, reward and the held-out rate stay whole."""
    lines = shown(width, terminal, capsys)
    last = lines[max(at for at, line in enumerate(lines) if line.split()[:1] == ["11"])]
    assert last.split()[:2] == ["11", "0.412"]
    assert last.split()[-3:] == ["45.2", "%", "(41–49)"]
    assert "share" not in " ".join(lines)
    assert "…" not in " ".join(lines)
    assert max(map(len, lines)) <= width


@pytest.mark.usefixtures("terminal")
def test_a_mistake_stands_below_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration that is refused is answered with the error alone."""
    assert main(["finetune", "/nowhere/config.yaml"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert "epoch" not in said.err + said.out


def test_without_a_terminal_stages_and_their_progress_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """A log of a finetuning says which stage began, and how far it is, before its first epoch has ended."""
    with LiveTable() as board:
        board.stage(1, "collect")
        board.update(done=0, total=100)
        assert capsys.readouterr().err.splitlines()[0] == "epoch 1: collect"


def test_without_a_terminal_a_stage_ends_with_its_last_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log does not leave a finished stage at an earlier count, nor repeats it; one that failed shows how far it was."""
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr("gymdata.cli.console.time.monotonic", lambda: next(clock))
    with LiveTable() as board:
        board.stage(1, "collect")
        board.update(done=0, total=100)
        board.update(done=100, total=100)
        board.update(done=100, total=100)
        monkeypatch.setattr("gymdata.cli.console.time.monotonic", lambda: 1000)
        board.stage(1, "train")
        board.update(done=2, total=6)
    lines = [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["epoch 1: collect", "epoch 1: collect 100/100", "epoch 1: train", "epoch 1: train 2/6"]
