"""Models that tests make: a LoRA folder over the shipped policy, and a pretrained model from a package."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from gymdata.commands.demo.model import MODULES, write_model

POLICY = Path(__file__).parents[1] / "sample_data" / "policy"


def write_adapter(folder: Path, size: float = 0.5, base: Path = POLICY) -> Path:
    """Rank 1 on the queries of the first layer, where each weight changes by ``size``."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    shape = json.loads((base / "config.json").read_text())
    width = shape["num_attention_heads"] * shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    a, b = np.ones((1, shape["hidden_size"]), np.float32), np.full((width, 1), size, np.float32)
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 1,
        "lora_alpha": 1,
        "target_modules": r".*layers\.0\..*q_proj",
    }
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    return folder


def smollm2_missing() -> str:
    """What is not installed; empty where the model can be made."""
    lacking = [package for package in MODULES if find_spec(package) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else ""


def make_smollm2(folder: Path) -> Path:
    """Write the model in bfloat16, with its tokenizer and chat template, to ``folder``."""
    write_model(folder)
    return folder
