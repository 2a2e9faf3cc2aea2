"""Settings of ``gymdata finetune``: the sections of one YAML file, with the names that the NeMo Agent Toolkit publishes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import pydantic

from gymdata.commands.collect.settings import CollectConfig
from gymdata.commands.experience.settings import ExperienceConfig
from gymdata.commands.judge.settings import JudgeConfig
from gymdata.commands.pairs.settings import PairsConfig
from gymdata.curriculum import CurriculumConfig
from gymdata.errors import COMMAND_LINE, UsageError
from gymdata.settings import Config, Settings

_PARTS = pydantic.ConfigDict(frozen=True, extra="allow", protected_namespaces=(), populate_by_name=True)


def _type(default: str, description: str) -> Any:
    return pydantic.Field(default, alias="_type", description=description)


class Part(pydantic.BaseModel):
    """A section entry that names its kind. ``_type``: a shipped kind, an entry point's name, or ``path.py:Class``; keys of
    kinds that are not shipped go to the class as they are."""

    model_config = _PARTS
    type_: str = pydantic.Field(alias="_type")

    def keys(self) -> Settings:
        """Everything but the kind."""
        return dict(self.__pydantic_extra__ or {})


class LlmSection(Config):
    """A policy. ``vllm``: the folder ``model_name``, run in a process of gymdata. ``openai``: served by vLLM at ``base_url``
    under ``model_name``; ``model`` is then the folder that training starts from. Sampling keys are the builder's defaults.
    ``api_key``: the server's key, best as ${NAME} of the environment; it is written to no file.
    """

    model_config = pydantic.ConfigDict(**Config.model_config, populate_by_name=True)
    type_: Literal["vllm", "openai"] = _type("vllm", "vllm: in this machine; openai: a vLLM server at base_url")
    model_name: str
    model: str | None = None
    base_url: str | None = None
    api_key: pydantic.SecretStr | None = None
    tokenizer: str | None = None
    temperature: float | None = pydantic.Field(None, ge=0.0)
    top_p: float | None = pydantic.Field(None, gt=0.0, le=1.0)
    max_tokens: int | None = pydantic.Field(None, ge=1)

    @pydantic.model_validator(mode="after")
    def _served(self) -> LlmSection:
        if self.type_ == "openai" and self.base_url is None:
            raise ValueError("base_url is needed with _type: openai")
        return self


class DatasetStructure(Config):
    """Which columns hold the question and its reference answer."""

    question_key: str | None = None
    answer_key: str | None = None


class DatasetSection(Config):
    """A task file as ``gymdata collect`` reads it; the kind is seen from its name, ``_type`` only repeats it. ``id_key`` and
    ``structure`` are ``--map`` of ``gymdata collect``: without them known column names are recognised."""

    model_config = pydantic.ConfigDict(**Config.model_config, populate_by_name=True)
    type_: Literal["jsonl", "json", "csv", "parquet"] = _type("jsonl", "jsonl, json, csv or parquet, also .gz and .zst")
    file_path: str
    id_key: str | None = None
    structure: DatasetStructure = DatasetStructure.model_validate({})

    def columns(self) -> list[str]:
        """``FIELD=COLUMN`` of each column that is named."""
        named = {"prompt": self.structure.question_key, "answer": self.structure.answer_key, "task_id": self.id_key}
        return [f"{field}={column}" for field, column in named.items() if column is not None]


class EvalGeneral(Config):
    """``max_concurrency``: rollouts in flight. ``dataset``: the tasks that are trained on."""

    max_concurrency: int | None = pydantic.Field(None, ge=1)
    dataset: DatasetSection | str | None = None


class EvalSection(Config):
    """``evaluators``: what ``finetuning.reward_function.name`` may name. ``_type: reward`` has ``rewards``, a list of specs
    of ``gymdata collect --reward``; ``_type: genrm`` has the keys of ``gymdata judge``; ``_type: path.py:Class`` is an
    evaluator of the NeMo Agent Toolkit's interface (``gymdata.rewards.evaluator``), made with the other keys."""

    general: EvalGeneral = EvalGeneral.model_validate({})
    evaluators: dict[str, Part] = pydantic.Field(default_factory=dict)


