"""DPO on exact tokens: TRL's DPOTrainer, given saved ids and masks in place of text.

Only what TRL has no place for is computed here: reference log-probabilities without a text dataset, and the weight and
margin of a pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from trl.trainer import dpo_trainer
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

from gymdata.commands.train.data import SIDES, TrainingData
from gymdata.commands.train.job import Job
from gymdata.commands.train.settings import OWN_PAIR_LOSSES, TrainDpoConfig
from gymdata.commands.train.trainers.batches import ROWS, Batch, Collator, dataset_of, with_fillers
from gymdata.commands.train.trainers.exact import MeanOverRows, pad_id, skip_weights_hash
from gymdata.errors import UsageError

CONFIG = DPOConfig
#: Losses that are a mean over pairs, in which a weight and a margin can be used.
WEIGHABLE = ("sigmoid", "hinge", "ipo", "robust", "sigmoid_norm", "sft", *OWN_PAIR_LOSSES)


class ExactDPOTrainer(MeanOverRows, DPOTrainer):
    """DPOTrainer over pairs, made for a job (see ``run``). ``reference``: float64 (n, 2), log-probabilities of chosen and
    rejected, once they are computed."""

    #: Tokens of the chosen sides of the step that is trained.
    step_tokens: int = 0

    def __init__(
        self,
        config: TrainDpoConfig,
        data: TrainingData,
        job: Job,
        *,
        args: DPOConfig,
        processing_class: Any,
        **rest: Any,
    ) -> None:
        self.reference: np.ndarray | None = None
        self.trains = not job.get("dry_run")
        self.ref_saved = config.ref == "saved"
        if self.ref_saved:
            args.precompute_ref_log_probs = True
        self.read, self.reward_scale = data.read_by_loss, config.reward_scale
        #: TRL has a loss of its own for each; it is given another in the place of those that it does not know.
        self.own = sorted(set(args.loss_type) & set(OWN_PAIR_LOSSES))
        # TRL's sigmoid has no smoothing: cDPO is computed here.
        smoothed = ["sigmoid with label_smoothing"] if args.label_smoothing and "sigmoid" in args.loss_type else []
        even = np.all(data.numbers("weight") == 1) and np.all(data.numbers("margin") == 0)
        self.uniform = bool(even and not self.own and not smoothed)
        if not self.uniform:
            own, odd = [*self.own, *smoothed], [kind for kind in args.loss_type if kind not in WEIGHABLE]
            if odd or args.ld_alpha is not None or args.use_weighting or args.f_divergence_type != "reverse_kl":
                what = f"loss_type {', '.join(odd)}" if odd else "ld_alpha, use_weighting and f_divergence_type"
                able = f"(loss types that can: {', '.join(WEIGHABLE)})"
                if own:
                    raise UsageError(
                        f"loss_type {', '.join(own)} cannot be combined with {what} {able}",
                        hint="choose loss types of these, and leave the other settings out",
                    )
                raise UsageError(
                    f"the pairs carry weights or margins, which {what} cannot use {able}",
                    hint="choose one of these, or train every pair alike: --set pair_weights=false, margin_scale 0",
                )
        with skip_weights_hash(dpo_trainer):
            super().__init__(
                args=args,
                data=data,
                processing_class=processing_class,
                train_dataset=with_fillers(dataset_of(data), args),
                data_collator=Collator(len(data), pad_id(processing_class), args.pad_to_multiple_of, sides=len(SIDES)),
                **rest,
            )

    def _precompute_ref_logps(self, dataset: Any, _name: str, batch_size: int) -> Any:
        """Reference log-probabilities of every pair under the model as it was loaded, shared among the processes."""
        if self.trains and not self.ref_saved:
            self.when_sharded(lambda: self._score_reference(batch_size))
        return dataset

    def _score_reference(self, batch_size: int) -> None:
        self.reference = self.score_rows(
            self.train_dataset,
            self.data.scoring_order(),
            batch_size,
            self.data_collator,
            self.compute_ref_log_probs,
            self.ref_model,
        )

    def _compute_loss(self, model: Any, inputs: Batch, _return_outputs: bool = False) -> Any:
        self.token_checksum.count(inputs)
        inputs = dict(inputs)
        rows: np.ndarray = inputs.pop(ROWS)
        real = rows < len(self.data)
        read = {name: inputs.pop(name) for name in self.read}
        if self.ref_saved:
            saved = read["logprobs"].sum(dim=1, dtype=torch.float64).float()
            inputs["ref_chosen_logps"], inputs["ref_rejected_logps"] = saved.chunk(2)
        elif self.reference is not None:
            logps = torch.from_numpy(self.reference[rows % len(self.data)]).to(self.accelerator.device, torch.float32)
            inputs["ref_chosen_logps"], inputs["ref_rejected_logps"] = logps.unbind(dim=1)
        full = real.all() and ("sft" not in self.loss_types or self.step_rows in (0, len(rows)))
        plain = self.uniform and (full or not set(self.loss_types) <= set(WEIGHABLE))
        if plain:
            loss = self.stock_loss(model, inputs)
        else:
            read["weight"] = read["weight"] * torch.from_numpy(real).to(read["weight"])
            loss = self.weighted_loss(model, inputs, read)
        self.require_finite(loss, rows)
        if not real.all():
            loss = loss * (len(rows) / max(self.real(rows), 1))  # fillers have no gradient, but are in the mean
        return self.of_step(loss, rows)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> None:
        super()._get_num_items_in_batch(batch_samples, device)
        halves = [batch["completion_mask"][: len(batch[ROWS]), 1:].sum() for batch in batch_samples]
        self.step_tokens = int(self.accelerator.gather(torch.stack(halves).sum().to(device)[None]).sum())

    def weighted_loss(self, model: Any, inputs: Batch, read: Batch) -> torch.Tensor:
        """Mean over the batch of weight · loss(margin) of the pairs, whose numbers are ``read``. TRL runs the model and logs
        its metrics; its loss is set aside."""
        if "ref_chosen_logps" not in inputs:
            reference = self.compute_ref_log_probs(self.ref_model or self.model, inputs)
            inputs["ref_chosen_logps"], inputs["ref_rejected_logps"] = reference
        losses = ["sigmoid" if kind in self.own else kind for kind in self.loss_types]
        (output,) = self.recorded_loss(model, inputs, loss_types=losses)
        mask = inputs["completion_mask"][:, 1:]
        token_logps = output.log_probs[:, -mask.size(1) :] * mask
        reference = torch.cat([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]])
        per_pair = pair_losses(
            list(zip(self.loss_types, self.loss_weights, strict=True)),
            token_logps.sum(dim=1),
            reference,
            mask.sum(dim=1),
            beta=self.beta,
            margin=read["margin"].to(token_logps),
            rewards=read["reward_margin"].to(token_logps) if "reward_margin" in read else None,
            reward_scale=self.reward_scale,
            label_smoothing=self.label_smoothing,
            tokens=self.step_tokens / self.step_rows if self.step_rows else None,
        )
        loss: torch.Tensor = (read["weight"].to(per_pair) * per_pair).mean()
        return loss


build = ExactDPOTrainer


def pair_losses(
    losses: Sequence[tuple[str, float]],
    logps: torch.Tensor,
    reference: torch.Tensor,
    lengths: torch.Tensor,
    *,
    beta: float,
    margin: torch.Tensor,
    label_smoothing: float = 0.0,
    rewards: torch.Tensor | None = None,
    reward_scale: float = 1.0,
    tokens: float | None = None,
) -> torch.Tensor:
    """The loss of each pair, shape (B,); ``logps``, ``reference`` and ``lengths`` (2·B,), chosen sides first.

    With a margin of 0 the mean is what TRL computes for the same loss types, but for ``sigmoid`` with ``label_smoothing`` ε:
    −(1 − ε)·log σ(d) − ε·log σ(−d) (cDPO, Mitchell 2023), which TRL leaves out (``sft``: the batch's mean over tokens). The
    margin m asks for β·(difference of log-ratios) ≥ m: sigmoid and robust use it as in DPO with an offset
    (arXiv:2402.10571), hinge raises its corner by it, ipo its target. Raises KeyError for a loss not in ``WEIGHABLE``.

    ``tokens``: the mean of chosen sides' tokens that ``sft`` divides by, where the batch is a part of a step; their mean of
    the batch otherwise.

    ``rewards`` (B,): Δr, the chosen side's reward less the rejected side's, with which d = β·(difference of log-ratios) is
    compared: ``rpo_sq`` (d − η·Δr)², ``rpo_fwd_kl`` KL(σ(d) ‖ σ(η·Δr)), ``rpo_bwd_kl`` KL(σ(η·Δr) ‖ σ(d)) (reward-aware
    preference optimization, arXiv 2406.11704; η ``reward_scale``; which KL is called which is NeMo-Aligner's choice) and
    ``rebel`` (d − Δr)² (arXiv 2404.16767; its η is 1/β).
    """
    chosen, rejected = (logps - reference).chunk(2)
    long = lengths.clamp(min=1)
    chosen_mean, rejected_mean = ((logps - reference) / long).chunk(2)
    offset = beta * (chosen - rejected) - margin
    pairs = len(chosen)
    mean_tokens = lengths[:pairs].sum().clamp(min=1) / pairs if tokens is None else max(tokens, 1.0)
    apart, targets = beta * (chosen - rejected), torch.zeros_like(chosen) if rewards is None else rewards
    formulas = {
        "sigmoid": lambda: -(1 - label_smoothing) * F.logsigmoid(offset) - label_smoothing * F.logsigmoid(-offset),
        "hinge": lambda: torch.relu(1 - offset),
        "ipo": lambda: (chosen_mean - rejected_mean - (1 + 2 * margin) / (2 * beta)) ** 2,
        "robust": lambda: (
            (-(1 - label_smoothing) * F.logsigmoid(offset) + label_smoothing * F.logsigmoid(-offset))
            / (1 - 2 * label_smoothing)
        ),
        "sigmoid_norm": lambda: -F.logsigmoid(beta * (chosen_mean - rejected_mean) - margin),
        "rpo_sq": lambda: reward_distance(reward_scale * targets, apart, "sq"),
        "rpo_fwd_kl": lambda: reward_distance(reward_scale * targets, apart, "fwd_kl"),
        "rpo_bwd_kl": lambda: reward_distance(reward_scale * targets, apart, "bwd_kl"),
        "rebel": lambda: reward_distance(targets, apart, "sq"),
        "sft": lambda: -logps[:pairs] / mean_tokens,
    }
    return sum((scale * formulas[kind]() for kind, scale in losses), torch.zeros_like(offset))


def reward_distance(target: torch.Tensor, scores: torch.Tensor, kind: str) -> torch.Tensor:
    """The distance of σ(scores) from σ(target), each (B,): ``fwd_kl`` KL(σ(scores) ‖ σ(target)), ``bwd_kl`` the other way,
    ``sq`` (scores − target)². Reward-aware preference optimization, Nemotron-4 340B, arXiv 2406.11704; which KL is called
    which follows NeMo-Aligner."""
    if kind == "sq":
        return (scores - target) ** 2
    ours, theirs = (F.logsigmoid(torch.stack([each, -each])) for each in (scores, target))
    first, second = (ours, theirs) if kind == "fwd_kl" else (theirs, ours)
    return (torch.exp(first) * (first - second)).sum(dim=0)
