"""The trainers: settings of each training command, which table it reads and how that becomes what is trained.

Invariants: a key that is not ours is one of the trainer's own (TRL's config class, transformers' arguments, TRL's
model and LoRA settings) and is checked by the trainer process before it loads any data; nothing is guessed. The command's
process and the training process make their data by the same ``prepare`` from the same settings.

A class here and the module ``gymdata.train.trainers.<algorithm>`` (the loss) are a trainer; the command, the process,
the proof of trained tokens, metrics, curve and resuming are everybody's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import pyarrow as pa
import pydantic

from gymdata.rollouts.schema import EXPERIENCES, PAIRS, ROLLOUTS, Table
from gymdata.settings import Config, Names
from gymdata.train.pair_data import PAIR_COLUMNS, REWARD_COLUMNS, TrainingData, reward_pairs, training_pairs
from gymdata.train.sequence_data import (
    EXPERIENCE_COLUMNS,
    KTO_COLUMNS,
    SFT_COLUMNS,
    training_experiences,
    training_labels,
    training_rollouts,
)


class TrainConfig(Config):
    """What every training command takes. ``trainer`` holds the keys that go to TRL, as ``learning_rate: 1e-6``.

    A field with a description is also a flag of the command; every field is a key of --config and --set.
    """

    #: Name of the command after ``train-``, and of the adapter's module.
    algorithm: ClassVar[str]
    #: What ``--help`` says.
    about: ClassVar[str]
    table: ClassVar[Table]
    columns: ClassVar[tuple[str, ...]]
    #: Sequences that a row of training stands for.
    sides: ClassVar[int] = 1

    given_as: ClassVar[Mapping[str, str]] = {"model": "-m/--model", "output": "-o/--output"}

    model: str
    output: Path
    max_length: int | None = pydantic.Field(
        None, ge=2, description="Truncate longer sequences, and report the tokens lost."
    )
    num_processes: int = pydantic.Field(1, ge=1, description="Number of processes (accelerate launch; default: 1).")
    trainer: dict[str, Any] = pydantic.Field(default_factory=dict)

    def prepare(self, table: pa.Table, where: str) -> TrainingData:
        """What is trained of a table (``columns``); ``where`` names it in errors. Raises DataError and RefusedError."""
        raise NotImplementedError

    def own(self) -> dict[str, Any]:
        """The settings that say what is trained, apart from where the model comes from and goes to."""
        return self.model_dump(mode="json", exclude={"model", "output", "num_processes", "trainer"})

    @classmethod
    def of_job(cls, job: Mapping[str, Any]) -> Self:
        """The settings that a job file holds."""
        own = {name: job[name] for name in cls.model_fields if name in job and name != "trainer"}
        return cls.model_validate({**own, "trainer": job["settings"]})

    @pydantic.model_validator(mode="before")
    @classmethod
    def _sort_keys(cls, values: Any) -> Any:
        """In files and ``--set`` the trainer's keys stand beside ours; here they move into ``trainer``."""
        if not isinstance(values, dict):
            return values
        own = {key: value for key, value in values.items() if key in cls.model_fields}
        rest = {key: value for key, value in values.items() if key not in cls.model_fields}
        own["trainer"] = {**(own.get("trainer") or {}), **rest}
        return own


class TrainDpoConfig(TrainConfig):
    """``gymdata train-dpo``. ``ref``: where reference log-probabilities come from. The loss of pair i is weighted with its
    ``weight`` (unless ``pair_weights`` is off), and ``margin_scale`` times its margin is the margin that the loss asks for.
    """

    algorithm = "dpo"
    about = """Train with DPO on the exact tokens of saved pairs.

    Every setting of TRL's DPOConfig and ModelConfig is a key of --config and --set, as --set learning_rate=1e-5.
    """
    table = PAIRS
    columns = PAIR_COLUMNS
    sides = 2

    ref: Literal["model", "saved"] = pydantic.Field(
        "model", description="Reference logprobs: model (computed) or saved (the sampler's) (default: model)."
    )
    pair_weights: bool = True
    margin_scale: float = pydantic.Field(0.0, ge=0.0)

    def prepare(self, table: pa.Table, where: str) -> TrainingData:
        return training_pairs(table, self.max_length, where)


class TrainRlConfig(TrainConfig):
    """``gymdata train-rl``. The losses and their bounds are those of ``gymdata.train.trainers.rl.PolicyLoss``.

    ``kl_beta``: weight of the k3 KL to the reference: the file's ref_logprobs, else the model as it was before training.
    ``allow_biased_logprobs``: train though the saved log-probabilities are not of the distribution that was sampled from.
    """

    algorithm = "rl"
    about = """Train with batch RL on saved experiences: token IDs, logprobs and advantages.

    Every setting of transformers' TrainingArguments and TRL's ModelConfig is a key of --config and --set, as are the bounds
    of the losses: --set clip_high=0.28.
    """
    table = EXPERIENCES
    columns = EXPERIENCE_COLUMNS

    loss: Literal["ppo_clip", "cispo", "tis_reinforce"] = pydantic.Field(
        "ppo_clip", description="Loss: ppo_clip, cispo or tis_reinforce (default: ppo_clip)."
    )
    kl_beta: float = pydantic.Field(0.0, ge=0.0, description="Weight of the KL (k3) to the reference (default: 0).")
    clip_low: float = pydantic.Field(0.2, ge=0.0, le=1.0)
    clip_high: float = pydantic.Field(0.2, ge=0.0)
    cispo_low: float = pydantic.Field(1.0, ge=0.0)
    cispo_high: float = pydantic.Field(4.0, ge=0.0)
    tis_cap: float = pydantic.Field(2.0, gt=0.0)
    allow_biased_logprobs: bool = pydantic.Field(
        False, description="Train even if the saved logprobs are biased (L304)."
    )

    def prepare(self, table: pa.Table, where: str) -> TrainingData:
        return training_experiences(table, self.max_length, where)


