"""Models that come as one GGUF file, quantized or not, as ordinary model folders."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gymdata.errors import needs
from gymdata.models._saving import share_weights
from gymdata.models._transformers import quiet_transformers


def write_from_gguf(file: Path, out: Path) -> None:
    """Write the model of ``file`` to the folder ``out`` in bfloat16, with its tokenizer, chat template and generation
    config. Raises UsageError where the package gguf is missing."""
    # It draws a bar for each of hundreds of tensors.
    with needs("real"), quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        folder, name = file.parent, file.name
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32, local_files_only=True)
        # transformers saves no model that it calls quantized; these weights are plain numbers.
        del model.config.quantization_config
        plain = type(model)(model.config)
        plain.load_state_dict(model.state_dict())
        plain.generation_config = model.generation_config
        plain.bfloat16().save_pretrained(out)
        tokenizer.save_pretrained(out)
    share_weights(out)
