"""Models for forward passes over saved ids: found, loaded and described, for ``audit`` and ``experience``."""

from __future__ import annotations

from typing import Any

from gymdata.errors import DataError, require
from gymdata.models.scoring import Critic, PolicyModel
from gymdata.store.paths import Facts


def load_policy(
    model: str, dtype: str = "auto", device: str | None = None, batch_tokens: int | None = None
) -> tuple[Facts, PolicyModel]:
    """(what the model is and how it is computed, the model) of a folder, a LoRA folder or a hub name on this machine.

    The facts: path, policy_hash, checkpoint_dtype (that it was saved in), tokenizer (its folder), tokenizer_hash and
    chat_template_hash (None without one), dtype and device. Raises DataError when there is no such model.
    """
    return _loaded("ForwardPolicy", model, dtype, device, batch_tokens)


def load_critic(
    model: str, dtype: str = "auto", device: str | None = None, batch_tokens: int | None = None
) -> tuple[Facts, Critic]:
    """The same of a critic: a sequence classification model with one label."""
    return _loaded("ForwardCritic", model, dtype, device, batch_tokens)


def _loaded(kind: str, model: str, dtype: str, device: str | None, batch_tokens: int | None) -> tuple[Facts, Any]:
    require("train", "torch", "transformers", "trl", "peft")
    from gymdata.models import _torch, model_identity

    policy = model_identity.policy_facts(model)
    source = _torch.Place(policy["base"] or model, policy["adapter"], dtype, device)
    loaded = getattr(_torch, kind)(source, batch_tokens or _torch.BATCH_TOKENS)
    identity = {
        "path": model,
        "policy_hash": policy["policy_hash"],
        "checkpoint_dtype": model_identity.stored_dtype(model),
    }
    return {**identity, **tokenizer_facts(model), **loaded.facts}, loaded


def tokenizer_facts(model: str) -> Facts:
    """tokenizer (its folder), tokenizer_hash and chat_template_hash of a model's folder; None each without one."""
    from gymdata.models import model_identity
    from gymdata.models._transformers import load_tokenizer

    folder = model_identity.tokenizer_folder(model)
    try:
        tokenizer = load_tokenizer(folder, extra="train")
    except DataError:
        return {"tokenizer": None, "tokenizer_hash": None, "chat_template_hash": None}
    hashes = model_identity.tokenizer_facts(tokenizer, tokenizer.chat_template)
    return {"tokenizer": folder, **{name: hashes[name] for name in ("tokenizer_hash", "chat_template_hash")}}
