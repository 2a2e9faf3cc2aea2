"""A critic from exact tokens: the frame of ``rl`` with the distance between values and returns as the loss of a token.

The value that is trained for a token is that of the state before it, which is what ``experience --critic`` reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

from gymdata.commands.train.data import MASK, TrainingData
from gymdata.commands.train.job import Job
from gymdata.commands.train.mapped import read_rows
from gymdata.commands.train.settings import TrainValueConfig
from gymdata.commands.train.trainers.batches import Batch
from gymdata.commands.train.trainers.exact import MeasureHeldOut
from gymdata.commands.train.trainers.rl import SCORED_AT_ONCE, BatchRLTrainer, RLConfig, model_inputs
from gymdata.credit.adaptive import Moments
from gymdata.errors import DataError, UsageError
from gymdata.rollouts.ragged import slices


@dataclass
class ValueConfig(RLConfig):
    """transformers' arguments, with a learning rate for critics."""

    learning_rate: float = 1e-5


CONFIG = ValueConfig
#: The weights of the value head, which a policy lacks.
_HEAD = "score.weight"


def build(
    config: TrainValueConfig,
    data: TrainingData,
    _job: Job,
    *,
    model: Any,
    peft_config: Any,
    **rest: Any,
) -> ExactValueTrainer:
    """The trainer for a job (see ``run``); ``args`` and the rest as there."""
    if not isinstance(model, str):
        raise UsageError("a critic is not made from a LoRA folder", hint="merge the adapter into its base model first")
    critic = loaded_critic(model, rest["args"])
    if peft_config is not None:
        from peft import get_peft_model

        peft_config.task_type = "SEQ_CLS"  # the new head is trained whole
        critic = get_peft_model(critic, peft_config)
    trainer = ExactValueTrainer(data=data, clip=config.value_clip, model=critic, **rest)
    trainer.when_sharded(trainer.measure_before)
    return trainer


def loaded_critic(folder: str, args: RLConfig) -> Any:
    """The model of a folder with a head of one label, whose forward pass gives the value after every token, (B, L).

    A policy gets a head of zeros, so its values begin at 0. Raises DataError when the folder lacks other weights.
    """
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, local_files_only=True, output_loading_info=True, **(args.model_init_kwargs or {})
    )
    lacking = sorted(map(str, loading["missing_keys"]))
    if not hasattr(model, "score") or set(lacking) - {_HEAD}:
        raise DataError(
            f"{folder}: no critic can be made of it (its class is {type(model).__name__}"
            + (f", and its weights lack {', '.join(lacking[:3])})" if lacking else ")"),
            hint="give a causal language model, or a sequence classification model with one label",
        )
    if lacking:
        torch.nn.init.zeros_(model.score.weight)

    def forward(**inputs: Any) -> torch.Tensor:
        arguments = {name: inputs[name] for name in ("input_ids", "attention_mask", "position_ids") if name in inputs}
        hidden = model.base_model(**arguments, use_cache=False).last_hidden_state
        values: torch.Tensor = model.score(hidden)[..., 0].float()
        return values

    # The model's own would score the last token of each row alone.
    model.forward = forward
    return model


class ExactValueTrainer(BatchRLTrainer):
    """Trains ``data`` towards its returns, with PPO's value loss: as TRL's PPOTrainer (``cliprange_value``) and LightRFT's
    ``ValueLoss`` compute it."""

    components = ("value",)
    merges = True

    def __init__(self, *, clip: float | None, **rest: Any) -> None:
        super().__init__(**rest)
        self.clip = clip
        self.before: dict[str, float] = {}
        if self.data.heldout:
            self.add_callback(MeasureHeldOut(self))

    def outputs(self, model: Any, batch: Batch) -> torch.Tensor:
        """The value of the state before each token of the batch but the first, (B, L − 1); 0 where masked."""
        mask = batch["completion_mask"][:, 1:] != 0
        values: torch.Tensor = model(**model_inputs(batch))[:, :-1]
        return values.masked_fill(~mask, 0.0)

    def token_losses(self, outputs: torch.Tensor, inputs: Batch) -> dict[str, torch.Tensor]:
        """½·(V − R)² of each token; with ``clip`` ε ½·max((V − R)², (V_old + clip(V − V_old, −ε, ε) − R)²)."""
        returns, old = inputs["returns"], inputs.get("values")
        loss = (outputs - returns) ** 2
        if self.clip is not None and old is not None:
            near = old + (outputs - old).clamp(-self.clip, self.clip)
            loss = torch.maximum(loss, (near - returns) ** 2)
        return {"value": 0.5 * loss}

    def _note(self, outputs: torch.Tensor, inputs: Batch, mask: torch.Tensor) -> None:
        returns = inputs["returns"][mask].double()
        apart = returns - outputs[mask].double()
        sums = (torch.tensor(len(apart)), apart.sum(), apart.square().sum(), returns.sum(), returns.square().sum())
        for name, value in zip(("tokens", "apart", "apart²", "returns", "returns²"), sums, strict=True):
            self._metrics[name] += float(value)

    def log(self, logs: dict[str, float], *more: Any, **kwargs: Any) -> None:
        """With the explained variance of the tokens since the last entry (those of this process)."""
        if "loss" in logs and (n := self._metrics["tokens"]):
            spread = self._metrics["returns²"] / n - (self._metrics["returns"] / n) ** 2
            left = self._metrics["apart²"] / n - (self._metrics["apart"] / n) ** 2
            if spread > 0:
                logs = {**logs, "explained_variance": 1 - left / spread}
            self._metrics.clear()
        super().log(logs, *more, **kwargs)

    def measure_before(self) -> None:
        """Announce how the model does on held-out tasks before the first step."""
        if not self.data.heldout:
            return
        self.before = self._heldout()
        explained, error = self.before["explained_variance"], self.before["mse"]
        figures = f"explained variance {explained:.3g}, mean squared error {error:.3g}"
        self.note(f"before training, on held-out tasks: {figures}")

    def _heldout(self) -> dict[str, float]:
        """``explained_variance``: 1 − Var(returns − values)/Var(returns); ``mse``: the mean of (values − returns)²."""
        data = self.data.heldout
        assert data is not None
        values = self.score_all(data)
        left, returns, squares = Moments(), Moments(), 0.0
        for rows in slices(values.offsets, SCORED_AT_ONCE):
            read_rows(rows.stop - rows.start)
            trained = data.lists(MASK, rows).values != 0
            targets = data.lists("returns", rows).values[trained].astype(np.float64)
            apart = targets - values.part(rows).values[trained]
            left, returns = left + moments(apart), returns + moments(targets)
            squares += float(np.square(apart).sum())
        # NaN where all returns are equal.
        explained = 1 - left.var / returns.var if returns.m2 > 0 else float("nan")
        return {"explained_variance": explained, "mse": squares / returns.count}

    def heldout_figures(self) -> dict[str, float]:
        return {f"heldout/{name}": value for name, value in self._heldout().items() if np.isfinite(value)}

    def measure(self) -> dict[str, object]:
        """How near the values are to the returns of held-out tasks, before and after the training."""
        if not self.data.heldout:
            return {}
        tokens = int(self.data.heldout.n_trained.sum())
        about = {"tokens": tokens, "tasks": len(set(self.data.heldout.tasks))}
        return {"heldout": {**about, **self._heldout(), "before": self.before}}


def moments(numbers: np.ndarray) -> Moments:
    mean = float(numbers.mean()) if len(numbers) else 0.0
    return Moments(len(numbers), mean, float(np.square(numbers - mean).sum()))