class RolloutsConfig(TrainConfig):
    """What the trainers that read rollouts take besides. ``target_agents``: only the turns of these agents are trained,
    those of others are context; ``target_model``: only the rollouts of the policy of that name. ``keep_duplicates``: rows
    that hold the same as another are trained all the same."""

    table = ROLLOUTS

    target_agents: Names = pydantic.Field((), description="Train only the turns of these agents: a,b.")
    target_model: str | None = pydantic.Field(None, description="Train only the rollouts of this policy.")
    keep_duplicates: bool = pydantic.Field(
        False, description="Keep rows with identical token IDs, mask and label (default: drop them)."
    )

    def choice(self) -> dict[str, Any]:
        """What of the rollouts is trained."""
        names = ("target_agents", "target_model", "keep_duplicates")
        return {name: getattr(self, name) for name in names}


class TrainSftConfig(RolloutsConfig):
    """``gymdata train-sft``. ``select``: the best rollout of a group, all with a reward, or all; ``min_reward``: a floor.

    ``packing``: several sequences stand in one row of ``pack_length`` tokens (default: ``max_length``, else 1024, or the
    longest where that is more), each seeing itself only; a batch size then counts rows.
    """

    algorithm = "sft"
    about = """Train on the exact tokens of the best rollouts.

    Every setting of transformers' TrainingArguments and TRL's ModelConfig is a key of --config and --set.
    """
    columns = SFT_COLUMNS

    select: Literal["best", "above", "all"] = pydantic.Field(
        "best", description="Rollouts to train: best (per group), above (all with a reward) or all (default: best)."
    )
    min_reward: float | None = pydantic.Field(
        None, allow_inf_nan=False, description="Train only rollouts with at least this reward."
    )
    packing: bool = pydantic.Field(False, description="Pack several sequences into one row, with separate attention.")
    pack_length: int | None = pydantic.Field(
        None, ge=2, description="Tokens per packed row (default: --max-length, else 1024)."
    )

    def prepare(self, table: pa.Table, where: str) -> TrainingData:
        return training_rollouts(table, self.select, self.min_reward, self.max_length, where, **self.choice())


class TrainKtoConfig(RolloutsConfig):
    """``gymdata train-kto``. ``threshold``: rewards above it are desirable, below it undesirable; without it the mean of a
    task's rewards is the bar. The weights are those of the two halves of the loss."""

    algorithm = "kto"
    about = """Train with KTO on the exact tokens of rollouts, each desirable or not by its reward.

    Every setting of TRL's KTOConfig and ModelConfig is a key of --config and --set, as --set beta=0.2.
    """
    columns = KTO_COLUMNS

    threshold: float | None = pydantic.Field(
        None, allow_inf_nan=False, description="Reward above which a rollout is desirable (default: the task's mean)."
    )
    desirable_weight: float = pydantic.Field(1.0, ge=0.0, description="Weight of desirable rollouts (default: 1).")
    undesirable_weight: float = pydantic.Field(1.0, ge=0.0, description="Weight of undesirable rollouts (default: 1).")

    def prepare(self, table: pa.Table, where: str) -> TrainingData:
        return training_labels(table, self.threshold, self.max_length, where, **self.choice())


class TrainRewardConfig(TrainConfig):
    """``gymdata train-reward``. ``split``: the share of tasks whose pairs are not trained but measure the model. Weights and
    margins of pairs as in train-dpo."""

    algorithm = "reward"
    about = """Train a reward model on the exact tokens of saved pairs, and measure it on held-out tasks.

    Every setting of TRL's RewardConfig and ModelConfig is a key of --config and --set.
    """
    table = PAIRS
    columns = REWARD_COLUMNS
    sides = 2

    split: float = pydantic.Field(
        0.1, ge=0.0, lt=1.0, description="Share of tasks whose pairs are held out for evaluation (default: 0.1)."
    )
    pair_weights: bool = True
    margin_scale: float = pydantic.Field(0.0, ge=0.0)

    def prepare(self, table: pa.Table, where: str) -> TrainingData:
        return reward_pairs(table, self.split, self.trainer.get("seed", 0), self.max_length, where)


TRAINERS: dict[str, type[TrainConfig]] = {
    kind.algorithm: kind for kind in (TrainSftConfig, TrainDpoConfig, TrainKtoConfig, TrainRewardConfig, TrainRlConfig)
}
