"""Who a model is: hashes of its weights, tokenizer and chat template, its limits, and whether rollouts fit its tokenizer.

Invariants: the same weights have the same hash on every machine and under every folder name; a LoRA folder's hash
covers its base as well; a tokenizer's hash depends on what its ids mean (pieces, merges, added tokens), never on file bytes,
key order or the machine; a model that only a server knows has ``served:NAME``, because its weights cannot be read.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from gymdata.errors import DataError, RefusedError, require
from gymdata.models._transformers import local_folder
from gymdata.progress import Progress
from gymdata.store.paths import Facts, RunFacts

#: Up to this many bytes weights are hashed whole; above, samples of them.
FULL_HASH_BYTES = 2 << 30
_PLACES = 256
_PLACE_BYTES = 64 << 10
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")
#: Keys that do not affect what the model computes.
_VOLATILE = ("_name_or_path", "transformers_version", "use_cache", "torch_dtype", "dtype")


def base_of(model: str) -> tuple[str, Path | None]:
    """(what to load, adapter folder or None). A LoRA folder names its base, absolute, beside itself or on the hub.

    Raises DataError for a LoRA folder whose base is not named, not there, or a LoRA folder itself.
    """
    folder = Path(model)
    config = folder / "adapter_config.json"
    if not config.is_file():
        return model, None
    base = model_config(config).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise DataError(f"{config}: names no base_model_name_or_path, so the base model is not known")
    beside = folder / base
    if not Path(base).is_dir() and beside.is_dir():
        base = str(beside)
    if (Path(base) / "adapter_config.json").is_file():
        raise DataError(
            f"{config}: its base model {base} is a LoRA folder itself, expected a complete model",
            hint=f"merge that first: gymdata.merge_adapter({base!r}, 'MODEL') in Python; then name MODEL as "
            "base_model_name_or_path",
        )
    if not Path(base).is_dir() and (Path(base).is_absolute() or base.startswith(".")):
        raise DataError.missing_path(base, f"the base model that {config} names")
    return base, folder


def model_config(file: Path) -> Facts:
    """The content of a ``config.json`` or ``adapter_config.json``. Raises DataError for what is no JSON object."""
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DataError.unreadable(file, str(error)) from error
    if not isinstance(config, dict):
        raise DataError.unreadable(file, f"got {type(config).__name__}, expected a JSON object")
    return config


def tokenizer_folder(model: str) -> str:
    """Where the tokenizer of ``model`` is: its own folder, or its base's when a LoRA folder has none."""
    base, adapter = base_of(model)
    own = adapter is None or any((adapter / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    return model if own else base


def policy_facts(path: str) -> Facts:
    """``{"policy", "policy_hash", "base", "adapter", "revision", "weights_bytes"}`` of a local model folder or hub name.

    Raises DataError when there is no such folder and it is not in the local Hugging Face cache.
    """
    base, adapter = base_of(path)
    folder = local_folder(base)
    digest = policy_hash(folder)
    if adapter is not None:
        parts = digest, policy_hash(adapter)
        joined = xxhash.xxh3_128("+".join(parts).encode()).hexdigest()
        digest = f"sampled:{joined}" if any(part.startswith("sampled:") for part in parts) else joined
    sizes = [f.stat().st_size for part in (folder, adapter) if part is not None for f in _weight_files(part)]
    return {
        "policy": path,
        "policy_hash": digest,
        "base": base if adapter is not None else None,
        "adapter": str(adapter) if adapter is not None else None,
        "revision": folder.name if folder.parent.name == "snapshots" else None,
        "weights_bytes": sum(sizes),
    }


def served_facts(name: str) -> Facts:
    """``policy_facts`` of a model that only a server knows."""
    unknown: Facts = dict.fromkeys(("base", "adapter", "revision", "weights_bytes"))
    return {"policy": name, "policy_hash": f"served:{name}", **unknown}


def policy_hash(folder: Path, full_below: int = FULL_HASH_BYTES) -> str:
    """xxh3-128 hex over the weight files and the architecture in config.json.

    Below 2 GiB every byte counts. Above: names, sizes, safetensors headers and 64 KiB at 256 evenly spaced places; such a
    hash begins with ``sampled:``, because a change elsewhere would not be seen.
    """
    files = _weight_files(folder)
    if not files:
        inside = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
        raise DataError(
            f"{folder}: holds no weights (*.safetensors, *.bin, *.gguf); it holds {inside}",
            hint="give the folder that save_pretrained wrote",
        )
    total = sum(f.stat().st_size for f in files)
    digest = xxhash.xxh3_128()
    for name in ("config.json", "adapter_config.json"):
        if (file := folder / name).is_file():
            config = {k: v for k, v in model_config(file).items() if k not in _VOLATILE}
            if name == "adapter_config.json":
                config.pop("base_model_name_or_path", None)  # the base's own hash is part of the policy's
            digest.update(json.dumps(config, sort_keys=True).encode())
            break
    in_full = total < full_below
    for file in files:
        size = file.stat().st_size
        digest.update(f"\0{file.name}\0{size}\0".encode())
        _update(digest, file, None if in_full else max(1, round(_PLACES * size / total)))
    return digest.hexdigest() if in_full else f"sampled:{digest.hexdigest()}"


def tokenizer_facts(tokenizer: Any, template: str | None, served_template: str | None = None) -> Facts:
    """Hashes of a transformers tokenizer and of the chat template used with it.

    ``served_template``: the model's own template, when another one is used in its place.
    """
    return {
        "tokenizer_hash": hash_of_tokenizer(tokenizer),
        "chat_template_hash": template_hash(template),
        "served_chat_template_hash": template_hash(served_template if served_template is not None else template),
    }


def hash_of_tokenizer(tokenizer: Any) -> str:
    """The ``tokenizer_hash`` of a transformers tokenizer."""
    added = {int(i): str(token) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    pieces = {int(i): piece for piece, i in tokenizer.get_vocab().items()}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    merges: list[Any] = json.loads(backend.to_str())["model"].get("merges", []) if backend is not None else []
    return tokenizer_hash(pieces, merges or [], added)


def tokenizer_hash(pieces: Mapping[int, str], merges: Iterable[str | Sequence[str]], added: Mapping[int, str]) -> str:
    """BLAKE2b-128 hex of a tokenizer's meaning.

    ``pieces``: id → piece of the vocabulary. ``merges``: BPE merges in order, as ``"a b"`` or ``("a", "b")``; empty for
    a tokenizer without merges. ``added``: id → content of the added (special) tokens.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, rows in (
        ("pieces", sorted(pieces.items())),
        ("merges", [m.split(" ", 1) if isinstance(m, str) else list(m) for m in merges]),
        ("added", sorted(added.items())),
    ):
        digest.update(f"{name}\n".encode())
        for row in rows:
            digest.update(json.dumps(row, ensure_ascii=True, separators=(",", ":")).encode())
            digest.update(b"\n")
    return digest.hexdigest()


def template_hash(text: str | None) -> str:
    """BLAKE2b-128 hex of a chat template's text; of the empty text for None."""
    return hashlib.blake2b((text or "").encode(), digest_size=16).hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    by_pattern = (sorted(f for f in folder.glob(pattern) if f.name not in _NOT_WEIGHTS) for pattern in _WEIGHTS)
    return next(filter(None, by_pattern), [])


def _update(digest: Any, file: Path, places: int | None) -> None:
    """With all bytes of a file, or of a safetensors header and 64 KiB at so many places."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        if places is None:
            while block := stream.read(8 << 20):
                digest.update(block)
            return
        if file.suffix == ".safetensors":
            (length,) = struct.unpack("<Q", stream.read(8))
            digest.update(stream.read(min(length, 64 << 20)))
        for i in range(places):
            stream.seek((size - min(_PLACE_BYTES, size)) * i // max(1, places - 1))
            digest.update(stream.read(_PLACE_BYTES))


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model that the training stage needs. ``max_length`` None: the model names no limit."""

    path: str
    policy_hash: str
    tokenizer_hash: str
    chat_template_hash: str
    vocab_size: int | None
    max_length: int | None


def identity_of(run: RunFacts) -> Any:
    """A run's identity, with the model's own chat template where its form that keeps earlier turns stood in for it."""
    identity, chat, config = (run.get(name) or {} for name in ("identity", "chat", "config"))
    own = identity and chat.get("chat_template_replaced") and not config.get("chat_template")
    return {**identity, "chat_template_hash": chat.get("served_chat_template_hash")} if own else identity


def sampler_formats(runs: Iterable[RunFacts], checkpoint: str | None) -> list[str | None]:
    """The number formats that the engines of ``runs`` computed in; that of the model's ``checkpoint`` where none says."""
    recorded = [dtype for run in runs if (dtype := (run.get("engine") or {}).get("dtype"))]
    return recorded or [checkpoint]


def stored_dtype(model: str) -> str | None:
    """The number format that a model's checkpoint, or its base's, was saved in, by its config."""
    file = local_folder(base_of(model)[0]) / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    both = [part.get(key) for part in (config, config.get("text_config") or {}) for key in ("dtype", "torch_dtype")]
    return next((str(dtype).removeprefix("torch.") for dtype in both if dtype), None)


def no_run_names(runs: Sequence[RunFacts], what: str) -> str:
    """That nothing in a lineage names ``what``, and of which stages the run.json files are that it has."""
    stages = ", ".join(sorted({str(run.get("stage") or "collect") for run in runs}))
    return f"no run.json that it leads to ({stages}) names {what}" if stages else f"nothing beside it names {what}"


def check_tokenizer(runs: Sequence[RunFacts], model: ModelFacts, source: str, progress: Progress) -> None:
    """Raises RefusedError when a run in the lineage had another tokenizer; says so when none is known."""
    identities = [identity for run in runs if (identity := identity_of(run))]
    hashes = {identity.get("tokenizer_hash") for identity in identities} - {None}
    if not hashes:
        progress.message(f"warning: {source}: {no_run_names(runs, 'a tokenizer')}, which is not checked")
    other = hashes - {model.tokenizer_hash}
    if other:
        raise RefusedError(
            f"{source}: was sampled with tokenizer {sorted(other)[0]}, {model.path} has {model.tokenizer_hash}: the same "
            "ids would mean other text",
            hint="train a model that has the tokenizer of the rollouts",
        )
    templates = {identity.get("chat_template_hash") for identity in identities} - {None, model.chat_template_hash}
    for template in sorted(templates):
        progress.message(
            f"warning: {source} was sampled with chat template {template}, {model.path} has {model.chat_template_hash}: "
            "the tokens are trained as they were sampled"
        )


def model_facts(model: str) -> ModelFacts:
    """``ModelFacts`` of a model folder. Raises DataError when there is no such model."""
    from gymdata.models._transformers import load_tokenizer

    require("train", "torch", "transformers", "trl", "peft", "accelerate", "datasets")
    policy = policy_facts(model)
    folder = tokenizer_folder(model)
    tokenizer = load_tokenizer(folder, extra="train")
    tokens = tokenizer_facts(tokenizer, tokenizer.chat_template)
    file = local_folder(policy["base"] or model) / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    limits = config.get("text_config") or config
    return ModelFacts(
        path=model,
        policy_hash=policy["policy_hash"],
        tokenizer_hash=tokens["tokenizer_hash"],
        chat_template_hash=tokens["chat_template_hash"],
        vocab_size=limits.get("vocab_size"),
        max_length=limits.get("max_position_embeddings"),
    )