class OfCommand(Config):
    """Settings of a command as the keys of a part, besides its own keys."""

    #: The command's configuration, its keys that the loop decides, and values for those that it cannot do without.
    command: ClassVar[type[Config]]
    decided: ClassVar[Set[str]]
    filled_in: ClassVar[Mapping[str, str]]

    model_config = pydantic.ConfigDict(**{**Config.model_config, "extra": "allow"})

    @property
    def settings(self) -> Settings:
        """Keys of the command."""
        return self.__pydantic_extra__ or {}

    @pydantic.model_validator(mode="after")
    def _checked(self) -> Self:
        names = self.accepted_keys()
        faults = [UsageError.unknown_key(key, names, "settings") for key in self.settings if key not in names]
        settings = {key: value for key, value in self.settings.items() if key in names}
        try:
            self.check(self.command.of({**self.filled_in, **settings}, "settings"))
        except UsageError as error:
            faults.append(error)
        if faults:
            raise UsageError.several(faults)
        return self

    def check(self, config: Any) -> None:
        """Raise UsageError for a configuration of the command that its keys alone do not show to be wrong."""

    @classmethod
    def accepted_keys(cls) -> set[str]:
        """Keys that a part of this kind takes."""
        return set(cls.model_fields) | (set(cls.command.model_fields) - cls.decided)


class CollectBuilder(OfCommand):
    """``_type: collect``: ``gymdata collect`` in a process of its own. Besides ``num_generations`` (rollouts per task) every
    key of its configuration that the loop does not decide. ``allow_missing``: the share of rollouts that may be lost for
    good (their attempts used up) before the epoch counts as failed; lost ones are counted, never scored."""

    command = CollectConfig
    decided = frozenset(("tasks", "model", "endpoint", "tokenizer", "output", "num_rollouts", "seed", "reward")) | {
        *("run_id", "policy_version", "overwrite", "concurrency")
    }
    filled_in: ClassVar[Mapping[str, str]] = {"tasks": ""}

    num_generations: int = pydantic.Field(8, ge=1)
    allow_missing: float = pydantic.Field(0.05, ge=0.0, lt=1.0)


class RewardEvaluator(Config):
    """``_type: reward``: reward specs, as ``gymdata collect --reward`` takes them."""

    rewards: list[str] = pydantic.Field(min_length=1)


class GenrmEvaluator(OfCommand):
    """``_type: genrm``: keys of ``gymdata judge``, which scores the rollouts of an epoch."""

    command = JudgeConfig
    decided = frozenset({"path", "output", "name", "limit", "aggregate_only", "retry_unparsed", "overwrite"})
    filled_in: ClassVar[Mapping[str, str]] = {"path": ""}

    def check(self, config: Any) -> None:
        config.checked()


class TrlAdapter(Config):
    """``_type: trl``: ``gymdata train-sft``, ``-dpo``, ``-kto`` or ``-rl`` in a process of its own, as ``algorithm`` says.
    ``sft``, ``dpo``, ``kto``, ``rl``: keys of that command's --config; ``settings``: of all of them; ``launcher``: the words
    that start it in several processes, as ``[accelerate, launch, --num_processes, "2"]``."""

    launcher: list[str] = pydantic.Field(default_factory=list)
    settings: Settings = pydantic.Field(default_factory=dict)
    sft: Settings = pydantic.Field(default_factory=dict)
    dpo: Settings = pydantic.Field(default_factory=dict)
    kto: Settings = pydantic.Field(default_factory=dict)
    rl: Settings = pydantic.Field(default_factory=dict)


class CommandAdapter(Config):
    """``_type: command``: any trainer that is started by a command. ``command``: words (or one line, split as a shell
    would) in which {data}, {model}, {output}, {epoch}, {seed} and {algorithm} are replaced. ``format``: what {data} is:
    rollouts, pairs, experiences, or a format of ``gymdata export``. It ends with exit code 0 and a model in {output}, or
    it has failed."""

    command: list[str] | str
    format: str = "pairs"
    env: dict[str, str] = pydantic.Field(default_factory=dict)
    timeout_s: float | None = pydantic.Field(None, gt=0.0)


