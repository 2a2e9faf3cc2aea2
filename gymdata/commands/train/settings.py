"""The trainers: settings of each training command, which table it reads and how that becomes what is trained.

A key that is not gymdata's is one of the trainer's own (TRL's config class, transformers' arguments, TRL's model and LoRA
settings).

A class here and the module ``trainers.<algorithm>`` (the loss) are a trainer; the command, the process,
the proof of trained tokens, metrics and resuming are shared by all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pydantic
from pydantic_core import PydanticCustomError

from gymdata.commands.train.data import TrainingData
from gymdata.commands.train.heads import ids_per_token, only_cuts, require_heads
from gymdata.commands.train.losses import AGGREGATIONS, CENTERED, LOSSES, Aggregation, with_setting
from gymdata.commands.train.pair_data import PAIR_COLUMNS, REWARD_COLUMNS, held_apart, training_pairs
from gymdata.commands.train.parts import ROWS, chosen_parts, experience_parts, held_out, parts, rollout_parts
from gymdata.commands.train.prepared import proven
from gymdata.commands.train.rollout_data import (
    KTO_COLUMNS,
    SFT_COLUMNS,
    most_alternatives,
    rollouts_to_label,
    rollouts_to_train,
    trained_once,
)
from gymdata.commands.train.sequence_data import (
    EXPERIENCE_COLUMNS,
    VALUE_COLUMNS,
    WEIGHTS,
    training_experiences,
    with_optimal_advantages,
)
from gymdata.errors import UsageError
from gymdata.registry import shared_fields
from gymdata.rollouts.column_names import TestShare, TextColumns
from gymdata.rollouts.logprobs import sampled_at
from gymdata.rollouts.schema import EXPERIENCES, HEAD, HEADED_ROWS, PAIRS, ROLLOUTS, Table
from gymdata.scores.chosen import scores_of
from gymdata.settings import Abandoned, Config, Names, OnlyWith, Settings, Switch
from gymdata.store import read_table
from gymdata.store.lineage import lineage, masked_rollouts
from gymdata.user_code import load_symbol

#: Pair losses that TRL does not have.
OWN_PAIR_LOSSES = ("rpo_sq", "rpo_fwd_kl", "rpo_bwd_kl", "rebel")
#: Columns that a loss reads.
Read = Mapping[str, pa.Array | pa.ChunkedArray]
_Kind = TypeVar("_Kind", bound="TrainConfig")
LOSS_SETTINGS = tuple(dict.fromkeys(name for loss in LOSSES.values() for name in loss.settings))
Merge = Annotated[
    bool,
    pydantic.Field(description="After training an adapter, also write it and its base as one model to OUTPUT/merged."),
]
PairWeights = Annotated[bool, pydantic.Field(description="Weight the loss of each pair with its weight.")]
MarginScale = Annotated[
    float, pydantic.Field(ge=0.0, description="Margin that the loss asks for, per unit of the margin of a pair.")
]


class TrainConfig(Config):
    """Settings of every training command. ``trainer`` holds the keys that go to TRL, as ``learning_rate: 1e-6``."""

    key_only: ClassVar[Set[str]] = frozenset(
        ["trainer", "pair_weights", "margin_scale", "reward_scale", "sequence_mask", "loss_constant", *LOSS_SETTINGS]
    )

    sections: ClassVar = {"model": "Model", "prefix_sharing": "Training"}
    #: Name of the command after ``train-``, and of the adapter's module.
    algorithm: ClassVar[str]
    #: The classes whose settings are keys of ``trainer``, for ``--help``.
    library: ClassVar[str]
    table: ClassVar[Table]
    columns: ClassVar[tuple[str, ...]]
    #: Of the trainers of policies, the only ones with ``merge``.
    merge_with: ClassVar[OnlyWith] = {
        "merge": ("an adapter (use_peft or --lora, or a LoRA folder as the model)", lambda c: c.trains_adapter)
    }

    model: str = pydantic.Field(description="Model folder; a LoRA adapter folder is trained further.")
    output: Path = pydantic.Field(description="Folder for the trained model; resumed if it exists.")
    max_length: int | None = pydantic.Field(
        None, ge=2, description="Truncate longer sequences, and report the tokens lost."
    )
    prefix_sharing: Switch = pydantic.Field(
        "auto",
        description="Compute shared prefixes once per batch, and group rollouts of a task (auto: in random order; on CUDA, "
        "where 1,000 tokens of a sequence or more are shared).",
    )
    trainer: Settings = pydantic.Field(
        default_factory=dict,
        description="Settings of the library's trainer, which may also be keys of the file itself.",
    )

    def scored_by(self, source: str) -> list[Path]:  # noqa: ARG002 - for those that choose by a score
        """Folders beside the data of which training reads scores."""
        return []

    def parts(self, source: str, rows: int = ROWS) -> Iterator[TrainingData]:
        """The training data of a path with what is due of each row, in parts of ``rows`` rows if the trainer supports it; a
        part is made when the one before is used up. Raises DataError and RefusedError."""
        for data in self.checked_parts(source, rows):
            yield proven(data, self.read_by_loss)

    def checked_parts(self, source: str, rows: int) -> Iterator[TrainingData]:
        """``parts``, with all columns that were checked and without what is due."""
        raise NotImplementedError

    def read_by_loss(self, table: pa.Table) -> Read:
        """The columns that the loss reads of checked rows besides ids: the tensors of a batch by name."""
        raise NotImplementedError

    def facts(self) -> dict[str, object]:
        """The facts of the loss for run.json, besides the settings. Raises UsageError for code of the user's that is
        not there."""
        return {}

    def own(self) -> dict[str, object]:
        """The settings that say what is trained, apart from where the model comes from and goes to."""
        return self.model_dump(mode="json", exclude={"model", "output", "merge", "trainer"})

    @property
    def trains_adapter(self) -> bool:
        return bool(self.trainer.get("use_peft")) or (Path(self.model) / "adapter_config.json").is_file()

    def called(self, key: str) -> str:
        below = f"trainer.{key}"
        return super().called(below if below in self._names else key)

    @classmethod
    def of_job(cls, job: Mapping[str, object]) -> Self:
        """The settings that a job file holds."""
        own = {name: job[name] for name in cls.model_fields if name in job and name != "trainer"}
        return cls.model_validate({**own, "trainer": job["settings"]})

    @pydantic.model_validator(mode="before")
    @classmethod
    def _sort_keys(cls, values: Any) -> Any:
        """In files and ``--set`` the trainer's keys are beside gymdata's; they are moved into ``trainer``."""
        if not isinstance(values, dict):
            return values
        own = {key: value for key, value in values.items() if key in cls.model_fields}
        rest = {key: value for key, value in values.items() if key not in cls.model_fields}
        trainer = own.get("trainer") or {}
        return own | {"trainer": {**trainer, **rest}} if isinstance(trainer, Mapping) else own


class RenderedConfig(TrainConfig):
    """Settings of the trainers that need no log-probabilities of the sampler."""

    map: TextColumns
    test_share: TestShare = None
    allow_rendered: bool | None = pydantic.Field(
        None, description="Train token IDs that were rendered from text, not sampled (T213)."
    )


class TrainDpoConfig(RenderedConfig):
    """``gymdata train-dpo``."""

    algorithm = "dpo"
    library = "TRL's DPOConfig"
    table = PAIRS
    columns = PAIR_COLUMNS
    only_with: ClassVar[OnlyWith] = {
        "reward_scale": ("loss_type rpo_sq, rpo_fwd_kl or rpo_bwd_kl", lambda c: c.has_loss("rpo_")),
        "margin_scale": ("a loss_type that takes a margin", lambda c: not c.has_loss(*OWN_PAIR_LOSSES)),
        **TrainConfig.merge_with,
    }

    ref: Literal["model", "saved"] = pydantic.Field(
        "model", description="Reference logprobs: model (computed) or saved (the sampler's)."
    )
    pair_weights: PairWeights = True
    margin_scale: MarginScale = 0.0
    reward_scale: float = pydantic.Field(
        1.0, gt=0.0, description="Scale of the margin of a pair, a difference of rewards, in the loss types rpo_…."
    )
    merge: Merge = False

    def has_loss(self, *beginnings: str) -> bool:
        """Is a loss_type among the settings whose name begins so?"""
        names = self.trainer.get("loss_type") or ()
        return any(str(name).startswith(beginnings) for name in ([names] if isinstance(names, str) else names))

    def read_by_loss(self, table: pa.Table) -> Read:
        saved = {"logprobs": table["logprobs"]} if self.ref == "saved" else {}
        rewards = {"reward_margin": table["margin"]} if self.has_loss(*OWN_PAIR_LOSSES) else {}
        return {**weights_and_margins(self, table), **saved, **rewards}

    def checked_parts(self, source: str, rows: int) -> Iterator[TrainingData]:
        rendered = bool(self.allow_rendered)
        for first, part in parts(source, self.table, self.columns, rows):
            yield training_pairs(part, self.max_length, source, rendered=rendered, first_row=first)


def _with_loss_settings(kind: type[_Kind]) -> type[_Kind]:
    """The class with a field for each setting of the losses; left out, a setting has the loss's own default."""
    fields = shared_fields({name: loss.options for name, loss in LOSSES.items()}, "the loss's own")
    return pydantic.create_model(
        kind.__name__, __base__=kind, __module__=kind.__module__, __doc__=kind.__doc__, **fields
    )


