"""Settings of the training commands.

What always holds: a key that is not ours is one of the trainer's own (TRL's config class, transformers' arguments, TRL's
model and LoRA settings) and is checked by the trainer process before it loads any data; nothing is guessed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pydantic

from gymdata.config.base import Config


class TrainConfig(Config):
    """What every training command takes. ``trainer`` holds the keys that go to TRL, as ``learning_rate: 1e-6``."""

    model: str
    output: Path
    max_length: int | None = pydantic.Field(None, ge=2)
    num_processes: int = pydantic.Field(1, ge=1)
    trainer: dict[str, Any] = pydantic.Field(default_factory=dict)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _sort_keys(cls, values: Any) -> Any:
        """In files and ``--set`` the trainer's keys stand beside ours; here they move into ``trainer``."""
        if not isinstance(values, dict):
            return values
        own = {key: value for key, value in values.items() if key in cls.model_fields}
        rest = {key: value for key, value in values.items() if key not in cls.model_fields}
        own["trainer"] = {**(own.get("trainer") or {}), **rest}
        return own


class TrainDpoConfig(TrainConfig):
    """``gymdata train-dpo``. ``ref``: where reference log-probabilities come from. The loss of pair i is weighted with its
    ``weight`` (unless ``pair_weights`` is off), and ``margin_scale`` times its margin is the margin that the loss asks for.
    """

    ref: Literal["model", "saved"] = "model"
    pair_weights: bool = True
    margin_scale: float = pydantic.Field(0.0, ge=0.0)


class TrainRlConfig(TrainConfig):
    """``gymdata train-rl``. The losses and their bounds are those of ``gymdata.adapters.trainers.rl.PolicyLoss``.

    ``kl_beta``: weight of the k3 KL to the reference: the file's ref_logprobs, else the model as it was before training.
    ``allow_biased_logprobs``: train though the saved log-probabilities are not of the distribution that was sampled from.
    """

    loss: Literal["ppo_clip", "cispo", "tis_reinforce"] = "ppo_clip"
    clip_low: float = pydantic.Field(0.2, ge=0.0, le=1.0)
    clip_high: float = pydantic.Field(0.2, ge=0.0)
    cispo_low: float = pydantic.Field(1.0, ge=0.0)
    cispo_high: float = pydantic.Field(4.0, ge=0.0)
    tis_cap: float = pydantic.Field(2.0, gt=0.0)
    kl_beta: float = pydantic.Field(0.0, ge=0.0)
    allow_biased_logprobs: bool = False


class TrainSftConfig(TrainConfig):
    """``gymdata train-sft``. ``select``: the best rollout of a group, all with a reward, or all; ``min_reward``: a floor."""

    select: Literal["best", "above", "all"] = "best"
    min_reward: float | None = pydantic.Field(None, allow_inf_nan=False)
