"""``gymdata serve --stop`` without a model: the only background server is stopped."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from gymdata.cli.main import main
from gymdata.engines.servers.background import BackgroundServer


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Two processes, each described as the server of a model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ExitStack() as stack:
        processes = {}
        for model in ("policy", "other"):
            process = stack.enter_context(subprocess.Popen(["sleep", "600"], start_new_session=True))
            stack.callback(process.kill)
            log = tmp_path / f"{model}.log"
            # In order, also where both began in one tick of the clock.
            begun = psutil.Process(process.pid).create_time() + len(processes)
            (tmp_path / "gymdata" / "servers").mkdir(parents=True, exist_ok=True)
            BackgroundServer("http://127.0.0.1:1", model, model, model, {}, process.pid, begun, str(log)).save()
            processes[model] = process
        yield processes


def test_the_only_server_is_stopped_without_its_model(
    started: dict[str, subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of several each is listed with its command, and none is stopped; without any that is said."""
    assert main(["serve", "", "--stop"]) == 2  # as of a variable of the shell that is not set
    assert "got ''" in capsys.readouterr().err
    assert main(["serve", "--stop"]) == 2
    assert (
        "error: 2 background servers on this machine, and no model is named\n"
        "  → gymdata serve policy --stop; gymdata serve other --stop"
    ) in capsys.readouterr().err
    assert [process.poll() for process in started.values()] == [None, None]
    assert main(["serve", "other", "--stop"]) == 0
    assert main(["serve", "--stop"]) == 0
    assert "stopped the server of policy on http://127.0.0.1:1" in capsys.readouterr().err
    assert started["policy"].wait() < 0
    assert main(["serve", "--stop"]) == 2
    assert "error: no background server on this machine" in capsys.readouterr().err


def test_a_server_without_a_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--dry-run"]) == 2
    assert "error: model is missing\n  → give --model, or set it in --config" in capsys.readouterr().err
