"""Model folders as they are left for others: in the number format of the model that they came from, with its tokenizer,
chat template and generation config."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gymdata.errors import DataError
from gymdata.models._transformers import local_folder, quiet_transformers, with_adapter
from gymdata.models.cache import cached, made_in_cache
from gymdata.models.model_identity import base_of, model_config, policy_facts, stored_dtype

#: Files that say what ids mean and how to sample; copied as they are, since saving them again may rewrite them.
_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
    "generation_config.json",
)
_FORMATS = ("float32", "bfloat16", "float16")


def copy_companions(model: str, out: Path) -> None:
    """Copy tokenizer, chat template and generation config of a model into ``out``; what a LoRA folder lacks comes from its
    base."""
    for folder in dict.fromkeys((local_folder(base_of(model)[0]), local_folder(model))):
        for name in _COMPANIONS:
            if (folder / name).is_dir():
                shutil.copytree(folder / name, out / name, dirs_exist_ok=True)
            elif (folder / name).is_file():
                shutil.copyfile(folder / name, out / name)


def write_merged(adapter: str, out: Path, dtype: str = "auto") -> None:
    """Write the model that a LoRA folder and its base are together to ``out``, in ``dtype`` (auto: the base's number
    format), with its tokenizer, chat template and generation config."""
    from transformers import AutoModelForCausalLM

    base, _ = base_of(adapter)
    task = model_config(Path(adapter) / "adapter_config.json").get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise DataError(f"{adapter}: its adapter is for the task {task}, expected CAUSAL_LM")
    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(local_folder(base), dtype=dtype, local_files_only=True)
        with_adapter(model, adapter, base).merge_and_unload().save_pretrained(out)
    copy_companions(adapter, out)
    share_weights(out)


def share_weights(out: Path) -> None:
    """Let others read the weights as the other files: safetensors writes for its owner only, and a server of another user
    reads them, too."""
    mask = os.umask(0)
    os.umask(mask)
    for weights in out.glob("*.safetensors"):
        weights.chmod(0o666 & ~mask)


def merged_in_cache(adapter: str, sampled_in: str = "auto") -> Path:
    """The folder of what ``write_merged`` makes, kept under the hash of both weights and made where it is not there.

    ``sampled_in``: the number format that it is for (auto: the base's). In another one than the base's the sum of base and
    adapter is not rounded to the base's first, and is in float32: so it is trained and audited.
    """
    name = str(policy_facts(adapter)["policy_hash"]).replace(":", "-")
    if sampled_in in ("auto", stored_dtype(adapter)):
        return made_in_cache(cached("merged", name), lambda out: write_merged(adapter, out))
    return made_in_cache(cached("merged", f"{name}-float32"), lambda out: write_merged(adapter, out, "float32"))


def round_weights(out: Path, dtype: str | None) -> None:
    """Rewrite the weights of a model folder in ``dtype``, where that is a format to train in."""
    files = sorted(out.glob("*.safetensors"))
    if dtype not in _FORMATS or not (out / "config.json").is_file():
        return
    target, sizes = getattr(torch, dtype), 0
    for file in files:
        with safe_open(file, "pt") as stored:
            metadata, weights = stored.metadata(), {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - it is no mapping
        for name, weight in weights.items():
            if weight.is_floating_point():
                weights[name] = weight.to(target)
            sizes += weights[name].nbytes
        save_file(weights, temporary := out / f"{file.name}.rounded", metadata)
        os.replace(temporary, file)  # noqa: PTH105 - atomic
    _change(out / "config.json", {"dtype": dtype})
    _change(out / "model.safetensors.index.json", {"metadata": {"total_size": sizes}})


def _change(file: Path, values: dict[str, Any]) -> None:
    """Replace values in a JSON file, where it is there; objects within it keep their other keys."""
    if not file.is_file():
        return
    content = json.loads(file.read_text())
    for key, value in values.items():
        content[key] = content.get(key, {}) | value if isinstance(value, dict) else value
    content.pop("torch_dtype", None)
    file.write_text(json.dumps(content, indent=2) + "\n")
