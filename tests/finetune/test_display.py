"""What ``gymdata finetune`` shows while it runs."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from gymdata.cli.finetune import EpochLines
from gymdata.cli.main import main


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> pytest.MonkeyPatch:
    """A terminal."""
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


def test_on_a_terminal_an_epoch_is_a_line(terminal: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A stage has the bar of a command; what stays of an epoch is its line, whole at 80 columns or more."""
    terminal.setenv("COLUMNS", "200")
    with EpochLines() as lines:
        lines.stage(10, "collect")
        lines.update(done=1, total=2)
        lines.epoch(row(10, skipped="no pair"))
        capsys.readouterr()
        lines.stage(11, "train")
        lines.update(done=1, total=2, loss=0.5)
        lines.message("a remark")
        lines.epoch(row(11))
    plain = re.sub(
        r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "\n", re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err)
    ).splitlines()
    assert any(line.startswith("epoch 11: train") and "1/2" in line for line in plain), plain
    assert "a remark" in plain
    (shown,) = (text for text in plain if text.startswith("epoch 11  "))
    assert shown.startswith(
        "epoch 11  reward 0.4123  95 % 0.394–0.431  groups 1,200  trained on 640  share 0.35  tokens"
    )
    assert "held-out 45.2 %" in shown


@pytest.mark.usefixtures("terminal")
def test_a_mistake_is_shown_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration that is refused is answered with the error alone."""
    assert main(["finetune", "/nowhere/config.yaml"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert "epoch" not in said.err + said.out


def test_without_a_terminal_stages_and_their_progress_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """A log of a finetuning says which stage began, and how far it is, before its first epoch has ended."""
    with EpochLines() as lines:
        lines.stage(1, "collect")
        lines.update(done=0, total=100)
        assert capsys.readouterr().err.splitlines()[0] == "epoch 1: collect"


def test_without_a_terminal_a_stage_ends_with_its_last_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log does not leave a finished stage at an earlier count, nor repeats it; one that failed shows how far it was."""
    clock = [0]
    monkeypatch.setattr("gymdata.cli.console.time.monotonic", lambda: clock[0])
    with EpochLines() as lines:
        lines.stage(1, "collect")
        lines.update(done=0, total=100)
        clock[0] = 7
        lines.update(done=100, total=100)
        lines.update(done=100, total=100)
        lines.stage(1, "train")
        lines.update(done=2, total=6)
    shown = [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["epoch 1: collect", "epoch 1: collect 100/100", "epoch 1: train", "epoch 1: train 2/6"]