def weights_and_margins(config: TrainDpoConfig | TrainRewardConfig, pairs: pa.Table) -> Read:
    """The weight and the scaled margin of each pair, as these settings have its loss read them."""
    scale, n = config.margin_scale, pairs.num_rows
    return {
        "weight": pairs["weight"] if config.pair_weights else pa.array(np.ones(n)),
        "margin": pc.multiply(scale, pairs["margin"]) if scale else pa.array(np.zeros(n)),
    }


def of_sequences(table: pa.Table, *names: str) -> Read:
    """Those of the columns ``names`` that there are, the weights, and the temperatures that log-probs are computed at."""
    there = {name: table[name] for name in names if name in table.column_names}
    temperatures = sampled_at(table["temperature"].to_numpy())
    return {**there, "weight": table["weight"], "temperature": pa.array(temperatures)}


@_with_loss_settings
class TrainRlConfig(TrainConfig):
    """``gymdata train-rl``. The losses and their settings are those of ``gymdata.commands.train.losses``."""

    algorithm = "rl"
    library = "transformers' TrainingArguments"
    table = EXPERIENCES
    columns = EXPERIENCE_COLUMNS
    only_with: ClassVar[OnlyWith] = {
        **{
            name: (with_setting(name), lambda c, name=name: name in c.own_settings)  # type: ignore[misc]  # a lambda's default
            for name in LOSS_SETTINGS
        },
        "score_centering": (
            f"a loss that it centers, which is {CENTERED}, and no sequence_mask",
            lambda c: c.loss in LOSSES and LOSSES[c.loss].weight is not None and c.sequence_mask is None,
        ),
        "loss_constant": ("{loss_aggregation:constant}", lambda c: c.loss_aggregation == "constant"),
        **TrainConfig.merge_with,
    }

    loss: str = pydantic.Field(
        "ppo_clip",
        description=f"Policy loss: {', '.join(LOSSES)}, or path.py:function; its settings are keys of --set.",
    )
    kl_beta: float = pydantic.Field(
        0.0,
        ge=0.0,
        description="Weight of the KL (k3) to the reference: ref_logprobs of the file, else the model before training.",
    )
    score_centering: bool = pydantic.Field(
        False,
        description=f"Add the score-centering term, from the sampler's head of each token (losses {CENTERED}).",
    )
    sequence_mask: float | None = pydantic.Field(
        None,
        gt=0.0,
        description="With any loss, leave out tokens with A < 0 of sequences whose mean of saved − new logprob is above.",
    )
    loss_aggregation: Aggregation | None = pydantic.Field(
        None,
        description="Mean of the loss over the global batch: of all tokens (token), of the sums or means of sequences, "
        "or of their sums divided by loss_constant (default: as published for the loss).",
    )
    loss_constant: float | None = pydantic.Field(
        None,
        gt=0.0,
        description="What loss_aggregation constant divides the sum of each sequence by (default: the trained tokens of the "
        "longest sequence of the file).",
    )
    allow_biased_logprobs: bool = pydantic.Field(
        False, description="Train even if the saved logprobs are biased (L304)."
    )
    merge: Merge = False

    @property
    def own_settings(self) -> Mapping[str, object]:
        """The settings that the loss has, with its own defaults; none for a user's function."""
        return LOSSES[self.loss].settings if self.loss in LOSSES else {}

    @property
    def loss_settings(self) -> dict[str, object]:
        chosen = {name: getattr(self, name) for name in self.own_settings}
        return {name: self.own_settings[name] if value is None else value for name, value in chosen.items()}

    def facts(self) -> dict[str, object]:
        code = {} if self.loss in LOSSES else {"code": load_symbol(self.loss, "--loss")[1]}
        return {"loss": {"name": self.loss, **self.loss_settings, **code}}

    @pydantic.field_validator("loss", mode="before")
    @classmethod
    def _known_loss(cls, name: Any) -> Any:
        """A name of the table, or path.py:function, which is loaded later."""
        if isinstance(name, str) and (name in LOSSES or ":" in name):
            return name
        raise PydanticCustomError("literal_error", "a loss", {"expected": ", ".join(LOSSES)})

    @pydantic.field_validator("loss_aggregation", mode="before")
    @classmethod
    def _names_of_verl(cls, name: Any) -> Any:
        return AGGREGATIONS.get(name, name) if isinstance(name, str) else name

    def read_by_loss(self, table: pa.Table) -> Read:
        return of_sequences(table, "logprobs", "advantages", *WEIGHTS, "ref_logprobs", *HEAD)

    def checked_parts(self, source: str, rows: int) -> Iterator[TrainingData]:
        k = ids_per_token(source) if self.score_centering or only_cuts(list(lineage(source))) else 0
        if self.score_centering:
            require_heads(k, source)
        columns = (*self.columns, *HEAD) if k else self.columns
        for first_row, part in experience_parts(source, columns, min(rows, HEADED_ROWS) if k else rows):
            if self.loss in LOSSES and LOSSES[self.loss].needs == "optimal_value":
                part = with_optimal_advantages(part, self.loss, source)
            data = training_experiences(part, self.max_length, source, first_row, k)
            if self.kl_beta and "ref_kl_weight" in data.table.column_names:
                raise UsageError(
                    f"--kl-beta and the column ref_kl_weight of {source} both say how much the KL counts",
                    hint="leave --kl-beta out, or drop the column",
                )
            yield data


