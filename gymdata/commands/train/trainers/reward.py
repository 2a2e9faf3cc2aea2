"""A reward model from exact tokens: TRL's RewardTrainer, given the saved ids of pairs in place of text.

The token that fills up a batch ends no sequence of the file, so the score is read where the answer really ends.
"""

from __future__ import annotations

# ruff: noqa: ARG002 - a method of the library's is given more than it needs
import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer

from gymdata.commands.train.data import SIDES, TrainingData, lists_of
from gymdata.commands.train.job import Job
from gymdata.commands.train.settings import TrainRewardConfig
from gymdata.commands.train.token_checksum import IDS
from gymdata.commands.train.trainers.batches import ROWS, Batch, Collator, dataset_of, with_fillers
from gymdata.commands.train.trainers.exact import MeanOverRows, MeasureHeldOut
from gymdata.errors import UsageError
from gymdata.stats import mean_ci

CONFIG = RewardConfig


def last_ids(data: TrainingData) -> set[int]:
    """The ids that sequences end with, trained or held out."""
    files = [data] + ([] if data.heldout is None else [data.heldout])
    lists = (lists_of(batch[IDS]) for file in files for batch in file.batches(IDS))
    return {int(i) for ids in lists for i in np.unique(ids.values[ids.offsets[1:] - 1])}


def distinct_pad(tokenizer: Any, ends: Collection[int]) -> int:
    """A padding id that is neither the end token nor in ``ends``: the tokenizer's own if possible, else the unknown
    token, else any other special one. Raises UsageError without one."""
    special = sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}, reverse=True)
    for candidate in (tokenizer.pad_token_id, tokenizer.unk_token_id, *special):
        if candidate is not None and candidate != tokenizer.eos_token_id and candidate not in ends:
            return int(candidate)
    raise UsageError(
        "the tokenizer has no token to fill batches up with that does not also end an answer",
        hint="add a special token for padding to the tokenizer (and a row to the model's embedding)",
    )


class ExactRewardTrainer(MeanOverRows, RewardTrainer):
    """RewardTrainer over ``data``, made for a job (see ``run``)."""

    args: RewardConfig
    merges = True

    def __init__(
        self,
        _config: TrainRewardConfig,
        data: TrainingData,
        _job: Job,
        *,
        args: RewardConfig,
        model: Any,
        peft_config: Any,
        processing_class: Any,
        **rest: Any,
    ) -> None:
        if not isinstance(model, str):
            raise UsageError(
                "a reward model is not made from a LoRA folder", hint="merge the adapter into its base model first"
            )
        if peft_config is not None:
            peft_config.task_type = "SEQ_CLS"  # the new head is trained whole
        self.tokenizer = processing_class
        self.tokenizer.pad_token = processing_class.convert_ids_to_tokens(
            distinct_pad(processing_class, last_ids(data))
        )
        self.uniform = bool(np.all(data.numbers("weight") == 1))
        pad = processing_class.pad_token_id
        self.collator = Collator(len(data), pad, args.pad_to_multiple_of, sides=len(SIDES))
        super().__init__(
            args=args,
            data=data,
            model=model,
            peft_config=peft_config,
            processing_class=processing_class,
            train_dataset=with_fillers(dataset_of(data), args),
            data_collator=self.collator,
            **rest,
        )
        if data.heldout:
            self.add_callback(MeasureHeldOut(self))

    def compute_loss(
        self, model: Any, inputs: Batch, _return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.token_checksum.count(inputs)
        rows: np.ndarray = inputs[ROWS]
        real = rows < len(self.data)
        trl_inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        weight, margin = inputs["weight"], inputs["margin"]
        if margin.any():
            trl_inputs["margin"] = margin
        stock: Any = super().compute_loss
        loss, outputs = stock(model, trl_inputs, return_outputs=True)
        if not (self.uniform and real.all()):
            weight = weight * torch.from_numpy(real).to(weight)
            loss = self._weighted(outputs.logits.squeeze(-1).float(), weight, margin, int(real.sum()))
        self.require_finite(loss, rows)
        return self.of_step(loss, rows)

    def _weighted(self, scores: torch.Tensor, weight: torch.Tensor, margin: torch.Tensor, real: int) -> torch.Tensor:
        """TRL's loss as a mean of weighted pairs."""
        chosen, rejected = scores.chunk(2)
        pairs = -F.logsigmoid(chosen - rejected - margin)
        if self.args.center_rewards_coefficient is not None:
            pairs = pairs + self.args.center_rewards_coefficient * (chosen + rejected) ** 2
        return (weight * pairs).sum() / max(real, 1)

    def heldout_scores(self) -> np.ndarray:
        """float64 (held-out pairs, 2): the scores of chosen and rejected."""
        pairs = self.data.heldout
        assert pairs is not None
        collate = replace(self.collator, rows=len(pairs))

        def score(model: Any, batch: Batch) -> Any:
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
            return model(**inputs, use_cache=False).logits.squeeze(-1).chunk(2)

        size = self.args.per_device_train_batch_size
        return self.score_rows(dataset_of(pairs), pairs.scoring_order(), size, collate, score)

    def heldout_figures(self) -> dict[str, float]:
        return {"heldout/accuracy": float(np.mean(np.diff(self.heldout_scores(), axis=1) < 0))}

    def measure(self) -> dict[str, object]:
        """How often the chosen side of held-out pairs scores higher, with a 95 % interval over tasks."""
        if not self.data.heldout:
            return {}
        return {"heldout": ranking(self.heldout_scores(), self.data.heldout.tasks)}

    def finish(self, out: Path) -> None:
        """The tokenizer's files were copied as they are; they must name the pad token that the model knows."""
        file = out / "tokenizer_config.json"
        settings = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps({**settings, "pad_token": self.tokenizer.pad_token}, indent=2) + "\n")


build = ExactRewardTrainer


def ranking(scores: np.ndarray, tasks: Sequence[str]) -> dict[str, object]:
    """Pairs, tasks, and the share of pairs whose chosen side (column 0) scores higher; equal scores count half."""
    apart = scores[:, 0] - scores[:, 1]
    right = np.where(apart > 0, 1.0, np.where(apart == 0, 0.5, 0.0))
    accuracy, low, high = mean_ci(right, tasks)
    return {
        "pairs": len(right),
        "tasks": len(set(tasks)),
        "accuracy": accuracy,
        "ci95": [low, high],
        "mean_margin": float(apart.mean()),
    }