class EpochsTrainer(Config):
    """``_type: epochs``, the shipped loop. ``pairs``, ``experience``: keys of the --config of these commands, used when the
    algorithm needs such data. With a ``kl_coef`` the reference is the first policy unless ``experience`` names another; with
    a ``kl_target`` each epoch begins with the coefficient that the one before has left. ``measure_kl``: score rollouts of
    later epochs with the first policy, at most this many."""

    pairs: Settings = pydantic.Field(default_factory=dict)
    experience: Settings = pydantic.Field(default_factory=dict)
    measure_kl: int = pydantic.Field(512, ge=0)

    @pydantic.model_validator(mode="after")
    def _checked(self) -> EpochsTrainer:
        faults: list[UsageError] = []
        kinds: tuple[tuple[str, type[Config]], ...] = (("pairs", PairsConfig), ("experience", ExperienceConfig))
        for name, config in kinds:
            try:
                config.of({k: v for k, v in getattr(self, name).items() if v is not None}, name)
            except UsageError as error:
                faults.append(error)
        if self.pairs.get("split") is not None:
            faults.append(UsageError("pairs.split cannot be honoured: all tasks of the dataset are trained on"))
        if faults:
            raise UsageError.several(faults)
        return self


class CurriculumSection(CurriculumConfig):
    """Which groups an epoch learns from; see ``gymdata.curriculum``. Its ``seed`` is that of the loop unless it has one."""

    enabled: bool = False


class RewardFunction(Config):
    """``name``: an entry of ``eval.evaluators``, or a reward spec itself (``numeric``, ``path.py:function``)."""

    name: str


class ValidationSection(Config):
    """Held-out tasks, sampled before the first epoch, after every ``interval`` epochs and after the last. ``settings``: keys
    of ``gymdata collect`` (greedy and one rollout per task unless they say otherwise). A reward above ``threshold`` is a
    success. ``config``: a YAML file of the same sections, merged over this one for validation alone: the policy's sampling,
    tasks, evaluators, builder, reward function and this section; what it says of training is refused."""

    dataset: DatasetSection | str | None = None
    interval: int = pydantic.Field(5, ge=1)
    limit: int | None = pydantic.Field(None, ge=1)
    threshold: float = 0.5
    settings: Settings = pydantic.Field(default_factory=dict)
    config: str | None = None


class FinetuningSection(Config):
    """The loop. ``trainer``, ``trajectory_builder``, ``trainer_adapter``: names of entries of their sections; may be left
    out where there is one. ``target_model``: the entry of ``llms`` that is trained. ``output_dir`` may hold {algorithm}.

    ``algorithm``: sft, dpo, kto or rl for ``_type: trl``. ``limit``: only the first N tasks. ``deploy``: words of a command
    that makes the endpoint serve {model} as {version}; without it an endpoint keeps serving the first policy, which
    is enough for one epoch."""

    enabled: bool = True
    trainer: str | None = None
    trajectory_builder: str | None = None
    trainer_adapter: str | None = None
    reward_function: RewardFunction
    target_functions: list[str] = pydantic.Field(default_factory=lambda: ["<workflow>"])
    target_model: str | None = None
    num_epochs: int = pydantic.Field(1, ge=1)
    output_dir: str = "runs/finetune"
    curriculum_learning: CurriculumSection = CurriculumSection.model_validate({})

    algorithm: str = "rl"
    limit: int | None = pydantic.Field(None, ge=1)
    seed: int = pydantic.Field(0, ge=0, lt=2**31)
    validation: ValidationSection = ValidationSection.model_validate({})
    endpoint_timeout: float = pydantic.Field(300.0, gt=0.0)
    deploy: list[str] | None = None

    @pydantic.model_validator(mode="after")
    def _honoured(self) -> FinetuningSection:
        if self.target_functions != ["<workflow>"]:
            raise ValueError(
                "target_functions cannot be honoured: every turn of a rollout is trained ([<workflow>]); "
                "target_agents in the sft or kto section of the trainer adapter chooses turns by agent"
            )
        return self