class RolloutsConfig(RenderedConfig):
    """Settings of the trainers that read rollouts. Turns of other agents than ``target_agents`` are context."""

    table = ROLLOUTS

    reward: str | None = pydantic.Field(
        None,
        description="Named reward or re-scoring to choose by (default: the only re-scoring; without one the total reward).",
    )
    target_agents: Names = pydantic.Field((), description="Train only the turns of these agents: a,b.")
    target_model: str | None = pydantic.Field(None, description="Train only the rollouts of this policy.")
    abandoned: Abandoned = "drop"
    keep_duplicates: bool = pydantic.Field(
        False, description="Keep rows with identical token IDs, mask and label (default: drop them)."
    )

    def scored_by(self, source: str) -> list[Path]:
        return [] if self.reward is None else self._scores(source)[1]

    def scored(self, table: pa.Table, source: str) -> pa.Table:
        """``table``, the rows of ``source`` in their order, with the score that is chosen by as ``reward``. Raises
        UsageError for a score that there is not."""
        if self.reward is None:
            return table
        return table.set_column(table.schema.get_field_index("reward"), "reward", self._scores(source)[0])

    def _scores(self, source: str) -> tuple[pa.ChunkedArray, list[Path]]:
        _, values, rescorings = scores_of(
            [source], read_table(source, self.table, ("rollout_id", "reward", "rewards")), self.reward
        )
        return values, rescorings

    def sequences(
        self, source: str, chosen: np.ndarray, rows: int, *, heads: bool = False
    ) -> Iterator[tuple[np.ndarray, list[str], pa.Table, int]]:
        """``rollout_parts`` of the rollouts at ``chosen``."""
        agents, rendered = self.target_agents, bool(self.allow_rendered)
        rows = min(rows, HEADED_ROWS) if heads else rows
        return rollout_parts(
            source, self.columns, chosen, agents, self.abandoned, rendered=rendered, heads=heads, rows=rows
        )


