"""Settings of ``gymdata experience``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pydantic

from gymdata.settings import Config, Dtype, Names


class ExperienceConfig(Config):
    """How experiences are made from scored rollouts; the formulas are those of ``gymdata.credit``.

    ``reward``: a named part of the reward, or a re-scoring beside the rollouts; the total reward when not given.
    ``rewards``: what is placed: the outcome on the rollout's last generated token, each step's reward on its turn's last,
    or both. ``discount_unit``: γ between tokens, or only between turns.
    ``zero_variance``: groups without variance are dropped (default where the estimator compares rollouts) or kept.
    ``overlong_buffer``: punish answers that come this close to ``max_new_tokens`` (default: what the run allowed).
    ``token_columns``: a Parquet file with rollout_id and any of ref_logprobs, values, entropy: lists with one number a
    sampled token, in turn order. ``reference``: a model whose log-probs and entropies fill those columns. ``critic``: a
    sequence classification model with one label; its values fill theirs, and for gae stand after truncated rollouts.
    ``device``, ``dtype`` and ``batch_tokens``: how both are computed, as in ``AuditConfig``. ``abandoned``: retries that
    nothing continues. ``target_agents``: only the turns of these agents have loss mask 1.
    """

    estimator: Literal["grpo", "rloo", "reinforce", "reinforce-baseline", "gae", "cpgd", "dr-grpo"] = "grpo"
    reward: str | None = None
    rewards: Literal["outcome", "steps", "steps+outcome"] = "outcome"
    discount_unit: Literal["token", "turn"] = "token"
    gamma: float = pydantic.Field(1.0, ge=0.0, le=1.0)
    lam: float = pydantic.Field(1.0, ge=0.0, le=1.0)
    kl_coef: float = pydantic.Field(0.0, ge=0.0, allow_inf_nan=False)
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    reward_norm: Literal["none", "std", "mean-std"] = "none"
    reward_clip: float | tuple[float, float] | None = None
    overlong_buffer: int | None = pydantic.Field(None, ge=1)
    overlong_factor: float = pydantic.Field(1.0, ge=0.0)
    max_new_tokens: int | None = pydantic.Field(None, ge=1)
    clip_filter_weights: bool = False
    clip_filter_eps: float = pydantic.Field(3.0, gt=0.0)
    clip_filter_lamda: float = pydantic.Field(1.0, ge=0.0)
    whiten: bool = False
    normalize_cross_batch: bool = False
    mean_only: bool = False
    advantage_clip: float | None = pydantic.Field(None, gt=0.0)
    entropy_ratio: float | None = pydantic.Field(None, gt=0.0, le=1.0)
    zero_variance: Literal["drop", "keep"] | None = None
    truncated: Literal["keep", "drop"] = "keep"
    abandoned: Literal["keep", "drop"] = "keep"
    token_columns: Path | None = None
    reference: str | None = None
    critic: str | None = None
    device: str | None = None
    dtype: Dtype | None = None
    batch_tokens: int | None = pydantic.Field(None, ge=1)
    target_agents: Names = ()

    @pydantic.field_validator("estimator", mode="before")
    @classmethod
    def _dashes(cls, value: Any) -> Any:
        return value.replace("_", "-") if isinstance(value, str) else value

    @pydantic.field_validator("reward_clip", mode="before")
    @classmethod
    def _bounds(cls, value: Any) -> Any:
        """``5`` or ``-1,1``."""
        if isinstance(value, str):
            parts = [float(part) for part in value.split(",")]
            return parts[0] if len(parts) == 1 else parts
        return value

    @pydantic.model_validator(mode="after")
    def _one_normalisation(self) -> ExperienceConfig:
        if self.whiten and self.normalize_cross_batch:
            raise ValueError("whiten and normalize_cross_batch are two forms of one thing: choose one")
        return self
