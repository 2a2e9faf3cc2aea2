"""A real ``gymdata finetune`` is killed in every stage; what it leaves is gone on with, and comes out the same."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from gymdata.finetune.epochs import STAGES
from gymdata.store import read_run_json, read_table
from tests.kills import DEADLINE_S, session_members

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
DATA = ROOT / "sample_data"


def write(folder: Path, epochs: int, builder: dict[str, Any]) -> Path:
    """A small configuration of DPO with validation, on the sample policy."""
    config = {
        "llms": {"policy": {"_type": "vllm", "model_name": str(DATA / "policy"), "max_tokens": 48}},
        "eval": {"general": {"dataset": str(DATA / "tasks" / "train.jsonl")}},
        "trajectory_builders": {"b": builder},
        "trainer_adapters": {"t": {"_type": "trl", "dpo": {
            "num_train_epochs": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-5, "logging_steps": 1}}},
        "trainers": {"loop": {"_type": "epochs", "pairs": {"strategy": "all", "max_pairs_per_task": 2},
                              "measure_kl": 8}},
        "finetuning": {
            "reward_function": {"name": "numeric"}, "algorithm": "dpo", "num_epochs": epochs, "limit": 8,
            "curriculum_learning": {"enabled": True, "initial_percentile": 0.5, "expansion_interval": 1},
            "validation": {"dataset": str(DATA / "tasks" / "heldout.jsonl"), "interval": 1, "limit": 6},
        },
    }  # fmt: skip
    file = folder / "finetune.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def begin(config: Path, out: Path) -> subprocess.Popen[bytes]:
    """In a session of its own, so that everything it starts can be found."""
    words = ["finetune", str(config), "--output", str(out), "--run-id", "kill-test"]
    return subprocess.Popen([sys.executable, "-m", "gymdata.cli", *words], stdout=subprocess.DEVNULL,
                            stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip


def kill_in(process: subprocess.Popen[bytes], out: Path, epoch: int, stage: str) -> bool:
    """SIGKILL the process once the state says that this stage runs; False when it ended before, or was past it."""
    end, ended = time.monotonic() + DEADLINE_S, os.pidfd_open(process.pid)
    try:
        wanted = (epoch, STAGES.index(stage))
        while (now := place(out)) is None or now < wanted:
            if select.select([ended], [], [], 0.001)[0]:
                return False
            assert time.monotonic() < end, "the loop makes no progress"
        signal.pidfd_send_signal(ended, signal.SIGKILL)
        select.select([ended], [], [], DEADLINE_S)
        # A stage of milliseconds may pass while a busy machine lets us wait.
        return now == wanted
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        os.close(ended)


def place(out: Path) -> tuple[int, int] | None:
    """The epoch and the number of the stage that runs."""
    with contextlib.suppress(FileNotFoundError):
        found = json.loads((out / "state.json").read_text()).get("running")
        return (found["epoch"], STAGES.index(found["stage"])) if found else None
    return None


def finish(config: Path, out: Path) -> None:
    process = begin(config, out)
    try:
        _, said = process.communicate(timeout=2 * DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, said.decode()
    assert session_members(process.pid) == []


@pytest.mark.engine
@pytest.mark.full
def test_killed_with_the_engine_in_its_own_process(tmp_path: Path) -> None:
    """With real vLLM: no engine outlives the loop, each stage is completed once, and each input is the sealed one."""
    pytest.importorskip("vllm")
    env = f"{DATA / 'calculator.py'}:Calculator"
    config = write(tmp_path, 1, {"_type": "collect", "num_generations": 4, "env": env})
    out = tmp_path / "out"
    for stage in ("collect", "train"):
        process = begin(config, out)
        assert kill_in(process, out, 1, stage), process.communicate()[1].decode()
        process.communicate()
        for child in session_members(process.pid):
            with contextlib.suppress(ProcessLookupError):
                watched = os.pidfd_open(child)
                assert select.select([watched], [], [], 60.0)[0], "an engine outlived the loop"
                os.close(watched)
    finish(config, out)
    state = json.loads((out / "state.json").read_text())["epochs"]["1"]
    assert {stage: entry["state"] for stage, entry in state.items()} == dict.fromkeys(state, "completed")
    assert {stage for stage, entry in state.items() if entry["attempts"] > 1} == {"collect", "train"}
    folder = out / "epoch-001"
    selected = read_run_json(folder / "selected")
    assert [Path(parent["path"]) for parent in selected["parents"]] == [folder / "rollouts"]
    rows = read_table(folder / "rollouts", columns=["rollout_id", "policy_version"])
    assert len(set(rows["rollout_id"].to_pylist())) == rows.num_rows == 8 * 4
    lines = (folder / "policy" / "metrics.jsonl").read_text().splitlines()
    steps = [row["step"] for line in lines if "loss" in (row := json.loads(line))]
    assert sorted(set(steps)) == steps