class TrainSftConfig(RolloutsConfig):
    """``gymdata train-sft``. With ``packing`` a batch size counts rows."""

    algorithm = "sft"
    library = "transformers' TrainingArguments"
    columns = SFT_COLUMNS
    only_with: ClassVar[OnlyWith] = {
        "pack_length": ("{packing:True}", lambda c: c.packing),
        **TrainConfig.merge_with,
    }
    not_with: ClassVar[OnlyWith] = {"packing": ("{distill:True}", lambda c: not c.distill)}

    select: Literal["best", "above", "all"] = pydantic.Field(
        "best", description="Rollouts to train: best (per group), above (all with a reward) or all."
    )
    min_reward: float | None = pydantic.Field(
        None, allow_inf_nan=False, description="Train only rollouts with at least this reward."
    )
    distill: bool = pydantic.Field(
        False, description="Train towards the saved top_log_probs of the teacher that sampled (forward KL)."
    )
    packing: bool = pydantic.Field(False, description="Pack several sequences into one row, with separate attention.")
    pack_length: int | None = pydantic.Field(
        None, ge=2, description="Tokens per packed row (default: --max-length, else 1024, or the longest sequence)."
    )
    merge: Merge = False

    def read_by_loss(self, table: pa.Table) -> Read:
        return of_sequences(table, *HEAD)

    def checked_parts(self, source: str, rows: int) -> Iterator[TrainingData]:
        table = read_table(source, self.table, ("group_id", "rollout_index", "reward", "policy"))
        masked = (
            masked_rollouts([source]) if self.select == "all" else {}
        )  # otherwise those without a reward are left out
        if masked:
            names = read_table(source, self.table, ("rollout_id",))["rollout_id"]
            table = table.append_column("masked", pc.is_in(names, value_set=pa.array(masked, pa.string())))
        chosen, tied = rollouts_to_train(
            self.scored(table, source), self.select, self.min_reward, source, self.target_model
        )
        k = 0
        if self.distill:
            turns = chosen_parts(source, ("rollout_id", "turns"), chosen, HEADED_ROWS)
            k = most_alternatives((part for _, part in turns), source)
        total, seen = table.num_rows, None if self.keep_duplicates else set[bytes]()
        for *_, part, unread in self.sequences(source, chosen, rows, heads=self.distill):
            data = training_experiences(part, self.max_length, source, k=k, ratios=False)
            counts = {"rollouts": total, "rollouts_chosen": len(set(data.rollout_ids))}
            counts |= {"left_out_masked": len(masked)} if masked and total else {}
            counts |= {"groups_of_equal_rewards": tied} if tied else {}
            counts |= {"left_out_unread": unread} if unread else {}
            yield trained_once(data, counts, seen)
            total = tied = 0


