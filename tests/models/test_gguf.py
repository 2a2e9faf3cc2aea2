"""A GGUF file becomes an ordinary model folder."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.torch, pytest.mark.skipif(find_spec("gguf") is None, reason="not installed: gguf")]
WIDTH, HIDDEN, HEADS = 32, 64, 2
PIECES = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, range(33, 127)), "Ġ", "Ċ", "ab"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"


def write_gguf(file: Path) -> dict[str, np.ndarray]:
    """A llama of one layer. Returns its weights by their names in the file."""
    import gguf

    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(PIECES))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(PIECES)
    writer.add_token_types([3, 3, 3, *[1] * (len(PIECES) - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(1)
    shapes = {
        "token_embd": (len(PIECES), WIDTH),
        "output_norm": (WIDTH,),
        **{f"blk.0.{name}": (WIDTH,) for name in ("attn_norm", "ffn_norm")},
        **{f"blk.0.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")},
        **{f"blk.0.ffn_{name}": (HIDDEN, WIDTH) for name in ("gate", "up")},
        "blk.0.ffn_down": (WIDTH, HIDDEN),
    }
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, weight in weights.items():
        writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_a_gguf_file_becomes_a_model_folder(tmp_path: Path) -> None:
    """Its weights in bfloat16, its tokenizer and its chat template; nothing of it says that it was quantized."""
    import torch
    from safetensors.torch import load_file

    from gymdata.models._gguf import write_from_gguf
    from gymdata.models._transformers import load_tokenizer

    weights = write_gguf(tmp_path / "tiny.gguf")
    write_from_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    assert "quantization_config" not in config
    stored = load_file(tmp_path / "model" / "model.safetensors")
    names = {
        "token_embd": "embed_tokens",
        "output_norm": "norm",
        "blk.0.ffn_down": "layers.0.mlp.down_proj",
        "blk.0.attn_v": "layers.0.self_attn.v_proj",
    }
    for name, ours in names.items():
        assert torch.equal(stored[f"model.{ours}.weight"], torch.from_numpy(weights[name]).bfloat16())
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab", add_special_tokens=False)) == ["ab"]
    assert tokenizer.chat_template == TEMPLATE
