"""The size of a model by its config, without its weights, and its speed by that of a cut of it on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gymdata.errors import DataError, first_line, needs
from gymdata.models._torch import multiplies
from gymdata.models._transformers import local_folder, quiet_transformers
from gymdata.models.model_identity import base_of, stored_dtype

#: Rank of the adapter that is counted, over all linear layers.
LORA_RANK = 16
#: What the cut has at most, so that it fits and is fast whatever the model's size; sequences of a step of sampling, and
#: sequences and their tokens of a step of training.
_LAYERS, _VOCABULARY, _SAMPLED, _TRAINED = 2, 8_192, 256, (4, 128)
#: Seconds of each of the two measurements, after one step of warm-up.
_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ModelSize:
    """``adapter``: parameters of a LoRA adapter; ``context``: tokens, None where the config has no limit.
    ``activations``: bytes per token that training keeps for the gradient; ``checkpointed``: with gradient checkpointing."""

    parameters: int
    adapter: int
    layers: int
    width: int
    context: int | None
    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    activations: int
    checkpointed: int


@dataclass(frozen=True, slots=True)
class ModelSpeed:
    """Tokens per second generated in full batches, and trained without a reference; ``device``: cpu or cuda."""

    device: str
    sampled: float
    trained: float


def size_of(model: str) -> ModelSize:
    """Raises DataError for a model that is not here or that transformers does not know."""
    with needs("train"):
        import torch

    stored = stored_dtype(model) or "float32"
    dtype = stored if torch.cuda.is_available() or multiplies(stored) else "float32"  # as ``collect`` samples it
    config, empty = _config(model), _of_config(_config(model), "meta", dtype)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    n_bytes = next(empty.parameters()).element_size()
    parameters = sum(p.numel() for p in empty.parameters())
    layers, width = config.num_hidden_layers, config.hidden_size
    linear = [(m.in_features, m.out_features) for m in empty.base_model.modules() if hasattr(m, "in_features")]
    # Of each linear layer the input is kept, where those of one input share it, and its output; of each block also the
    # norms' inputs and scaled outputs, and the residuals. In float32.
    activations = 4 * (
        sum(out for _, out in linear) + layers * (6 * width + 2 * getattr(config, "intermediate_size", 4 * width))
    )
    return ModelSize(
        parameters=parameters,
        adapter=LORA_RANK * sum(map(sum, linear)),
        layers=layers,
        width=width,
        context=getattr(config, "max_position_embeddings", None),
        dtype=dtype,
        weight_bytes=parameters * n_bytes,
        kv_bytes_per_token=2 * layers * kv_heads * head * n_bytes,
        activations=activations,
        checkpointed=4 * layers * width + activations // layers,
    )


def speed_of(model: str, size: ModelSize) -> ModelSpeed:
    """Measured on at most two layers with random weights, and scaled by the parameters that are multiplied per token.
    Raises DataError as ``size_of``."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = _config(model)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    multiplied = size.parameters - (0 if tied else config.vocab_size * config.hidden_size)
    config.num_hidden_layers = min(_LAYERS, config.num_hidden_layers)
    config.vocab_size, config.pad_token_id = min(_VOCABULARY, config.vocab_size), None
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]

    def per_second(dtype: str, shape: tuple[int, int], step: Callable[[Any, Any], Any]) -> float:
        cut = _of_config(config, device, dtype)
        share = (
            sum(p.numel() for p in cut.parameters()) - (0 if tied else config.vocab_size * config.hidden_size)
        ) / multiplied
        ids = torch.randint(config.vocab_size, shape, device=device)
        best, spent = math.inf, -1.0
        while spent < _SECONDS:
            start = time.perf_counter()
            float(step(cut, ids))  # which waits for the device
            seconds = time.perf_counter() - start
            best, spent = (best, 0.0) if spent < 0 else (min(best, seconds), spent + seconds)
        return float(ids.numel() / best * share)

    def train(cut: Any, ids: Any) -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = cut(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    def sample(cut: Any, ids: Any) -> Any:
        with torch.inference_mode():
            return cut(input_ids=ids).logits.float().log_softmax(-1).max()

    return ModelSpeed(device, per_second(size.dtype, (_SAMPLED, 1), sample), per_second("float32", _TRAINED, train))


def _config(model: str) -> Any:
    with needs("train"):
        from transformers import AutoConfig
    try:
        return AutoConfig.from_pretrained(local_folder(base_of(model)[0]), local_files_only=True).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise DataError.unreadable(model, f"not a model folder: {first_line(error)}") from error


def _of_config(config: Any, device: str, dtype: str) -> Any:
    """A causal model with random weights; on ``meta`` with none."""
    import torch
    import transformers

    causal: Any = transformers.AutoModelForCausalLM  # partly without types
    with quiet_transformers(), torch.device(device):
        return causal.from_config(config, dtype=getattr(torch, dtype))
