"""The tutorial's files are run as they stand."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gymdata.store import read_run_json, read_table

pytestmark = pytest.mark.torch

DATA = Path(__file__).parents[2] / "sample_data"
FILES = {
    name: code
    for code, name in re.findall(
        r"```(?:python|yaml)\n(# ([\w.]+)\n.*?)```", (DATA / "TUTORIAL.md").read_text(encoding="utf-8"), re.DOTALL
    )
}


@pytest.mark.parametrize("name", ["cluster.py", "battery.py"])
def test_a_part_of_ones_own_is_short(name: str) -> None:
    """An adapter and an environment take fewer than 60 lines each."""
    assert len(FILES[name].splitlines()) < 60


@pytest.mark.full
def test_the_tutorial_runs(tmp_path: Path, vllm_server: str) -> None:
    """The loop collects in the page's environment from a real engine, and trains through the page's adapter."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    for name in ("policy", "tasks"):
        shutil.copytree(DATA / name, tmp_path / name)
    words = ["--set", "per_device_train_batch_size=8", "--set", "num_train_epochs=1", "--set", "max_steps=2"]
    worker = subprocess.Popen([sys.executable, "worker.py", "queue", *words], cwd=tmp_path)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gymdata.cli", "finetune", "tutorial.yaml", "--endpoint", vllm_server, "--json"],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert worker.wait(60) == 0
    finally:
        worker.kill()
        worker.wait()
    result = json.loads(done.stdout)
    folder = tmp_path / "runs" / "tutorial" / "epoch-001"
    assert result["policy"] == str(folder / "policy")
    assert read_run_json(folder / "policy")["trained_tokens"]["equal"] is True
    rows = read_table(folder / "rollouts", columns=["reward", "messages", "policy_hash"])
    assert rows.num_rows == 64
    assert {round(reward, 1) for reward in rows["reward"].to_pylist()} & {0.9, 1.0}
    assert set(rows["policy_hash"].to_pylist()) == {"served:sample-policy"}
    ticket = json.loads(next((tmp_path / "queue").glob("*.json")).read_text())
    assert ticket["state"] == "completed"
