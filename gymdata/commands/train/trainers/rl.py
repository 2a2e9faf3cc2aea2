"""Batch RL on saved experiences: a transformers.Trainer whose loss uses the saved ids, log-probs and advantages.

Each component of the loss is a mean over its tokens (or sequences) of the whole global batch, so neither batch size,
accumulation nor the number of processes changes it.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainingArguments
from trl.trainer.utils import add_fused_lm_head, selective_log_softmax

from gymdata.commands.train.data import MASK, TrainingData
from gymdata.commands.train.heads import has_kept_sets
from gymdata.commands.train.job import Job
from gymdata.commands.train.losses import LOSSES
from gymdata.commands.train.mapped import read_rows
from gymdata.commands.train.settings import TrainRlConfig
from gymdata.commands.train.trainers.batches import (
    ROWS,
    SEGMENTS,
    Batch,
    Collator,
    PackedCollator,
    dataset_of,
    with_fillers,
)
from gymdata.commands.train.trainers.exact import Exact, pad_id
from gymdata.commands.train.trainers.policy_loss import PolicyLoss, k3
from gymdata.errors import RefusedError, UsageError, counted
from gymdata.losses import score_centering
from gymdata.models._shared_prefixes import Mode
from gymdata.models.model_identity import sampler_formats, stored_dtype
from gymdata.rollouts.logprobs import MEANS, NEAR, Ratios, Rounding, ratio_of_version, ratio_text
from gymdata.rollouts.ragged import Ragged, offsets_of, slices
from gymdata.store.lineage import lineage
from gymdata.store.run_json import unnamed_file

#: Of another model's: with a share outside of ``NEAR`` and a loss of effective sample beyond this half, there is no ratio to
#: learn from.
_HALF = 0.5
#: Below this effective sample size a file is another policy's: fewer than a tenth of its tokens carry all the weight.
LEAST_EFFECTIVE = 0.1
#: Tokens that the ratio before the first step is measured on.
RATIO_TOKENS = 1 << 14
#: The same in a dry run.
DRY_RATIO_TOKENS = 1 << 11
#: Tokens whose scores are looked at or exchanged at once.
SCORED_AT_ONCE = 1 << 20


@dataclass
class RLConfig(TrainingArguments):
    """transformers' arguments, with a learning rate for policies. ``max_length`` is applied before the trainer starts."""

    learning_rate: float = 1e-6
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    model_init_kwargs: dict[str, Any] | None = field(default=None)


CONFIG = RLConfig


def build(
    config: TrainRlConfig,
    data: TrainingData,
    job: Job,
    *,
    model: Any,
    peft_config: Any,
    **rest: Any,
) -> BatchRLTrainer:
    """The trainer for a job (see ``run``), its model compared with the saved log-probs; ``args`` and the rest as there."""
    model = with_head(loaded(model, rest["args"]), data, peft_config)
    longest = int(data.n_trained.max())
    runs = list(lineage(job["data"]))
    kept_sets = has_kept_sets(data, runs)
    loss = PolicyLoss.of(config, longest)
    if kept_sets and "ref_logprobs" in data.read_by_loss and (loss.needs_reference or config.kl_beta):
        raise UsageError(
            "ref_logprobs of this file are over the whole vocabulary, and its model is normalized over kept sets",
            hint="leave --kl-beta out, or drop the column: the model before training is then the reference",
        )
    kind: Any = HeadedTrainer if kept_sets or config.score_centering else BatchRLTrainer
    trainer: BatchRLTrainer = kind(
        data=data, loss=loss, kl_beta=config.kl_beta, model=model, kept_sets=kept_sets, **rest
    )
    if config.score_centering:
        trainer.note(f"score centering with the sampler's head at each token, of up to {data.head_ids} ids")
    trainer.on_policy = data.facts.policy_hashes == {job["policy_hash"]}
    trainer.sampled_in = sampler_formats(runs, stored_dtype(job["model"]))
    trainer.of_ratios = config.loss not in LOSSES or LOSSES[config.loss].of_ratios or config.sequence_mask is not None
    trainer.when_sharded(
        lambda: trainer.compare(refuse=not config.allow_biased_logprobs, trains=not job.get("dry_run", False))
    )
    return trainer


