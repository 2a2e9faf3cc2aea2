"""Supervised training on the exact tokens of chosen rollouts: the frame of ``rl`` with −log π as the loss of a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gymdata.commands.train.data import TrainingData
from gymdata.commands.train.job import Job
from gymdata.commands.train.settings import TrainSftConfig
from gymdata.commands.train.trainers.batches import Batch, PackedCollator, packed_rows
from gymdata.commands.train.trainers.exact import pad_id
from gymdata.commands.train.trainers.rl import (
    BatchRLTrainer,
    RLConfig,
    loaded,
    model_inputs,
    with_head,
)


@dataclass
class SFTConfig(RLConfig):
    """transformers' arguments, with the learning rate that TRL's SFT begins with."""

    learning_rate: float = 2e-5


CONFIG = SFTConfig
#: Default tokens of a packed row; also TRL's.
PACK_LENGTH = 1024


class ExactSFTTrainer(BatchRLTrainer):
    """Trains ``data`` by likelihood; the sampler's log-probs play no part, so no ratios are reported."""

    components = ("ce",)

    def token_losses(self, logps: torch.Tensor, *_: Any) -> dict[str, torch.Tensor]:
        return {"ce": -logps}

    def _note(self, *_: Any) -> None: ...


def forward_kl(logits: torch.Tensor, top_ids: torch.Tensor, top_logprobs: torch.Tensor) -> torch.Tensor:
    """KL(teacher ‖ student) of each position over the teacher's k most likely tokens and one class for all others, (N,).

    Σ over the k of p·(log p − log q), plus (1 − Σp)·(log(1 − Σp) − log(1 − Σq)), in float32 or wider. ``logits`` (N, V):
    the student's, at the teacher's temperature; ``top_ids`` (N, k) int64 with −1 for none, ``top_logprobs`` (N, k) with
    −inf. As the k tokens and the rest are a partition of the vocabulary, this is at most the KL over it, and 0 where the
    two agree on it; without the last term a student would be drawn to put all of its mass on the k (Anshumann et al.
    2025, "Sparse Logit Sampling", arXiv 2503.16870, on the bias of a truncated teacher). Forward KL: Hinton et al. 2015,
    "Distilling the Knowledge in a Neural Network" (arXiv 1503.02531).
    """
    top_logprobs = top_logprobs.to(logits.dtype)
    none = top_ids < 0
    log_q = torch.log_softmax(logits, dim=-1)
    p = top_logprobs.exp()
    head = torch.where(none, 0.0, p * (top_logprobs.masked_fill(none, 0.0) - log_q.gather(1, top_ids.clamp(min=0))))
    rest = 1 - p.sum(dim=1)
    # Rounded sums of float32 are this far from 1 where nothing is left.
    has_rest = rest > 1e-6
    vocabulary = logits.shape[1]
    named = torch.zeros(len(logits), vocabulary + 1, dtype=torch.bool, device=logits.device)
    named.scatter_(1, top_ids.masked_fill(none, vocabulary), True)
    others = log_q.masked_fill(named[:, :vocabulary] & has_rest[:, None], -torch.inf).logsumexp(dim=1)
    rest = rest.masked_fill(~has_rest, 1.0)
    tail = torch.where(has_rest, rest * (rest.log() - others), 0.0)
    return head.sum(dim=1) + tail


class DistillTrainer(ExactSFTTrainer):
    """Trains ``data`` towards the distributions that its sampler had at each token, at the temperature of its rows."""

    def outputs(self, model: Any, batch: Batch) -> torch.Tensor:
        """The loss of each token of the batch, (B, L − 1); 0 where masked."""
        mask = batch["completion_mask"][:, 1:] != 0
        columns = mask.any(dim=0).nonzero().squeeze(1)
        inputs = model_inputs(batch)
        logits = model(**inputs, logits_to_keep=columns).logits if self.keeps else model(**inputs).logits[:, columns]
        chosen = mask[:, columns]
        rows = chosen.nonzero()[:, 0]
        flat = logits[chosen].float() / batch["temperature"][rows, None]
        losses = forward_kl(flat, batch["top_ids"][:, columns][chosen], batch["top_log_probs"][:, columns][chosen])
        return torch.zeros(mask.shape, device=losses.device).masked_scatter(mask, losses)

    def token_losses(self, losses: torch.Tensor, *_: Any) -> dict[str, torch.Tensor]:
        return {"ce": losses}


def build(
    config: TrainSftConfig,
    data: TrainingData,
    _job: Job,
    *,
    model: Any,
    peft_config: Any,
    **trainer: Any,
) -> ExactSFTTrainer:
    """The trainer for a job (see ``run``)."""
    model = with_head(loaded(model, trainer["args"]), data, peft_config)
    if config.distill:
        distilling = DistillTrainer(data=data, model=model, **trainer)
        distilling.note(f"distilling the {data.head_ids} most likely tokens of the teacher, the others as one class")
        return distilling
    if not config.packing:
        return ExactSFTTrainer(data=data, model=model, **trainer)
    flash = "flash" in str(getattr(model.config, "_attn_implementation", ""))
    length = config.pack_length or config.max_length or max(PACK_LENGTH, int(data.lengths.max()))
    rows = packed_rows(data, length)
    collator = PackedCollator(len(rows), len(data), pad_id(trainer["processing_class"]), flash)
    training = ExactSFTTrainer(data=data, model=model, packed=(rows, collator), **trainer)
    full = data.lengths.sum() / (length * len(rows))
    training.note(f"packed {len(data):,} sequences into {len(rows):,} rows of {length:,} tokens, {full:.0%} full")
    return training
