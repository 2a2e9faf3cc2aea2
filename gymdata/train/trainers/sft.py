"""Supervised training on the exact tokens of chosen rollouts: the frame of ``rl`` with −log π as the loss of a token.

Invariants: every generation of a rollout is trained and nothing between them; the loss is a mean over the trained
tokens of the whole global batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gymdata.train.sequence_data import TrainingExperiences, pack
from gymdata.train.settings import TrainSftConfig
from gymdata.train.trainers.batches import PackedCollator
from gymdata.train.trainers.exact import pad_id
from gymdata.train.trainers.metrics import event
from gymdata.train.trainers.rl import BatchRLTrainer, RLConfig, loaded, with_head


@dataclass
class SFTConfig(RLConfig):
    """transformers' arguments, with the learning rate that TRL's SFT begins with."""

    learning_rate: float = 2e-5


CONFIG = SFTConfig
#: Tokens of a packed row, where nobody says; it is also TRL's length of a row.
PACK_LENGTH = 1024


class ExactSFTTrainer(BatchRLTrainer):
    """Trains ``data`` by likelihood; the sampler's log-probs play no part, so no ratios are reported."""

    components = ("ce",)

    def token_losses(self, logps: torch.Tensor, *_: Any) -> dict[str, torch.Tensor]:
        return {"ce": -logps}

    def _note(self, *_: Any) -> None: ...


def build(
    config: TrainSftConfig,
    data: TrainingExperiences,
    _job: dict[str, Any],
    *,
    model: Any,
    peft_config: Any,
    **trainer: Any,
) -> ExactSFTTrainer:
    """The trainer for a job (see ``run``)."""
    model = with_head(loaded(model, trainer["args"]), data, peft_config)
    packed = None
    if config.packing:
        flash = "flash" in str(getattr(model.config, "_attn_implementation", ""))
        length = config.pack_length or config.max_length or max(PACK_LENGTH, int(data.sequences.lengths.max()))
        packed = packing(data, length, pad_id(trainer["processing_class"]), flash)
    return ExactSFTTrainer(data=data, model=model, packed=packed, **trainer)


def packing(data: TrainingExperiences, capacity: int, pad: int, flat: bool) -> PackedCollator:
    """Sequences put together into rows of ``capacity`` tokens, and how many is reported."""
    lengths = data.sequences.lengths
    bins = pack(lengths, capacity)
    filled = lengths.sum() / (capacity * len(bins))
    event(
        "note", text=f"packed {len(data):,} sequences into {len(bins):,} rows of {capacity:,} tokens, {filled:.0%} full"
    )
    return PackedCollator(data.sequences, bins, pad, flat)
