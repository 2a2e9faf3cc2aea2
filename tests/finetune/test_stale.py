"""Training on what an older policy sampled, with a real engine and the real batch RL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.torch

DATA = Path(__file__).parents[2] / "sample_data"


@pytest.mark.full
def test_an_endpoint_that_stays_behind_is_corrected_by_importance_weights(tmp_path: Path, vllm_server: str) -> None:
    """A server goes on serving the first policy: the second epoch trains on rollouts one version old. They are counted,
    and the ratio to their own saved log-probabilities, 1 in the first epoch, is what the loss is weighted with."""
    config = {
        "llms": {"policy": {"_type": "openai", "base_url": vllm_server, "model_name": "sample-policy",
                            "model": str(DATA / "policy"), "max_tokens": 48}},
        "eval": {"general": {"max_concurrency": 32, "dataset": str(DATA / "tasks" / "train.jsonl")}},
        "trajectory_builders": {"b": {"_type": "collect", "num_generations": 4,
                                      "env": f"{DATA / 'calculator.py'}:Calculator"}},
        "trainer_adapters": {"t": {"_type": "trl", "rl": {"learning_rate": 1e-3, "per_device_train_batch_size": 16,
                                                          "num_train_epochs": 2, "loss": "tis_reinforce"}}},
        "finetuning": {"reward_function": {"name": "numeric"}, "algorithm": "rl", "num_epochs": 2, "limit": 16,
                       "max_policy_lag": 1, "output_dir": str(tmp_path / "out")},
    }  # fmt: skip
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    done = subprocess.run([sys.executable, "-m", "gymdata.cli", "finetune", str(file)], capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    assert (first["stale_rollouts"], first["policy_lag_max"]) == (0, 0)
    assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert first["effective_sample_size"] == pytest.approx(1.0, abs=1e-3)
    assert (second["stale_rollouts"], second["policy_lag_max"]) == (64, 1)
    assert second["effective_sample_size"] < 0.999
    assert (second["policy_version"], second["kl_to_start"]) == (1, None)
