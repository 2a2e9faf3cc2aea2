"""What every trainer on exact tokens shares, whichever library class it is made from.

Invariants: the library sees row numbers for a dataset and tensors from our collator, so it has nothing to tokenise,
cut or drop; a loss that is not finite stops the run with the rollouts of its batch.
"""

from __future__ import annotations

# ruff: noqa: ARG002 - a callback is given more than it needs
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerCallback

from gymdata.engines._shared_prefixes import Mode, Sharing, share_prefixes
from gymdata.errors import OutsideError
from gymdata.train.pair_data import TrainingData
from gymdata.train.trainers.batches import WORTH, SiblingSampler, shared_tokens, siblings_together
from gymdata.train.trainers.metrics import event
from gymdata.train.trainers.token_check_callback import TokenChecksumCallback


class MeasureHeldOut(TrainerCallback):
    """Writes a trainer's held-out figures to the metrics after each epoch.

    A checkpoint of an epoch's last step is saved before the epoch ends, so a resumed training cannot know whether they
    were written: Recorder drops those of the step that it resumes from, and they are measured again.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Within an epoch the library ends the epoch after the resumed steps; at its end it begins the next one.
        if state.global_step and state.epoch and math.isclose(state.epoch, round(state.epoch), abs_tol=1e-9):
            self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Not the trainer's own log, which would close its running means.
        Trainer.log(self.trainer, self.trainer.heldout_figures())


def save_merged(trainer: Any, out: Path) -> None:
    """The whole model into ``out``, an adapter merged: what loads it as a classifier knows no adapters."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    if not hasattr(model, "merge_and_unload"):
        trainer.save_model(str(out))
    elif trainer.is_world_process_zero():
        model.merge_and_unload().save_pretrained(out)


class Exact:
    """Comes before the library's trainer among the bases. ``data``, ``witness`` and ``sharing`` are set before its
    ``__init__``."""

    data: TrainingData
    witness: TokenChecksumCallback
    #: Whether models run what the sequences of a batch begin with once.
    sharing: Mode
    #: What is installed on the model that is trained, and the group of each row where siblings are to meet.
    shared: Sharing | None = None
    groups: np.ndarray | None = None
    state: Any
    args: Any
    callback_handler: Any

    def share_prefixes(self) -> None:
        """Install sharing on the models, once; a model that cannot is named."""
        if self.sharing == "off" or self.shared is not None:
            return
        found: list[Sharing] = []
        for model in (getattr(self, "ref_model", None), self.model):  # type: ignore[attr-defined]  # the Trainer's
            if model is None:
                continue
            made = share_prefixes(model.get_base_model() if hasattr(model, "get_base_model") else model, self.sharing)
            if isinstance(made, str):
                self.sharing = "off"
                self._note_sharing(f"prefix sharing is off: {made}")
                return
            found.append(made)
        self.shared = found[-1]
        self._let_siblings_meet()

    def _let_siblings_meet(self) -> None:
        """Have rows of one prompt follow each other where that saves enough."""
        sequences, sides = self.data.sequences, self.witness.sides
        groups = sequences.siblings[::sides]
        order = siblings_together(groups, np.random.default_rng(self.args.seed))
        saved = shared_tokens(sequences, order, self.args.train_batch_size, sides)
        if self.sharing == "on" or saved > WORTH:
            self.groups = groups
            self._note_sharing(
                f"prefix sharing: rollouts with the same prompt are trained together, {saved:.0%} of their tokens are shared"
            )

    def _note_sharing(self, text: str) -> None:
        if self.is_world_process_zero():  # type: ignore[attr-defined]  # the Trainer beside this mixin has it
            event("note", text=text)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        if self.groups is None or self.args.train_sampling_strategy != "random":
            return super()._get_train_sampler(dataset)  # type: ignore[misc]  # the Trainer beside this mixin has it
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return SiblingSampler(self.groups, len(self.train_dataset), seed)  # type: ignore[attr-defined]  # the Trainer's

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns: Any = ["row"]

    def watched(self) -> None:
        """Have the witness follow this trainer, and prefixes be shared; the library's ``__init__`` is done."""
        self.share_prefixes()
        self.witness.bind(self)
        self.add_callback(self.witness)  # type: ignore[attr-defined]  # the Trainer beside this mixin has it

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Of a training that resumes after its last step, within an epoch, the library would train one step more."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)  # type: ignore[misc]  # the Trainer beside this mixin has it
        else:
            self.control: Any = self.callback_handler.on_epoch_end(self.args, self.state, self.control)

    def measure(self) -> dict[str, Any]:
        """What the trained model is like, for run.json. Called on every process, before the model is saved."""
        return {}

    def save_trained(self, out: Path) -> None:
        """The trained model into ``out``. Called on every process."""
        self.save_model(str(out))  # type: ignore[attr-defined]  # the Trainer beside this mixin has it

    def heldout_figures(self) -> dict[str, float]:
        """What the model makes of held-out tasks, for the metrics of each epoch."""
        return {}

    def finish(self, out: Path) -> None:
        """The last touch to ``out``, on the main process, after the tokenizer's files are there."""

    def require_finite(self, loss: torch.Tensor, rows: np.ndarray) -> None:
        """``rows``: of the batch that ``loss`` was computed from; fillers may be among them."""
        if torch.isfinite(loss):
            return
        ids = self.data.rollouts_of(rows[rows < len(self.data)])
        raise OutsideError(
            "trainer",
            f"the loss became {loss.item()} at step {self.state.global_step + 1}, on rollouts {', '.join(ids)}",
            hint="lower learning_rate or max_grad_norm, or leave these rollouts out; the last checkpoint is before this",
        )


def pad_id(tokenizer: Any) -> int:
    """What fills up a batch of a language model; masked everywhere, so the end token may serve."""
    known = [tokenizer.pad_token_id, tokenizer.eos_token_id]
    return next((int(i) for i in known if i is not None), 0)
