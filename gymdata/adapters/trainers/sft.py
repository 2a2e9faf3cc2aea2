"""Supervised training on the exact tokens of chosen rollouts: the frame of ``rl`` with −log π as the loss of a token.

What always holds: every generation of a rollout is trained and nothing between them; the loss is a mean over the trained
tokens of the whole global batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from gymdata.adapters.trainers.rl import BatchRLTrainer, PolicyLoss, RLConfig, with_head
from gymdata.adapters.trainers.witness import Witness
from gymdata.core.proof import TrainedTokens
from gymdata.core.schema import ROLLOUTS
from gymdata.core.training_sft import SFT_COLUMNS, training_rollouts
from gymdata.store import read_table


@dataclass
class SFTConfig(RLConfig):
    """transformers' arguments, with the learning rate that TRL's SFT begins with."""

    learning_rate: float = 2e-5


CONFIG = SFTConfig


class NegativeLogLikelihood(PolicyLoss):
    """−log π."""

    def __call__(self, logps: torch.Tensor, *_: Any) -> torch.Tensor:
        return -logps


class ExactSFTTrainer(BatchRLTrainer):
    """Trains ``data`` by likelihood; the sampler's log-probs play no part, so nothing is said of ratios."""

    def _note(self, *_: Any) -> None: ...


def build(job: dict[str, Any], **trainer: Any) -> ExactSFTTrainer:
    """The trainer for a job (see ``run``)."""
    table = read_table(job["data"], ROLLOUTS, columns=SFT_COLUMNS)
    data = training_rollouts(table, job["select"], job["min_reward"], job["max_length"], job["data"])
    witness = Witness(data.sequences, 1, TrainedTokens.from_json(job["trained_tokens"]))
    model, peft = trainer.pop("model"), trainer.pop("peft_config")
    if isinstance(model, str):
        model = AutoModelForCausalLM.from_pretrained(model, **(trainer["args"].model_init_kwargs or {}))
    return ExactSFTTrainer(
        data=data, witness=witness, loss=NegativeLogLikelihood(), model=with_head(model, data, peft), **trainer
    )
