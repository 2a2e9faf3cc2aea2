"""KTO on exact tokens: TRL's KTOTrainer, given saved ids, masks and labels in place of text.

The order of training is drawn once from the seed, so that the completions that a batch lends each other for its estimate of
the KL are of other tasks; every process and every resumed run has that order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from trl.trainer import kto_trainer
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer

from gymdata.commands.train.data import MASK, ROW, TrainingData
from gymdata.commands.train.job import Job
from gymdata.commands.train.settings import TrainKtoConfig
from gymdata.commands.train.token_checksum import IDS
from gymdata.commands.train.trainers.batches import (
    ROWS,
    Batch,
    Collator,
    Examples,
    dataset_of,
    grouping_pays,
    rows_a_step,
    siblings_alternating,
    with_fillers,
)
from gymdata.commands.train.trainers.exact import MeanOverRows, pad_id, skip_weights_hash
from gymdata.models._shared_prefixes import Mode

CONFIG = KTOConfig
_KL = "KL_"
#: Names of further fields of a batch, once its step has begun.
_CROSSED = "crossed"
_REFERENCE = ("ref_logps", "ref_KL_logps")


def training_order(data: TrainingData, sharing: Mode, args: KTOConfig) -> np.ndarray:
    """The order of training: at random, or of two prompts in turn where their rows begin alike."""
    if sharing != "off":
        together = siblings_alternating(data.siblings, np.random.default_rng(args.seed))
        if grouping_pays(sharing, data, together, args):
            return together
    return np.random.default_rng(args.seed).permutation(len(data))


def partners(order: np.ndarray, step: int) -> np.ndarray:
    """The row whose completion each row is compared with: the row before it in its step, the first of a step with the
    last. ``order``: of training; ``step``: rows of a step on all processes."""
    row_before = np.empty_like(order)
    for start in range(0, len(order), step):
        rows = order[start : start + step]
        row_before[rows] = np.roll(rows, 1)
    return row_before


@dataclass(kw_only=True)
class LabelCollator(Collator):
    """Rows to the tensors of TRL's KTO loss. With ``contrast`` (see ``partners``) each prompt is also given the completion
    of another row of ``dataset``, cut to ``longest`` tokens."""

    dataset: Dataset
    contrast: np.ndarray | None
    longest: int

    def __call__(self, examples: Examples) -> Batch:
        batch = super().__call__(examples)
        if self.contrast is not None:
            others = (self.dataset[int(self.contrast[row])] for row in batch[ROWS] % self.rows)
            crossed = [self._crossed(*rows) for rows in zip(examples, others, strict=True)]
            ids, masks = zip(*crossed, strict=True)
            tensors = self.padded(ids, masks, batch[ROWS] >= self.rows)
            batch |= {f"{_KL}{name}": tensor for name, tensor in tensors.items()}
        return batch

    def _crossed(self, x: Mapping[str, Any], y: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """x's prompt with y's completion: (ids, mask)."""
        begin, end = (int(np.argmax(row[MASK] != 0)) for row in (x, y))
        ids = np.concatenate([x[IDS][:begin], y[IDS][end:]])
        mask = np.concatenate([np.zeros(begin, np.int64), y[MASK][end:]])
        return ids[: self.longest], mask[: self.longest]


class ExactKTOTrainer(MeanOverRows, KTOTrainer):
    """KTOTrainer over ``data``, made for a job (see ``run``). ``reference``: float64 (rows, 2), log-probs of each row's own
    and crossed completion. The estimate of the KL is that of all rows of a step, made before its first micro-batch is
    trained."""

    data_collator: Any
    #: The estimate for the step that is trained, and the log-probs that it is made of and that TRL need not compute again.
    step_kl: torch.Tensor | None = None
    crossed: torch.Tensor | None = None

    def __init__(
        self,
        config: TrainKtoConfig,
        data: TrainingData,
        job: Job,
        *,
        sharing: Mode,
        args: KTOConfig,
        processing_class: Any,
        **rest: Any,
    ) -> None:
        args.desirable_weight, args.undesirable_weight = config.desirable_weight, config.undesirable_weight
        self.reference: np.ndarray | None = None
        self.trains = not job.get("dry_run")
        order, dataset = training_order(data, sharing, args), with_fillers(dataset_of(data), args)
        with skip_weights_hash(kto_trainer):
            super().__init__(
                args=args,
                data=data,
                sharing=sharing,
                processing_class=processing_class,
                train_dataset=dataset.select([*order, *range(len(data), len(dataset))]),
                data_collator=LabelCollator(
                    len(data),
                    pad_id(processing_class),
                    args.pad_to_multiple_of,
                    dataset=dataset,
                    contrast=partners(order, rows_a_step(args)) if args.loss_type == "kto" else None,
                    longest=int(data.lengths.max()),
                ),
                **rest,
            )

    def _precompute_ref_logps(self, dataset: Any, _name: str, _size: int) -> Any:
        """Reference log-probabilities under the model as it was loaded, batch by batch as they will be trained."""
        if self.trains:
            self.when_sharded(lambda: self._score_reference(np.asarray(dataset[ROW])))
        return dataset

    def _score_reference(self, order: np.ndarray) -> None:
        def score(model: Any, batch: Batch) -> Any:
            own, crossed = self.compute_ref_log_probs(model, batch)
            return own, torch.zeros_like(own) if crossed is None else crossed

        size = self.args.per_device_train_batch_size
        collate = self.data_collator
        self.reference = self.score_rows(collate.dataset, order, size, collate, score, self.ref_model)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> None:
        super()._get_num_items_in_batch(batch_samples, device)
        if not self.calculate_KL:
            return
        model: Any = self.model_wrapped
        model.train()
        total = torch.zeros(1, dtype=torch.float64, device=device)
        with torch.no_grad(), self.compute_loss_context_manager():
            for batch in batch_samples:
                inputs = self._with_reference(self._prepare_inputs(batch))
                crossed = self._compute_kl_logps(model, inputs)
                batch.update({name: inputs[name] for name in _REFERENCE}, **{_CROSSED: crossed})
                real = torch.from_numpy(batch[ROWS] < self.rows).to(device)
                total += (crossed - inputs["ref_KL_logps"]).double()[real].sum()
        self.step_kl = (self.accelerator.gather(total).sum() / self.step_rows).clamp(min=0)

    def _with_reference(self, batch: Batch) -> Batch:
        """A batch as TRL's loss reads it: without our names, with the reference's log-probs."""
        inputs = {name: value for name, value in batch.items() if name not in (ROWS, _CROSSED)}
        if all(name in inputs for name in _REFERENCE):
            return inputs
        if self.reference is None:
            logps = self.compute_ref_log_probs(self.ref_model or self.model, inputs)
        else:
            logps = (
                torch.from_numpy(self.reference[batch[ROWS]]).to(self.accelerator.device, torch.float32).unbind(dim=1)
            )
        return {**inputs, **dict(zip(_REFERENCE, logps, strict=True))}

    def _compute_kl_logps(self, *arguments: Any) -> Any:
        stock: Any = super()._compute_kl_logps
        return stock(*arguments) if self.crossed is None else self.crossed

    def _compute_loss(self, model: Any, inputs: Batch, _return_outputs: bool = False) -> Any:
        self.token_checksum.count(inputs)
        rows: np.ndarray = inputs[ROWS]
        tensors = self._with_reference(inputs)
        outputs = self.recorded_loss(model, tensors, crossed=inputs.get(_CROSSED))
        # TRL's mean is that of its batch, and so is its estimate of the KL.
        kl = self._metrics["train" if self.model.training else "eval"]["kl"]
        if self.step_kl is not None:
            kl[-1] = float(self.step_kl)
        real = torch.from_numpy(rows < self.rows).to(self.accelerator.device)
        losses = self.row_losses(outputs[-1].log_probs.sum(dim=1) - tensors["ref_logps"], tensors["label"], kl[-1])
        loss = (losses * real).sum() / max(self.real(rows), 1)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * outputs[-1].aux_loss
        self.require_finite(loss, rows)
        return self.of_step(loss, rows)

    def row_losses(self, ratio: torch.Tensor, label: torch.Tensor, kl: float) -> torch.Tensor:
        """The loss of each row (B,) by its log-ratio to the reference: KTO's (arXiv 2402.01306, equation 7) and the unpaired
        APO-zero's (arXiv 2408.06266), which knows no KL, as TRL computes them."""
        good = label.to(ratio.device, torch.bool)
        apart = self.beta * (ratio - (kl if self.calculate_KL else 0.0))
        desirable = self.desirable_weight * (1 - torch.sigmoid(apart))
        return torch.where(good, desirable, self.undesirable_weight * torch.sigmoid(apart))


build = ExactKTOTrainer
