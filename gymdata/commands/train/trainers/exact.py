"""The base of all trainers on exact tokens, whichever library class they extend."""

from __future__ import annotations

# ruff: noqa: ARG002 - a callback is given more than it needs
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from gymdata.commands.train.data import TrainingData
from gymdata.commands.train.trainers.batches import (
    ROWS,
    Batch,
    EpochSampler,
    grouping_pays,
    shared_tokens,
    siblings_together,
)
from gymdata.commands.train.trainers.token_check_callback import TokenChecksumCallback
from gymdata.errors import OutsideError, UsageError
from gymdata.models._shared_prefixes import Mode, Sharing, reshard, share_prefixes
from gymdata.progress import Progress


class MeasureHeldOut(TrainerCallback):
    """Writes a trainer's held-out figures (``heldout_figures``) to the metrics after each epoch.

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


class Exact(Trainer):
    """The base of all trainers; list it before the library's. ``token_checksum`` follows the training; ``sharing``: whether
    shared prefixes of a batch are computed once; ``before_training``: figures for run.json that are known before the first
    step."""

    data: TrainingData
    #: What is installed on the model that is trained, and the group of each row where batches are grouped.
    shared: Sharing | None = None
    groups: np.ndarray | None = None
    #: Whether an adapter is merged when the model is saved: what loads a classifier knows no adapters.
    merges: bool = False
    #: Rows of the batches since the last step.
    step_batches: tuple[np.ndarray, ...] = ()
    #: Steps that the loss scaling of fp16 left out.
    steps_skipped: int = 0
    #: Work to do once accelerate has sharded the model.
    waiting: tuple[Callable[[], Any], ...] = ()
    args: Any
    model: Any
    train_dataset: Any

    def __init__(
        self,
        *,
        args: Any,
        data: TrainingData,
        token_checksum: TokenChecksumCallback,
        sharing: Mode,
        progress: Progress,
        **rest: Any,
    ) -> None:
        self.data, self.token_checksum, self.sharing = data, token_checksum, sharing
        self.progress, self.before_training = progress, dict[str, object]()
        super().__init__(args=args, **rest)
        self._refuse_unsavable()
        self.share_prefixes()
        token_checksum.bind(self)
        self.add_callback(token_checksum)

    def share_prefixes(self) -> None:
        """Install sharing on the models, once; a model that cannot is named."""
        if self.sharing == "off" or self.shared is not None:
            return
        if self.sharded_late:
            self.sharing = "off"
            self.note("prefix sharing is off: accelerate shards the model later")
            return
        installed: list[Sharing] = []
        for model in (getattr(self, "ref_model", None), self.model):
            if model is None:
                continue
            shared = share_prefixes(model.get_base_model() if hasattr(model, "get_base_model") else model, self.sharing)
            if isinstance(shared, str):
                self.sharing = "off"
                self.note(f"prefix sharing is off: {shared}")
                return
            installed.append(shared)
        self.shared = installed[-1]
        if self.args.train_sampling_strategy == "random":
            self._group_siblings()

    def _group_siblings(self) -> None:
        """Have rows of one prompt follow each other where that saves enough."""
        order = siblings_together(self.data.siblings, np.random.default_rng(self.args.seed))
        if grouping_pays(self.sharing, self.data, order, self.args):
            self.groups = self.data.siblings
            saved, _ = shared_tokens(self.data, order, self.args.train_batch_size)
            self.note(
                f"prefix sharing: rollouts with the same prompt are trained together, {saved:.0%} of their tokens are "
                "shared; --prefix-sharing off trains in random order, to other weights"
            )

    def note(self, text: str) -> None:
        """Say something, once for all processes."""
        if self.is_world_process_zero():
            self.progress.message(text)

    @property
    def rows(self) -> int:
        """Rows of the dataset that are no fillers."""
        return len(self.data)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        size = len(self.train_dataset)
        if self.args.train_sampling_strategy == "random" and (self.groups is not None or size > self.rows):
            return EpochSampler(self.rows, size, seed, self.groups)
        return super()._get_train_sampler(dataset)

    @property
    def sharded_late(self) -> bool:
        """Whether accelerate shards the model (FSDP, DeepSpeed), which it does when the training begins."""
        return bool(self.is_fsdp_enabled or self.is_deepspeed_enabled)

    def when_sharded(self, work: Callable[[], Any]) -> None:
        """Have work done that runs the model: now, or once accelerate has sharded it, before a checkpoint is loaded."""
        if self.sharded_late:
            self.waiting = (*self.waiting, work)
        else:
            work()

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        own: Any = super()
        if not self.waiting:
            return own._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        prepared = own._prepare_for_training(max_steps, train_dataloader, None)
        while self.waiting:
            work, *rest = self.waiting
            work()
            self.waiting = tuple(rest)
        if resume_from_checkpoint is not None:
            if self.is_deepspeed_enabled:
                strict = not hasattr(self.model, "peft_config")
                load: Any = deepspeed_load_checkpoint
                load(self.model_wrapped, resume_from_checkpoint, load_module_strict=strict)
            else:
                self._load_from_checkpoint(resume_from_checkpoint, self.model_wrapped)
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            own._load_scaler(resume_from_checkpoint)
        return prepared

    def run_deferred(self, max_steps: int) -> None:
        """Shard the model and do the work that waits for it, when nothing is trained."""
        if self.waiting:
            self._prepare_for_training(max_steps, self.get_train_dataloader(), None)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        own: Any = super()
        own._save(output_dir, state_dict if state_dict is None else without_tied(self.model, state_dict))

    def end(self) -> None:
        """Finish the trackers and the process group, at the very end; transformers 5.17 has done so after ``train``."""
        getattr(super(), "end", lambda: None)()

    def batches_to_score(
        self, dataset: Dataset, order: np.ndarray, size: int, collate: Any
    ) -> Iterator[tuple[np.ndarray, Batch]]:
        """This process's share of the rows ``order`` of ``dataset``, ``size`` at a time: (rows, the tensors of ``collate``).

        The parts of a sharded model only run together, so every process gets as many batches as the others: one that
        would have one less gets its last again, and no rows of it. Before the first step, its progress is
        reported.
        """
        batches = [order[i : i + size] for i in range(0, len(order), size)]
        among, device = self.accelerator.num_processes, self.accelerator.device
        for number in range(self.accelerator.process_index, -(-len(batches) // among) * among, among):
            rows = batches[min(number, len(batches) - 1)]
            batch = collate([dataset[int(row)] for row in rows])
            batch.pop(ROWS)
            yield rows[: len(rows) if number < len(batches) else 0], {k: v.to(device) for k, v in batch.items()}
            if not self.state.global_step and self.accelerator.is_main_process:
                self.progress.update(scored=min((number + among) * size, len(order)), total=len(order))

    @contextmanager
    def scoring(self, model: Any = None) -> Iterator[Any]:
        """Within this the model, or ``model``, only scores. Afterwards it is as it was, sharded too."""
        self.share_prefixes()
        model = (self.model_wrapped if self.is_deepspeed_enabled else self.model) if model is None else model
        training = model.training
        model.eval()
        try:
            with torch.no_grad(), self.compute_loss_context_manager():
                yield model
        finally:
            model.train(training)
            reshard(model)

    def score_rows(
        self,
        dataset: Dataset,
        order: np.ndarray,
        size: int,
        collate: Any,
        score: Callable[[Any, Batch], Any],
        model: Any = None,
    ) -> np.ndarray:
        """float64 (len(order), 2): two numbers of ``score(model, batch)`` for each row of ``order``, all of ``dataset``,
        ``size`` at a time, shared among the processes."""
        scores = torch.zeros(len(order), 2, dtype=torch.float64)
        with self.scoring(model) as scorer:
            for rows, batch in self.batches_to_score(dataset, order, size, collate):
                both = torch.stack(tuple(score(scorer, batch)), dim=1).double().cpu()
                scores[torch.from_numpy(rows)] = both[: len(rows)]
        return self.on_every_process(scores)

    def on_every_process(self, array: torch.Tensor) -> np.ndarray:
        """The sum over the processes of arrays that each filled for its share, with zeros elsewhere."""
        if self.accelerator.num_processes > 1:
            array = self.accelerator.reduce(array.to(self.accelerator.device), reduction="sum").cpu()
        return np.asarray(array.numpy())

    def _prepare_input(self, data: Any) -> Any:
        """Numbers of a batch keep their format, in which they are proven: with DeepSpeed the library would round log-probs
        and advantages to the model's."""
        own: Any = super()
        return data.to(self.args.device) if isinstance(data, torch.Tensor) else own._prepare_input(data)

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Only ends the epoch when a training resumes after its last step within it: the library would train one more
        step."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]  # transformers gives it no types
        else:
            self.control: Any = self.callback_handler.on_epoch_end(self.args, self.state, self.control)

    def _get_grad_norm(self, *args: Any, **named: Any) -> Any:
        """The norm before clipping, of every step. Raises OutsideError where it is not finite: clipped, such a gradient is
        zero, and not clipped it makes the weights NaN."""
        own: Any = super()
        norm, batches, self.step_batches = own._get_grad_norm(*args, **named), self.step_batches, ()
        if norm is None or math.isfinite(norm):
            return norm
        if self.args.fp16:  # whose loss scaling leaves such steps out and lowers the scale
            self.steps_skipped += 1
            return norm
        rows = np.unique(np.concatenate(batches))
        raise OutsideError(
            "trainer",
            f"the norm of the gradient became {norm} at step {self.state.global_step + 1}, "
            f"on rollouts {self._rollouts_of(rows)}",
            hint="leave out those with a huge advantage, weight, margin or log-prob, or lower learning_rate; the last "
            "checkpoint is before this",
        )

    def report_skipped(self) -> None:
        """Report how many steps the loss scaling of fp16 left out. Raises OutsideError when it was all of them."""
        steps = self.state.global_step
        if not self.steps_skipped:
            return
        text, way = (
            f"{self.steps_skipped:,} of {steps:,} steps changed nothing: their gradients were infinite in fp16",
            ("train with bf16, or look for huge advantages, weights or margins in the data"),
        )
        if self.steps_skipped >= steps:
            raise OutsideError("trainer", text, hint=way)
        self.note(f"warning: {text}")

    def measure(self) -> dict[str, object]:
        """Figures of the trained model, for run.json. Called on every process, before the model is saved."""
        return {}

    def _refuse_unsavable(self) -> None:
        """Raises UsageError for a way of sharding that would train a model and save none."""
        if self.merges and hasattr(self.model, "peft_config") and self.sharded_late:
            raise UsageError(
                "a LoRA adapter of this trainer is merged into its model, which cannot be done while the model is sharded",
                hint="train without sharding (an adapter needs far less memory than a model), or without LoRA",
            )
        zero = self.accelerator.deepspeed_config["zero_optimization"] if self.is_deepspeed_enabled else {}
        if zero.get("stage") == 3 and not zero.get("stage3_gather_16bit_weights_on_model_save"):
            raise UsageError(
                "with this configuration DeepSpeed's ZeRO-3 saves no model that can be loaded",
                hint="zero3_save_16bit_model: true in the configuration of accelerate, below deepspeed_config",
            )

    def save_trained(self, out: Path) -> None:
        """The trained model, or its adapter, into ``out``. Called on every process."""
        model = self.accelerator.unwrap_model(self.model)
        if self.merges and hasattr(model, "merge_and_unload"):
            if self.is_world_process_zero():
                model.merge_and_unload().save_pretrained(out)
            return
        if self.is_fsdp_enabled:  # accelerate saves shards by default
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        self.save_model(str(out))

    def finish(self, out: Path) -> None:
        """The last changes to ``out``, on the main process, after the tokenizer's files are there."""

    def require_finite(self, loss: torch.Tensor, rows: np.ndarray) -> None:
        """``rows``: of the batch that ``loss`` was computed from; fillers may be among them."""
        self.step_batches = (*self.step_batches, rows)
        if torch.isfinite(loss):
            return
        raise OutsideError(
            "trainer",
            f"the loss became {loss.item()} at step {self.state.global_step + 1}, on rollouts {self._rollouts_of(rows)}",
            hint="lower learning_rate or max_grad_norm, or leave these rollouts out; the last checkpoint is before this",
        )

    def _rollouts_of(self, rows: np.ndarray) -> str:
        return ", ".join(self.data.rollouts_of(rows[rows < len(self.data)]))