class TrainKtoConfig(RolloutsConfig):
    """``gymdata train-kto``. The weights are those of the two halves of the loss."""

    algorithm = "kto"
    library = "TRL's KTOConfig"
    columns = KTO_COLUMNS
    only_with: ClassVar[OnlyWith] = TrainConfig.merge_with

    threshold: float | None = pydantic.Field(
        None, allow_inf_nan=False, description="Reward above which a rollout is desirable (default: the task's mean)."
    )
    desirable_weight: float = pydantic.Field(1.0, ge=0.0, description="Weight of desirable rollouts.")
    undesirable_weight: float = pydantic.Field(1.0, ge=0.0, description="Weight of undesirable rollouts.")
    merge: Merge = False

    @pydantic.model_validator(mode="after")
    def _two_rows(self) -> Self:
        if self.trainer.get("per_device_train_batch_size") == 1 and self.trainer.get("loss_type", "kto") == "kto":
            raise ValueError(
                "per_device_train_batch_size: got 1, expected at least 2: loss_type kto compares the rows of a batch"
            )
        return self

    def read_by_loss(self, table: pa.Table) -> Read:
        return {"label": table["label"]}

    def checked_parts(self, source: str, rows: int) -> Iterator[TrainingData]:
        table = read_table(source, self.table, ("task_id", "reward", "policy"))
        chosen, desirable, counts = rollouts_to_label(
            self.scored(table, source), self.threshold, source, self.target_model
        )
        seen = None if self.keep_duplicates else set[bytes]()
        for numbers, ids, part, unread in self.sequences(source, chosen, rows):
            label_of = dict(zip(ids, desirable[numbers].tolist(), strict=True))
            data = training_experiences(part, self.max_length, source, ratios=False)
            label = np.array([label_of[rollout] for rollout in data.rollout_ids], np.bool_)
            counts |= {"left_out_unread": unread} if unread else {}
            labelled = replace(data, table=data.table.append_column("label", pa.array(label)))
            yield trained_once(labelled, counts, seen, label)
            counts = {}