def loaded(model: Any, args: RLConfig) -> Any:
    """The model of a folder, or the model."""
    return (
        AutoModelForCausalLM.from_pretrained(model, local_files_only=True, **(args.model_init_kwargs or {}))
        if isinstance(model, str)
        else model
    )


def with_head(model: Any, data: TrainingData, peft: Any) -> Any:
    """With one temperature in the file, log-probs are computed without holding all logits; and the LoRA wrapper, if
    requested."""
    base: PreTrainedModel = model.get_base_model() if hasattr(model, "get_base_model") else model
    temperatures = np.unique(data.numbers("temperature"))
    if len(temperatures) == 1:
        add_fused_lm_head(base, temperature=float(temperatures[0]))
    if peft is not None:
        from peft import get_peft_model

        model = get_peft_model(model, peft)
    return model


def model_inputs(batch: Batch) -> Batch:
    """The model's inputs of a batch. Packed rows have positions in place of an attention mask."""
    names = ("input_ids", "attention_mask", "position_ids")
    return {"use_cache": False, **{name: batch[name] for name in names if name in batch}}


def weighed(batch: Batch, component: str) -> torch.Tensor:
    """The weight of each token of a batch in a component, (B, L − 1): 1 where the file has none, 0 where masked."""
    mask = batch["completion_mask"][:, 1:] != 0
    weights: torch.Tensor = batch.get(f"{component}_weight", mask) * mask
    return weights


def of_policy(sequences: Mapping[str, np.ndarray]) -> np.ndarray:
    """Which tokens of these columns the policy sampled and is trained for, bool: trained ones whose ``rl_weight`` is not
    0."""
    trained: np.ndarray = sequences[MASK] != 0
    return trained & (sequences["rl_weight"] != 0) if "rl_weight" in sequences else trained


