"""KTO on exact tokens: TRL's KTOTrainer, given saved ids, masks and labels in place of text.

Invariants: TRL's tokenising, truncating and masking are not reached; its losses, metrics, LoRA and distributed code
are used as they are. The order of training is drawn once from the seed, so that the completions that a batch lends each
other for its estimate of the KL are of other tasks; every process and every resumed run has that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer

from gymdata.engines._shared_prefixes import Mode
from gymdata.errors import UsageError
from gymdata.train.sequence_data import TrainingLabels
from gymdata.train.settings import TrainKtoConfig
from gymdata.train.trainers.batches import (
    ROWS,
    WORTH,
    padded,
    padded_lists,
    row_dataset,
    shared_tokens,
    siblings_alternating,
    to_multiple,
)
from gymdata.train.trainers.exact import Exact, pad_id
from gymdata.train.trainers.token_check_callback import TokenChecksumCallback

CONFIG = KTOConfig
_KL = "KL_"


def build(config: TrainKtoConfig, data: TrainingLabels, _job: dict[str, Any], **trainer: Any) -> ExactKTOTrainer:
    """The trainer for a job (see ``run``); ``trainer`` are KTOTrainer's own arguments, ``args`` and ``witness`` among
    them."""
    args = trainer["args"]
    args.desirable_weight, args.undesirable_weight = config.desirable_weight, config.undesirable_weight
    if args.loss_type == "kto" and args.per_device_train_batch_size < 2:
        raise UsageError(
            "settings: per_device_train_batch_size is 1, KTO compares a rollout with others of its batch",
            hint="give at least 2, or --set loss_type=apo_zero_unpaired",
        )
    return ExactKTOTrainer(data=data, **trainer)


@dataclass
class LabelCollator:
    """Rows to the tensors of TRL's KTO loss. With ``contrast`` each prompt is also given the completion of the row before
    it in the batch (the first gets the last's), cut to the longest sequence of the file."""

    data: TrainingLabels
    pad_token_id: int
    pad_to_multiple_of: int | None
    contrast: bool

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        rows = np.fromiter((example["row"] for example in examples), dtype=np.int64)
        filler, source = rows >= len(self.data), rows % len(self.data)
        batch: dict[str, Any] = {"label": torch.from_numpy(self.data.label[source]), ROWS: rows}
        ids, attention, mask = padded(self.data.sequences, source, self.pad_token_id, self.pad_to_multiple_of)
        self._put(batch, "", ids, attention, mask, filler)
        if self.contrast:
            lists = [self._crossed(int(x), int(y)) for x, y in zip(source, np.roll(source, 1), strict=True)]
            self._put(batch, _KL, *padded_lists(lists, self.pad_token_id, self.pad_to_multiple_of), filler)
        return batch

    def _crossed(self, x: int, y: int) -> tuple[np.ndarray, np.ndarray]:
        """x's prompt with y's completion: (ids, mask)."""
        sequences, first = self.data.sequences, self.data.first
        prompt = sequences.token_ids[x][: first[x]]
        limit = int(sequences.lengths.max())
        ids = np.concatenate([prompt, sequences.token_ids[y][first[y] :]])
        mask = np.concatenate([np.zeros(len(prompt), np.int8), sequences.loss_mask[y][first[y] :]])
        return ids[:limit], mask[:limit]

    @staticmethod
    def _put(batch: dict[str, Any], prefix: str, ids: Any, attention: Any, mask: Any, filler: np.ndarray) -> None:
        mask[filler] = 0
        names = ("input_ids", "attention_mask", "completion_mask")
        batch.update({f"{prefix}{n}": torch.from_numpy(a) for n, a in zip(names, (ids, attention, mask), strict=True)})


class ExactKTOTrainer(Exact, KTOTrainer):
    """KTOTrainer over ``data``. ``reference``: float64 (rows, 2), log-probs of each row's own and crossed completion."""

    def __init__(
        self,
        *,
        data: TrainingLabels,
        witness: TokenChecksumCallback,
        sharing: Mode,
        args: KTOConfig,
        processing_class: Any,
        **rest: Any,
    ) -> None:
        self.data, self.witness, self.sharing = data, witness, sharing
        self.reference: np.ndarray | None = None
        order = self._order(args)
        super().__init__(
            args=args,
            processing_class=processing_class,
            train_dataset=row_dataset(len(data), args, order),
            data_collator=LabelCollator(
                data, pad_id(processing_class), to_multiple(args.pad_to_multiple_of), args.loss_type == "kto"
            ),
            **rest,
        )
        self.watched()

    def _order(self, args: KTOConfig) -> np.ndarray:
        """The order of training: at random, or of two prompts in turn where their rows begin alike."""
        rng, sequences = np.random.default_rng(args.seed), self.data.sequences
        if self.sharing != "off":
            together = siblings_alternating(sequences.siblings, rng)
            if self.sharing == "on" or shared_tokens(sequences, together, args.train_batch_size) > WORTH:
                return together
        return np.random.default_rng(args.seed).permutation(len(self.data))

    def _let_siblings_meet(self) -> None:
        """They do, in the order that was drawn."""

    def _precompute_ref_logps(self, dataset: Any, _name: str, _size: int) -> Any:
        """Reference log-probabilities under the model as it was loaded, batch by batch as they will be trained."""
        self.share_prefixes()
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise UsageError(
                "reference log-probabilities cannot be computed beforehand with sharded models",
                hint="--set precompute_ref_log_probs=false keeps a reference model beside the policy",
            )
        rows, size = list(dataset["row"]), self.args.per_device_train_batch_size
        shares = [rows[i : i + size] for i in range(0, len(rows), size)]
        found = torch.zeros(len(rows), 2, dtype=torch.float64)
        for share in shares[self.accelerator.process_index :: self.accelerator.num_processes]:
            batch = self.data_collator([{"row": row} for row in share])
            batch.pop(ROWS)
            batch = {key: value.to(self.accelerator.device) for key, value in batch.items()}
            own, crossed = self._reference_of(self.ref_model or self.model, batch)
            found[torch.tensor(share), 0] = own.double().cpu()
            if crossed is not None:
                found[torch.tensor(share), 1] = crossed.double().cpu()
        found = self.accelerator.reduce(found.to(self.accelerator.device), reduction="sum")
        self.reference = found.cpu().numpy()
        return dataset

    def _reference_of(self, *arguments: Any) -> Any:
        stock: Any = self.compute_ref_log_probs
        return stock(*arguments)

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False) -> Any:
        self.witness.count(inputs)
        inputs = dict(inputs)
        rows: np.ndarray = inputs.pop(ROWS)
        if self.reference is not None:
            known = torch.from_numpy(self.reference[rows]).to(self.accelerator.device, torch.float32)
            inputs["ref_logps"], inputs["ref_KL_logps"] = known.unbind(dim=1)
        stock: Any = super()._compute_loss
        loss = stock(model, inputs, return_outputs)
        value = loss[0] if return_outputs else loss
        self.require_finite(value, rows)
        real = int((rows < len(self.data)).sum())
        if real in (0, len(rows)) or return_outputs:
            return loss
        # Fillers have no gradient, but they are among those that the mean was taken over.
        return value * (len(rows) / real)