class TrainRewardConfig(RenderedConfig):
    """``gymdata train-reward``. Weights and margins of pairs as in train-dpo."""

    algorithm = "reward"
    library = "TRL's RewardConfig"
    table = PAIRS
    columns = REWARD_COLUMNS

    split: float = pydantic.Field(
        0.1, ge=0.0, lt=1.0, description="Share of tasks whose pairs are held out for evaluation."
    )
    pair_weights: PairWeights = True
    margin_scale: MarginScale = 0.0

    def read_by_loss(self, table: pa.Table) -> Read:
        return weights_and_margins(self, table)

    def checked_parts(self, source: str, rows: int) -> Iterator[TrainingData]:
        def checked(pairs: pa.Table) -> TrainingData:
            return training_pairs(pairs, self.max_length, source, rendered=bool(self.allow_rendered))

        heldout_tasks = held_out(source, self.table, self.split, self.trainer.get("seed", 0))
        for _, part in parts(source, self.table, self.columns, rows):
            yield held_apart(part, heldout_tasks, checked)


class TrainValueConfig(TrainConfig):
    """``gymdata train-value``. The loss is that of ``gymdata.commands.train.trainers.value``."""

    algorithm = "value"
    library = "transformers' TrainingArguments"
    table = EXPERIENCES
    columns = VALUE_COLUMNS

    split: float = pydantic.Field(
        0.1, ge=0.0, lt=1.0, description="Share of tasks whose returns are held out for evaluation."
    )
    value_clip: float | None = pydantic.Field(
        None, gt=0.0, description="Clip the change from the values of the file to [−C, C] (PPO)."
    )

    def read_by_loss(self, table: pa.Table) -> Read:
        return of_sequences(table, "returns", "values")

    def checked_parts(self, source: str, rows: int) -> Iterator[TrainingData]:
        heldout_tasks = held_out(source, self.table, self.split, self.trainer.get("seed", 0))
        for _, part in experience_parts(source, self.columns, rows):
            data = held_apart(part, heldout_tasks, lambda table: training_experiences(table, self.max_length, source))
            if self.value_clip is not None and "values" not in data.table.column_names:
                raise UsageError(
                    f"--value-clip needs the values that an earlier critic gave, and {source} has none",
                    hint="`gymdata experience --critic DIR` writes them; or train without --value-clip",
                )
            yield data


TRAINERS: dict[str, type[TrainConfig]] = {
    kind.algorithm: kind
    for kind in (
        TrainSftConfig,
        TrainDpoConfig,
        TrainKtoConfig,
        TrainRewardConfig,
        TrainValueConfig,
        TrainRlConfig,
    )
}