class FinetuneConfig(Config):
    """``gymdata finetune CONFIG.yaml``. Relative paths are those of the working directory, as on the command line."""

    llms: dict[str, LlmSection] = pydantic.Field(min_length=1)
    eval: EvalSection = EvalSection.model_validate({})
    trajectory_builders: dict[str, Part] = pydantic.Field(min_length=1)
    trainer_adapters: dict[str, Part] = pydantic.Field(min_length=1)
    trainers: dict[str, Part] = pydantic.Field(default_factory=lambda: {"epochs": Part(_type="epochs")})
    finetuning: FinetuningSection

    @classmethod
    def how_to_give(cls, path: str, one_of: str) -> str:
        """As an override, for the sections of the file have no flags."""
        return f"give {override(*_LEAVES.get(path, (path, '…')))}{one_of}, or set it in the file"


class FinetuneFlags(Config):
    """Keys of the file that ``gymdata finetune`` and ``gymdata.finetune`` also take by themselves."""

    sections: ClassVar[Mapping[str, str]] = {"dataset": "Tasks", "endpoint": "Server", "result_file": "Output"}

    dataset: str | None = pydantic.Field(None, description="Training tasks (file or glob).")
    validation_dataset: str | None = pydantic.Field(None, description="Held-out tasks (file or glob).")
    validation_interval: int | None = pydantic.Field(None, description="Epochs between validations (default: 5).")
    validation_config: str | None = pydantic.Field(
        None, description="YAML merged over the configuration for validation only."
    )
    endpoint: str | None = pydantic.Field(None, description="Base URL of a vLLM server to sample from.")
    endpoint_timeout: float | None = pydantic.Field(None, description="Seconds per request (default: 300).")
    result_json_path: str | None = pydantic.Field(
        None, description="JSON path of the result in what the builder's agent returns, such as $.value (default: $)."
    )
    result_file: Path | None = pydantic.Field(None, description="Also write the final result to this file.")
    output: Path | None = pydantic.Field(None, description="Output folder (default: finetuning.output_dir).")


#: Shipped kinds of each section of parts.
KINDS: dict[str, dict[str, type[Any]]] = {
    "eval.evaluators": {"reward": RewardEvaluator, "genrm": GenrmEvaluator},
    "trajectory_builders": {"collect": CollectBuilder},
    "trainer_adapters": {"trl": TrlAdapter, "command": CommandAdapter},
    "trainers": {"epochs": EpochsTrainer},
}
EVALUATORS = (*KINDS["eval.evaluators"], "path.py:Class")


def kinds_of(section: str) -> list[str]:
    """What ``_type`` may be in a section of parts: shipped kinds, the most usual first, and entry points."""
    return [*KINDS[section], *(point.name for point in entry_points(group=f"gymdata.{section}"))]


def is_known(section: str, type_: object) -> bool:
    """Whether ``type_`` is a kind of ``section``, or a class in a file."""
    return type_ in kinds_of(section) or ".py:" in str(type_)


#: Sections of the NeMo Agent Toolkit that are not read here, and what replaces them. They may stay in the file when an
#: environment or an agent replaces the workflow.
IGNORED_KEYS = (
    "workflow", "functions", "function_groups", "general", "embedders", "retrievers", "memory", "object_stores",
    "authentication", "middleware", "ttc_strategies", "optimizer", "logging", "telemetry",
)  # fmt: skip


#: Section that a file cannot do without → the key and value that are enough to make it.
_LEAVES = {
    "llms": ("llms.policy.model_name", "FOLDER"),
    "trajectory_builders": ("trajectory_builders.collect._type", "collect"),
    "trainer_adapters": ("trainer_adapters.trl._type", "trl"),
    "finetuning": ("finetuning.reward_function.name", "NAME"),
    "finetuning.reward_function": ("finetuning.reward_function.name", "NAME"),
}


def override(key: str, value: str = "") -> str:
    """An override in a message, as the caller gives it."""
    return (
        f"-o {key} {value}".rstrip()
        if os.environ.get(COMMAND_LINE)
        else f"overrides=[({key!r}, {value!r})]"
        if value
        else f"overrides: {key}"
    )


def output_dir(config: FinetuneConfig) -> Path:
    """``finetuning.output_dir``, with {algorithm} filled in."""
    return Path(config.finetuning.output_dir.replace("{algorithm}", config.finetuning.algorithm))
