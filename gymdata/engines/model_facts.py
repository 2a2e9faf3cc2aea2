"""What training and scoring must know of a model: hashes, limits, and whether its tokenizer is that of the rollouts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymdata.errors import RefusedError, require
from gymdata.progress import Progress


@dataclass(frozen=True)
class ModelFacts:
    """What the training stage must know of the model, measured by whoever can load it.

    ``max_length`` None: the model names no limit. The hashes are those of gymdata.rollouts.turns.
    """

    path: str
    policy_hash: str
    tokenizer_hash: str
    chat_template_hash: str
    vocab_size: int | None
    max_length: int | None


def check_tokenizer(runs: list[dict[str, Any]], model: ModelFacts, source: str, progress: Progress) -> None:
    """Raises RefusedError when a run in the lineage had another tokenizer; says so when none is known."""
    known = [(run, identity) for run in runs if (identity := run.get("identity"))]
    hashes = {identity.get("tokenizer_hash") for _, identity in known} - {None}
    if not hashes:
        progress.message(f"warning: {source} does not lead back to a run: its tokenizer is not known and not checked")
    other = hashes - {model.tokenizer_hash}
    if other:
        raise RefusedError(
            f"{source}: was sampled with tokenizer {sorted(other)[0]}, {model.path} has {model.tokenizer_hash}: the same "
            "ids would mean other text",
            hint="train a model that has the tokenizer of the rollouts",
        )
    templates = {identity.get("chat_template_hash") for _, identity in known} - {None, model.chat_template_hash}
    for template in sorted(templates):
        progress.message(
            f"warning: {source} was sampled with chat template {template}, {model.path} has {model.chat_template_hash}: "
            "the tokens are trained as they were sampled"
        )


def model_facts(model: str) -> Any:
    """What the training stage must know of a model folder. Raises DataError when there is no such model."""
    from gymdata.engines import weights
    from gymdata.engines._transformers import load_tokenizer, local_folder

    require("train", "torch", "transformers", "trl", "peft", "accelerate", "datasets")
    policy = weights.policy_facts(model)
    folder = weights.tokenizer_folder(model)
    tokenizer = load_tokenizer(folder, extra="train")
    tokens = weights.tokenizer_facts(tokenizer, tokenizer.chat_template)
    limits = _limits(local_folder(policy["base"] or model))
    return ModelFacts(
        path=model,
        policy_hash=policy["policy_hash"],
        tokenizer_hash=tokens["tokenizer_hash"],
        chat_template_hash=tokens["chat_template_hash"],
        vocab_size=limits.get("vocab_size"),
        max_length=limits.get("max_position_embeddings"),
    )


def _limits(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    return config.get("text_config") or config
