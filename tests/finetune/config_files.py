"""Config files that tests write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


MINIMAL: dict[str, Any] = {
    "llms": {"policy": {"_type": "vllm", "model_name": str(ROOT / "sample_data" / "policy")}},
    "eval": {"general": {"max_concurrency": 16, "dataset": {"_type": "jsonl", "file_path": "tasks.jsonl"}}},
    "trajectory_builders": {"builder": {"_type": "collect", "num_generations": 2}},
    "trainer_adapters": {"adapter": {"_type": "trl", "rl": {"learning_rate": "1e-6"}}},
    "trainers": {"trainer": {"_type": "epochs"}},
    "finetuning": {
        "enabled": True, "trainer": "trainer", "trajectory_builder": "builder", "trainer_adapter": "adapter",
        "reward_function": {"name": "numeric"}, "target_functions": ["<workflow>"], "target_model": "policy",
        "num_epochs": 10, "output_dir": "out",
        "curriculum_learning": {"enabled": True, "initial_percentile": 0.3, "increment_percentile": 0.2,
                                "expansion_interval": 5, "min_reward_diff": 0.1, "sort_ascending": False,
                                "random_subsample": None},
    },
}  # fmt: skip


def write(folder: Path, change: Any = None, **sections: Any) -> Path:
    values = json.loads(json.dumps(MINIMAL)) | sections
    if change is not None:
        change(values)
    (folder / "tasks.jsonl").write_text('{"task_id": "a", "prompt": "1+1?", "answer": "2"}\n')
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    return file