def without_tied(model: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """The weights that a model is saved with. Those that were put together of a sharded model no longer show that they are
    tied, one tensor under two names."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    return {name: value for name, value in weights.items() if tied.get(name) not in weights}


@contextmanager
def skip_weights_hash(library: Any) -> Iterator[None]:
    """Within this a module of TRL does not compute a name of the model's weights, for a cache of reference log-probs that is
    never written here; it cannot of a sharded model, and of a large one it takes long."""
    own, library.hash_module = library.hash_module, lambda *_: None
    try:
        yield
    finally:
        library.hash_module = own


class MeanOverRows(Exact):
    """For trainers whose loss is a mean over the rows of a batch: the mean over all rows of a step, however many
    micro-batches and processes it is split into."""

    #: Rows of the step that is trained, fillers left out; 0 outside of a training.
    step_rows: int = 0
    current_gradient_accumulation_steps: int
    compute_ref_log_probs: Any

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> None:
        count = torch.tensor([sum(self.real(batch[ROWS]) for batch in batch_samples)], device=device)
        self.step_rows = int(self.accelerator.gather(count).sum())

    def stock_loss(self, model: Any, inputs: Batch) -> Any:
        """TRL's loss."""
        stock: Any = super()._compute_loss  # type: ignore[misc]  # TRL's trainers have it
        return stock(model, inputs, False)

    def recorded_loss(self, model: Any, inputs: Batch, **attributes: Any) -> list[Any]:
        """The model's outputs while TRL computes its loss with the reference log-probs that ``inputs`` hold, and logs its
        metrics. ``attributes``: of this trainer, while it does."""
        outputs: list[Any] = []

        def recorded(**kwargs: Any) -> Any:
            outputs.append(model(**kwargs))
            return outputs[-1]

        attributes["precompute_ref_logps"] = True
        before = {name: getattr(self, name) for name in attributes}
        vars(self).update(attributes)
        try:
            self.stock_loss(recorded, inputs)
            return outputs
        finally:
            vars(self).update(before)

    def real(self, rows: np.ndarray) -> int:
        """How many of these rows are no fillers."""
        return int((rows < self.rows).sum())

    def of_step(self, loss: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """The part that a micro-batch has in the mean of its step. ``loss``: the mean over those of ``rows`` that are no
        fillers."""
        if not self.step_rows:
            return loss
        # The library takes the mean over micro-batches and processes.
        parts = self.current_gradient_accumulation_steps * self.args.world_size
        scaled: torch.Tensor = loss * (self.real(rows) * parts / self.step_rows)
        return scaled


def pad_id(tokenizer: Any) -> int:
    """The padding id of a language model; always masked, so it may be the end token."""
    candidates = [tokenizer.pad_token_id, tokenizer.eos_token_id]
    return next((int(i) for i in candidates if i is not None), 0)
