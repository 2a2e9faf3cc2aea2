"""How training processes are started on several machines, and how one of several ends."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from gymdata.commands.train.launch import machine_rank
from gymdata.commands.train.settings import TrainSftConfig
from gymdata.errors import UsageError

ROOT = Path(__file__).parents[2]


def test_a_process_ends_though_a_library_s_thread_does_not(tmp_path: Path) -> None:
    """What failed is reported and the exit code is its own; nothing waits for a thread that waits for another process."""
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait).start()\n"
    )
    (tmp_path / "job.json").write_text(json.dumps({"num_processes": 2}))
    words = [sys.executable, "-m", "gymdata.commands.train.trainers.run", str(tmp_path / "job.json")]
    environment = os.environ | {"RANK": "1", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 3
    reported = json.loads(done.stdout.removeprefix("@gymdata "))
    assert str(pickle.loads(bytes.fromhex(reported["pickled"]))) == "trainer: KeyError: 'output'"


def settings(**given: object) -> TrainSftConfig:
    return TrainSftConfig.load(None, {"model": "model", "output": "out", **given})


def test_which_machine_this_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--machine-rank, else what the launcher is configured with: torchrun by a variable, accelerate by its file."""
    monkeypatch.setenv("PET_NODE_RANK", "2")
    file = tmp_path / "fsdp.yaml"
    file.write_text("num_machines: 2\nmachine_rank: 1\n")
    assert machine_rank(settings()) == 0
    assert machine_rank(settings(launcher="torchrun")) == 2
    assert machine_rank(settings(launcher="torchrun", machine_rank=3)) == 3
    assert machine_rank(settings(accelerate_config=file)) == 1
    file.write_text("- a list\n")
    with pytest.raises(UsageError, match="expected an object of settings"):
        machine_rank(settings(accelerate_config=file))
    monkeypatch.setenv("PET_NODE_RANK", "worker")
    with pytest.raises(UsageError, match="PET_NODE_RANK: got 'worker', expected a number from 0"):
        machine_rank(settings(launcher="torchrun"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Before anything is started; and a file of accelerate is nothing that torchrun reads."""
    with pytest.raises(UsageError, match=r"--accelerate-config .*none.yaml: no such file"):
        settings(accelerate_config=tmp_path / "none.yaml").launching()
    with pytest.raises(UsageError, match="accelerate"):
        settings(accelerate_config=tmp_path / "none.yaml", launcher="torchrun")