class BatchRLTrainer(Exact):
    """Trains ``data`` with ``loss``, in rows that ``packed`` makes when given. After ``compare`` the reference is known
    where the loss needs one.

    The loss is the sum of ``components``, each Σ w·ℓ / Σ [w ≠ 0] over the trained tokens of the global batch with the
    weights of its column (1 where there is none): ``rl`` the policy loss, whose mean is its aggregation's, ``ce``
    −log π, ``ref_kl`` the KL to the reference (k3).
    """

    data: TrainingData
    components: tuple[str, ...] = ("rl",)
    #: Whether the model is the one that sampled the file, and whether the loss has ratios to the sampler.
    on_policy, of_ratios = False, True
    #: The number formats in which the saved log-probs were computed.
    sampled_in: Sequence[str | None] = ("float32",)
    #: Up to this many logits per batch (a gigabyte in float32) are held at once; beyond, a head that computes them in parts,
    #: and again for the gradient, saves memory for time.
    max_logits = 2**28

    def __init__(
        self,
        *,
        data: TrainingData,
        sharing: Mode,
        args: RLConfig,
        processing_class: Any,
        loss: PolicyLoss = PolicyLoss(),
        kl_beta: float = 0.0,
        kept_sets: bool = False,
        packed: tuple[Dataset, PackedCollator] | None = None,
        **rest: Any,
    ) -> None:
        #: Whether the model is normalized over each token's head, which is all that could be sampled.
        self.kept_sets = kept_sets
        self.policy_loss, self.kl_beta = loss, kl_beta
        if "ce_weight" in data.read_by_loss:
            self.components += ("ce",)
        if kl_beta or "ref_kl_weight" in data.read_by_loss:
            self.components += ("ref_kl",)
        #: Tokens of the last batch that the loss limits.
        self.limited: torch.Tensor | None = None
        temperatures = np.unique(data.numbers("temperature"))
        self.fused, self.temperature = len(temperatures) == 1, float(temperatures[0])
        self.collator = Collator(len(data), pad_id(processing_class), args.pad_to_multiple_of)
        rows, collator = packed or (dataset_of(data), self.collator)
        self._n_rows = len(rows)
        self._metrics: dict[str, float] = defaultdict(float)
        super().__init__(
            args=args,
            data=data,
            # Packed rows have positions of their own, and no siblings side by side.
            sharing="off" if packed is not None else sharing,
            processing_class=processing_class,
            train_dataset=with_fillers(rows, args),
            data_collator=collator,
            **rest,
        )
        model: Any = self.model
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.vocabulary = int(base.config.get_text_config().vocab_size)
        self.keeps = "logits_to_keep" in inspect.signature(base.forward).parameters
        # Each component is divided by its tokens of the whole global batch here; nothing is left to divide.
        self.loss_is_scaled_for_ga = True

    @property
    def rows(self) -> int:
        return self._n_rows

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor:
        """The divisor of each component, (components,): of all micro-batches of a step, on all processes."""
        none = torch.zeros(len(self.components), dtype=torch.int64, device=device)
        count = sum((self.counts(batch).to(device) for batch in batch_samples), none)
        if self.args.world_size > 1:
            count = self.accelerator.gather(count[None]).sum(dim=0)
        return count.clamp(min=1)

    def counts(self, batch: Batch) -> torch.Tensor:
        """Tokens, or sequences, that each component of a batch is a mean over, (components,)."""
        tokens = {name: weighed(batch, name) != 0 for name in self.components}
        return torch.stack(
            [self.policy_loss.count(mask) if name == "rl" else mask.sum() for name, mask in tokens.items()]
        )

    def outputs(self, model: Any, batch: Batch) -> torch.Tensor:
        """The inputs of the loss: log π of each token of the batch given those before it, (B, L − 1), at its row's
        temperature; 0 where masked."""
        ids, mask = batch["input_ids"], batch["completion_mask"][:, 1:] != 0
        inputs = model_inputs(batch)
        # Only positions after which some row has a trained token need logits.
        positions = mask.any(dim=0).nonzero().squeeze(1)
        if self.fused and len(ids) * len(positions) * self.vocabulary > self.max_logits:
            labels = ids.masked_fill(batch["completion_mask"] == 0, -100)
            fused: torch.Tensor = model(**inputs, labels=labels, fused_lm_head=True).log_probs
            return fused
        logits = (model(**inputs, logits_to_keep=positions) if self.keeps else model(**inputs)).logits
        logits = (logits if self.keeps else logits[:, positions]).float()
        if not self.fused or self.temperature != 1:
            logits = logits / batch["temperature"][:, None, None]
        logprobs = selective_log_softmax(logits, ids[:, 1:][:, positions])
        return torch.zeros(mask.shape, device=ids.device).index_copy(1, positions, logprobs).masked_fill(~mask, 0.0)

    def compute_loss(
        self, model: Any, inputs: Batch, _return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.token_checksum.count(inputs)
        inputs = dict(inputs)
        rows: np.ndarray = inputs.pop(ROWS)
        inputs.pop(SEGMENTS, None)
        mask = inputs["completion_mask"][:, 1:] != 0
        outputs = self.outputs(model, inputs)
        counts = self.counts(inputs).clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        parts = [
            tokens.masked_fill(~mask, 0.0) * weighed(inputs, name) * inputs["weight"][:, None]
            for name, tokens in self.token_losses(outputs, inputs).items()
        ]
        loss = (torch.stack([part.sum() for part in parts]) / counts).sum()
        self.require_finite(loss, rows)
        self._note(outputs.detach(), inputs, mask)
        # Gradients are averaged over the processes, and ours are parts of a sum.
        return loss * self.args.world_size

    def token_losses(self, logps: torch.Tensor, inputs: Batch) -> dict[str, torch.Tensor]:
        """The loss of each token of a batch, (B, L − 1), for each of ``components``, in that order; without its weights."""
        reference = inputs.get("ref_logprobs")
        mask = weighed(inputs, "rl") != 0
        centering = self.centering(inputs)
        policy, self.limited = self.policy_loss(
            logps, inputs["logprobs"], inputs["advantages"], mask, reference, centering
        )
        losses = {"rl": policy, "ce": -logps}
        if "ref_kl" in self.components:
            assert reference is not None  # ``compare`` made it, or the file has it
            losses["ref_kl"] = k3(logps, reference) * (self.kl_beta or 1.0)
        return {name: losses[name] for name in self.components}

    def centering(self, _inputs: Batch) -> torch.Tensor | None:
        """The score-centering term of each token of the batch that ``outputs`` was called with last, (B, L − 1), where the
        loss has it."""
        return None

    def _note(self, logps: torch.Tensor, inputs: Batch, _mask: torch.Tensor) -> None:
        assert self.limited is not None
        mask, limited = weighed(inputs, "rl") != 0, self.limited
        ratio = torch.exp(logps - inputs["logprobs"])
        sums = torch.stack(
            [
                mask.sum(),
                ratio[mask].sum(),
                limited[mask].sum(),
                (inputs["logprobs"] - logps)[mask].sum(),
            ]
        ).tolist()
        for name, value in zip(("tokens", "ratio", "clipped", "kl"), sums, strict=True):
            self._metrics[name] += value

    def log(self, logs: dict[str, float], *more: Any, **kwargs: Any) -> None:
        """With what the tokens since the last entry were like (those of this process)."""
        if "loss" in logs and (tokens := self._metrics["tokens"]):
            named = (("ratio/mean", "ratio"), ("ratio/clipped", "clipped"), ("kl/sampler", "kl"))
            logs = {**logs, **{name: self._metrics[key] / tokens for name, key in named}}
            logs |= self.figures_of_heads(tokens)
            self._metrics.clear()
        super().log(logs, *more, **kwargs)

    def figures_of_heads(self, _tokens: float) -> dict[str, float]:
        """What heads were like since the last entry, where the loss reads them."""
        return {}

    def compare(self, refuse: bool, trains: bool = True) -> dict[str, float]:
        """Score the file with the model as it was loaded, announce the ratio, and keep what the loss needs of it. Of a large
        file whose scores the loss does not need, or where nothing is trained, some sequences are scored.

        ``refuse``: log-probs that are not this model's are an error (L305) where it sampled the file, and where a loss of
        ratios has an effective sample size below ``LEAST_EFFECTIVE``; those that no policy can have sampled with are named
        in any case.
        """
        data = self.data
        needed = "ref_kl" in self.components or self.policy_loss.needs_reference
        # A reference is of every token; for the ratio alone a part of a large file does.
        every = "ref_logprobs" not in data.read_by_loss and needed and trains
        tokens = RATIO_TOKENS if trains else DRY_RATIO_TOKENS
        rows = np.arange(len(data)) if every else sample(data.lengths, tokens, self.args.seed)
        scores, dataset = self.score_all(data, rows), dataset_of(data)
        rounding = Rounding.of(self.computed_in(), *self.sampled_in)
        ratios, recorded = Ratios(rounding), False
        for part in slices(scores.offsets, SCORED_AT_ONCE):
            read_rows(part.stop - part.start)
            sequences = {name: np.concatenate(lists) for name, lists in dataset[rows[part]].items() if lists[0].ndim}
            on_policy = of_policy(sequences)
            saved = sequences["logprobs"][on_policy]
            ratios.add(scores.part(part).values[on_policy], saved)
            recorded |= bool(saved.any())
        if every:
            self.collator.computed = {"ref_logprobs": scores}
        if not ratios.tokens:
            return {}
        facts = ratios.facts()
        self.before_training["ratio"] = facts
        some = "" if len(rows) == len(data) else f" (in {len(rows):,} of {counted(len(data), 'sequence')})"
        self.note(ratio_text(facts) + some)
        self._note_versions(scores, rows, rounding)
        outside, mean, effective = (facts[name] for name in ("share_outside", "mean", "effective_sample_size"))
        why = ""
        if self.on_policy and (departures := ratios.departures()):
            why = f"the file says that this model sampled it, but {'; '.join(departures)}"
        elif self.of_ratios and outside and not recorded:
            why = "all of them are 0, as if each token had been certain"
        elif self.of_ratios and (not MEANS[0] <= mean <= MEANS[1] or outside > _HALF > effective):
            why = (
                f"mean ratio {mean:.3g}, expected about 1; {outside:.1%} outside {list(NEAR)}, "
                f"effective sample size {effective:.1%}"
            )
        foreign = self.of_ratios and effective < LEAST_EFFECTIVE
        if foreign and not why:
            why = f"effective sample size {effective:.1%}"
        if why and refuse and (self.on_policy or foreign):
            least = f" (expected: effective sample size of at least {LEAST_EFFECTIVE:.0%})" if foreign else ""
            raise RefusedError(
                f"the saved log-probabilities are not this model's: {why}{least}",
                code="L305",
                hint="train the model that sampled; `gymdata audit` shows where they differ; --allow-biased-logprobs trains",
            )
        if why:
            self.note(f"warning: the saved log-probabilities are not those of the tokens (L305): {why}")
        return facts

    def _note_versions(self, scores: Ragged, rows: np.ndarray, rounding: Rounding) -> None:
        """Announce the ratio of each policy version, where the file is of several: how stale they are. ``scores``: of the
        sequences ``rows``."""
        if "policy_version" not in self.data.table.column_names:
            return
        versions, dataset = self.data.numbers("policy_version"), dataset_of(self.data)
        if len(np.unique(versions)) < 2:
            return
        parts: dict[int, Ratios] = {int(version): Ratios(rounding) for version in np.unique(versions[rows])}
        limited = dict.fromkeys(parts, 0)
        for number, row in enumerate(rows.tolist()):
            read_rows(1)
            version, sequence = int(versions[row]), dataset[row]
            on_policy = of_policy(sequence)
            logps, saved = scores[number], sequence["logprobs"]
            parts[version].add(logps[on_policy], saved[on_policy])
            if not self.policy_loss.over_batch:
                limited[version] += self._limited(logps, saved, sequence["advantages"], on_policy)
        by_version = {}
        for version, ratios in parts.items():
            if not ratios.tokens:
                continue
            facts = ratios.facts()
            kept = {name: facts[name] for name in ("tokens", "mean", "effective_sample_size")}
            by_version[str(version)] = kept
            if not self.policy_loss.over_batch:
                kept["clipped"] = limited[version] / ratios.tokens
            self.note(f"policy version {version}: {ratio_of_version(kept)}")
        self.before_training["ratio_by_version"] = by_version

    def _limited(self, logps: np.ndarray, saved: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> int:
        """How many tokens of a sequence the loss limits."""
        logprobs, of_sampler, credit = (
            torch.from_numpy(np.array(each, np.float32))[None] for each in (logps, saved, advantages)
        )
        limited = self.policy_loss(logprobs, of_sampler, credit, torch.from_numpy(mask)[None], logprobs)[1]
        return int(limited.sum())

    def computed_in(self) -> str:
        """The number format in which the model computes here."""
        automatic = {"bf16": "bfloat16", "fp16": "float16"}.get(self.accelerator.mixed_precision)
        return automatic or str(next(self.model.parameters()).dtype)

    def score_all(self, data: TrainingData, rows: np.ndarray | None = None) -> Ragged:
        """The output for every trained token of the sequences ``rows`` of ``data`` (None: all), float64, a list a sequence;
        shared among the processes."""
        rows = np.arange(len(data)) if rows is None else rows
        offsets = offsets_of(data.lengths[rows])
        with unnamed_file(Path(self.args.output_dir).parent) as file:  # they may not fit into memory
            scores = np.memmap(file, np.float64, "w+", shape=int(offsets[-1]))
        order, size = data.scoring_order(rows), self.args.per_device_train_batch_size
        dataset, collate = dataset_of(data).select(rows), replace(self.collator, rows=len(data))
        with self.scoring() as model:
            for places, batch in self.batches_to_score(dataset, order, size, collate):
                outputs = self.outputs(model, batch).double().cpu().numpy()
                for line, number in enumerate(places):
                    begin, end = int(offsets[number]), int(offsets[number + 1])
                    scores[begin + 1 : end] = outputs[line, : end - begin - 1]
        if self.accelerator.num_processes > 1:
            for start in range(0, len(scores), SCORED_AT_ONCE):
                part = scores[start : start + SCORED_AT_ONCE]
                part[:] = self.on_every_process(torch.from_numpy(part))
        return Ragged(scores, offsets)


class HeadedTrainer(BatchRLTrainer):
    """Whose log-probs are of the sampler's heads, too: the loss has its score-centering term, and with ``kept_sets`` the
    model is normalized over each token's head."""

    #: Log p at the ids of the heads of the last batch, (N, k), a row per trained token, and which tokens these are.
    _of_heads: tuple[torch.Tensor, torch.Tensor]

    def outputs(self, model: Any, batch: Batch) -> torch.Tensor:
        """``BatchRLTrainer.outputs``; the logits of all trained tokens are held at once."""
        mask = batch["completion_mask"][:, 1:] != 0
        positions = mask.any(dim=0).nonzero().squeeze(1)
        inputs = model_inputs(batch)
        logits = (
            model(**inputs, logits_to_keep=positions).logits if self.keeps else model(**inputs).logits[:, positions]
        )
        chosen = mask[:, positions]
        flat = logits[chosen].float() / batch["temperature"][chosen.nonzero()[:, 0], None]
        ids = batch["top_ids"][mask]
        at_ids = flat.gather(1, ids.clamp(min=0))
        total = flat.logsumexp(dim=1)
        if self.kept_sets:
            total = at_ids.masked_fill(ids < 0, -torch.inf).logsumexp(dim=1)
        self._of_heads = at_ids - total[:, None], mask
        logprobs = flat.gather(1, batch["input_ids"][:, 1:][mask][:, None])[:, 0] - total
        return torch.zeros(mask.shape, device=flat.device).masked_scatter(mask, logprobs)

    def centering(self, inputs: Batch) -> torch.Tensor | None:
        if self.policy_loss.weight is None:
            return None
        logprobs, mask = self._of_heads
        saved = inputs["top_log_probs"][mask]
        found = score_centering(logprobs, saved, self.policy_loss.weight, kept_set=self.kept_sets)
        counted_tokens = (weighed(inputs, "rl") != 0)[mask]
        headed = counted_tokens & (saved > -torch.inf).any(dim=1)
        self._metrics["headed"] += float(headed.sum())
        for name, values in (("covered", found.covered), ("rho", found.rho), ("term", found.term.detach().abs())):
            self._metrics[name] += float(values[headed].sum())
        return torch.zeros(mask.shape, device=saved.device).masked_scatter(mask, found.term)

    def figures_of_heads(self, tokens: float) -> dict[str, float]:
        if self.policy_loss.weight is None:
            return {}
        headed = self._metrics["headed"]
        means = {f"centering/{name}": self._metrics[name] / max(headed, 1.0) for name in ("covered", "rho", "term")}
        return {**means, "centering/without_head": 1 - headed / tokens}


def sample(lengths: np.ndarray, tokens: int, seed: int) -> np.ndarray:
    """Rows, rising, drawn at random until they have about ``tokens`` tokens; all where there are no more."""
    if lengths.sum() <= tokens:
        return np.arange(len(lengths))
    drawn = np.random.default_rng(seed).permutation(len(lengths))
    many = int(np.searchsorted(np.cumsum(lengths[drawn]), tokens, side="right"))
    return np.sort(drawn[: max(many, 1)])
