"""Settings of ``gymdata collect``, and which of them make a run another run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pydantic

from gymdata.commands.collect.nemo_gym_config import of_nemo_gym
from gymdata.commands.collect.task_files import KINDS
from gymdata.commands.collect.task_shapes import checked
from gymdata.commands.record.presets import PRESETS
from gymdata.errors import UsageError
from gymdata.rewards.setting import RewardSpecs
from gymdata.rollouts.column_names import TASK_FIELDS
from gymdata.rollouts.logprobs import BIASES
from gymdata.settings import Config, OnlyWith, RayAddress, ReplicaNeeds, ServerUrls, Settings, one_or_list, parse_value

#: NAME=SPEC; a path or URL may have a = further on.
_NAMED = re.compile(r"([A-Za-z_][\w.-]*)=(.+)", re.S)

#: Engine arguments that change what is sampled; the others (memory, batching) are free on resume.
ENGINE_IDENTITY = (
    "dtype",
    "max_model_len",
    "quantization",
    "logprobs_mode",
    "hf_overrides",
    "revision",
    "rope_scaling",
)


#: Marks the settings that are sampling parameters of vLLM, by its names, and those that are free on resume.
SAMPLED, OPERATION = "sampled", "operation"
#: Those that the identity of a run holds beside its other settings, whatever their values; newer ones are in ``sampling``.
_RECORDED = ("temperature", *BIASES, "top_logprobs")
#: vLLM's names of what other settings decide, and of what an engine is asked in gymdata's own way.
_DECIDED = {"max_tokens": "--max-tokens", "seed": "--seed", "n": "-r/--num-rollouts", "logprobs": "--top-logprobs"}
_OURS = {
    *("model", "prompt", "messages", "tools", "stream", "best_of", "echo", "detokenize", "output_kind", "request_id"),
    *("prompt_logprobs", "flat_logprobs", "skip_clone", "skip_special_tokens", "return_token_ids"),
}

_SERVERS_RUN = "--replicas starts engines on Ray, the other takes servers that run: leave one out"
#: Settings of which only one may be given → what to do.
_EXCLUDING = {
    ("replicas", "endpoint"): _SERVERS_RUN,
} | {
    (name, "agent"): "an agent has its own loop and tools, and needs token ids: leave the flag out"
    for name in ("env", "user")
}
#: Sampling parameters that override those of an agent, in ``collect`` and ``record``: KEY=VALUE, or a mapping.
ForcedSampling = Annotated[
    list[str],
    pydantic.BeforeValidator(lambda v: [f"{k}={x}" for k, x in v.items()] if isinstance(v, Mapping) else v),
    pydantic.Field(
        default_factory=list,
        description="Sampling parameter that overrides those of the agent, as temperature=1; repeatable.",
    ),
]


class CollectConfig(Config):
    """``gymdata collect``. Times are seconds, lengths are tokens."""

    @classmethod
    def of_file(cls, values: Settings, file: Path, given: Settings) -> Settings:
        return of_nemo_gym(values, file, given)

    given_as: ClassVar[Mapping[str, str]] = {"tasks": "the tasks file as the argument"}
    only_with: ClassVar[OnlyWith] = dict.fromkeys(
        ("ray", "replica"), ("{replicas}", lambda c: c.replicas is not None)
    ) | dict.fromkeys(
        ("agent_files", "agent_timeout", "result_json_path", "force"), ("{agent}", lambda c: c.agent is not None)
    )
    key_only: ClassVar[Set[str]] = frozenset(
        ("repetition_penalty", "presence_penalty", "frequency_penalty", "reward_timeout", "request_timeout", "retries")
    ) | {
        "allow_raw_logprobs",
        "engine",
        "sampling",
        "replica",
        "env_args",
        "result_json_path",
    }

    sections: ClassVar[Mapping[str, str]] = {
        "tasks": "Tasks",
        "model": "Model",
        "temperature": "Sampling",
        "env": "Environment",
        "agent": "Agent",
        "reward": "Reward",
        "output": "Output",
        "max_attempts": "Failures",
    }

    tasks: str = pydantic.Field(description=f"Task file or glob: {KINDS}.")
    map: list[str] = pydantic.Field(
        default_factory=list,
        description="Column that a field is read from, such as prompt=question; repeatable. Fields: "
        f"{', '.join(TASK_FIELDS)}.",
    )
    system: str | None = pydantic.Field(
        None, description="System message for tasks that have none: a text, or a file of it."
    )
    prompt_template: Path | None = pydantic.Field(
        None, description="Jinja file that makes the prompt of a task's columns, such as {{ question }}."
    )
    limit: int | None = pydantic.Field(None, ge=1, description="Use only the first N tasks.")
    num_rollouts: int = pydantic.Field(1, ge=1, description="Rollouts per task.")
    skip_bad_rows: Annotated[bool, OPERATION] = pydantic.Field(False, description="Count and skip invalid task rows.")
    model: str | None = pydantic.Field(None, description="Model folder, LoRA adapter folder, or served model name.")
    endpoint: Annotated[ServerUrls, OPERATION] = pydantic.Field(
        default_factory=list,
        description="Base URL of a vLLM server, with or without /v1, or @FILE of several; repeatable.",
    )
    replicas: Annotated[int | None, OPERATION] = pydantic.Field(
        None, ge=1, description="Engines on Ray, each with a copy of the model (default: one engine in process)."
    )
    ray: Annotated[RayAddress, OPERATION] = None
    tokenizer: str | None = pydantic.Field(None, description="Tokenizer folder, required when the model is not local.")
    chat_template: Path | None = pydantic.Field(None, description="Chat template file that replaces the model's.")
    tool_parser: str = pydantic.Field("auto", description="Tool call parser.")
    keep_reasoning: bool = pydantic.Field(True, description="Patch a known chat template that rewrites earlier turns.")
    policy_version: int = pydantic.Field(
        0, ge=0, description="Policy version; increase it when the served model changes."
    )
    concurrency: Annotated[int | None, OPERATION] = pydantic.Field(
        None, ge=1, description="Maximum rollouts in flight."
    )
    engine: Settings = pydantic.Field(default_factory=dict, description="vLLM engine arguments, passed through.")
    replica: ReplicaNeeds = pydantic.Field(default_factory=dict)

    temperature: Annotated[float, SAMPLED] = pydantic.Field(
        1.0, ge=0.0, allow_inf_nan=False, description="Sampling temperature; 0 is greedy."
    )
    top_p: Annotated[float, SAMPLED] = pydantic.Field(
        1.0, gt=0.0, le=1.0, description="Nucleus sampling; below 1, logprobs are biased."
    )
    top_k: Annotated[int, SAMPLED] = pydantic.Field(
        0, ge=-1, description="Top-k sampling; above 0, logprobs are biased."
    )
    min_p: Annotated[float, SAMPLED] = pydantic.Field(
        0.0, ge=0.0, le=1.0, description="Min-p sampling; above 0, logprobs are biased."
    )
    repetition_penalty: Annotated[float, SAMPLED] = pydantic.Field(
        1.0, gt=0.0, description="Repetition penalty; other than 1, logprobs are biased."
    )
    presence_penalty: Annotated[float, SAMPLED] = pydantic.Field(
        0.0, description="Presence penalty; other than 0, logprobs are biased."
    )
    frequency_penalty: Annotated[float, SAMPLED] = pydantic.Field(
        0.0, description="Frequency penalty; other than 0, logprobs are biased."
    )
    top_logprobs: Annotated[int, SAMPLED] = pydantic.Field(
        0, ge=0, le=64, description="Record the top K logprobs per token."
    )
    sampling: Settings = pydantic.Field(
        default_factory=dict,
        description="Other sampling parameters of vLLM, such as stop or logit_bias; most bias the logprobs (L304).",
    )
    allow_raw_logprobs: bool = pydantic.Field(
        False, description="Collect although the server's logprobs ignore the sampling settings (L304)."
    )
    seed: int | None = pydantic.Field(None, ge=0, lt=2**63, description="Random seed.")

    max_tokens: int = pydantic.Field(1024, ge=1, description="Maximum tokens per turn.")
    max_turns: int = pydantic.Field(16, ge=1, description="Maximum model calls per rollout.")
    max_context: int | None = pydantic.Field(
        None, ge=2, description="Maximum tokens of prompt and completion (default: the engine's limit)."
    )
    time_limit: float | None = pydantic.Field(
        None, gt=0.0, description="Seconds per rollout before it is truncated (default: no limit)."
    )

    env: Annotated[list[str], OPERATION] = pydantic.Field(
        default_factory=list,
        description="Environment: path.py:Name (Python class or functions), or a resource server's URL. "
        "NAME=SPEC, repeatable: each task names its own in the column env.",
    )
    env_args: Settings = pydantic.Field(
        default_factory=dict,
        description="Arguments of the environment's class; with named environments one mapping for each NAME.",
    )
    user: str | None = pydantic.Field(
        None, description="User who answers when no tool is called: path.py:Name, a function or class."
    )
    tool_timeout: Annotated[float, OPERATION] = pydantic.Field(
        60.0, gt=0.0, description="Seconds per tool call or user function."
    )
    agent: str | None = pydantic.Field(
        None,
        description="Agent with a loop of its own, run for each rollout and recorded: a command with {prompt} or "
        f"{{prompt_file}} in it, path.py:NAME (a function), or one of {', '.join(PRESETS)}.",
    )
    agent_files: Path | None = pydantic.Field(
        None, description="Folder that each run of the agent starts with a copy of; a task's files are added."
    )
    agent_timeout: Annotated[float | None, OPERATION] = pydantic.Field(
        None, gt=0.0, description="Seconds per run of the agent before it is a failed attempt (default: no limit)."
    )
    result_json_path: str = pydantic.Field(
        "$", description="JSON path of the result in what an agent's function returns, such as $.value."
    )
    force: ForcedSampling
    reward: RewardSpecs = pydantic.Field(default_factory=list)
    reward_timeout: Annotated[float, OPERATION] = pydantic.Field(
        300.0, gt=0.0, description="Seconds per batch of rewards."
    )
    output: Path | None = pydantic.Field(
        None, description="Run folder; resumed if it exists (default: runs/TASKS-TIME)."
    )
    overwrite: bool = pydantic.Field(False, description="Start over, replacing existing output.")
    run_id: str | None = pydantic.Field(None, min_length=1, max_length=200, description="Run ID (default: random).")
    format: Annotated[Literal["parquet", "jsonl"], OPERATION] = pydantic.Field("parquet", description="File format.")
    rows_per_file: Annotated[int | None, OPERATION] = pydantic.Field(
        None, ge=1, description="Rows per output file (default: about 256 MB)."
    )

    max_attempts: Annotated[int, OPERATION] = pydantic.Field(
        3, ge=1, description="Maximum failed attempts per rollout."
    )
    give_up: Annotated[bool, OPERATION] = pydantic.Field(False, description="Exit with 0 even if rollouts are missing.")

    wait_for_server: Annotated[float, OPERATION] = pydantic.Field(
        600.0, ge=0.0, allow_inf_nan=False, description="Seconds to wait for a server that went away while collecting."
    )
    request_timeout: Annotated[float, OPERATION] = pydantic.Field(
        300.0, gt=0.0, description="Seconds per HTTP request."
    )
    retries: Annotated[int, OPERATION] = pydantic.Field(5, ge=0, description="Retries after a transient failure.")

    @pydantic.field_validator("map", mode="before")
    @classmethod
    def _fields_of_tasks(cls, value: Any) -> Any:
        return checked(value)

    @pydantic.field_validator("sampling")
    @classmethod
    def _only_others(cls, value: dict[str, Any]) -> Settings:
        for key in value:
            flag = f"--{key.replace('_', '-')}" if key in cls.model_fields else _DECIDED.get(key)
            if flag is not None or key in _OURS:
                raise ValueError(f"no {key}: " + (f"{flag} gives it" if flag else "gymdata decides it"))
        return value

    @pydantic.field_validator("env", mode="before", json_schema_input_type=str | list[str] | dict[str, str] | None)
    @classmethod
    def _one_or_several_environments(cls, value: Any) -> Any:
        specs = [f"{name}={spec}" for name, spec in value.items()] if isinstance(value, Mapping) else value
        specs = [specs] if isinstance(specs, str) else specs or []
        names = [_split(str(spec))[0] for spec in specs]
        if len(names) > 1 and (None in names or len(set(names)) < len(names)):
            raise ValueError("NAME=SPEC for each of several environments, each NAME once")
        return specs

    @pydantic.field_serializer("env")
    def _as_given(self, value: list[str]) -> str | list[str] | None:
        """One environment is one text, as files and run.json have it."""
        return one_or_list(value)

    def refuse_conflicts(self) -> None:
        """Raises UsageError for settings that cannot be meant together."""
        for names, hint in _EXCLUDING.items():
            if all(getattr(self, name) for name in names):
                flags = [f"--set {n}.…" if n in self.key_only else f"--{n.replace('_', '-')}" for n in names]
                raise UsageError(f"{' and '.join(flags)} were both given", hint=hint)
        forced(self.force)
        if self.engine and self.endpoint:
            raise UsageError("--set engine.… is for the engine in process", hint="set it where the server is started")

    def environments(self) -> dict[str | None, str]:
        """Name → what is to be loaded; the name of a single environment may be None."""
        return dict(map(_split, self.env))

    def sampling_parameters(self) -> Settings:
        """What determines the distribution of tokens and the end of a generation, by vLLM's names."""
        names = [name for name, field in type(self).model_fields.items() if SAMPLED in field.metadata]
        return {**{name: getattr(self, name) for name in names}, "top_k": max(0, self.top_k), **self.sampling}

    def limits(self) -> Settings:
        """Of rollouts. Agents choose ``max_tokens`` themselves, and make side requests: only what was set limits them."""
        limits = {name: getattr(self, name) for name in ("max_tokens", "max_turns", "max_context", "time_limit")}
        unset = set() if self.agent is None else {"max_tokens", "max_turns"} - self.model_fields_set
        return {name: None if name in unset else value for name, value in limits.items()}

    def identity(self) -> dict[str, object]:
        """The settings that a resumed run must share; the caller adds what depends on files and hashes."""
        engine = {key: self.engine[key] for key in ENGINE_IDENTITY if key in self.engine}
        modes = {
            "dtype": engine.pop("dtype", "auto"),
            "logprobs_mode": engine.pop("logprobs_mode", "processed_logprobs"),
        }
        parameters = self.sampling_parameters()
        recorded = {name: parameters.pop(name) for name in _RECORDED}
        fields = type(self).model_fields
        newer = {key: value for key, value in parameters.items() if key not in fields or value != fields[key].default}
        return {
            **recorded,
            **({"sampling": newer} if newer else {}),
            **({"force": forced(self.force)} if self.force else {}),
            **self.limits(),
            **modes,
            "engine": engine,
            "policy_version": self.policy_version,
        }

    def operation(self) -> dict[str, object]:
        """The settings that are free on resume, recorded for each attempt."""
        fields = {name for name, field in type(self).model_fields.items() if OPERATION in field.metadata}
        engine = {key: value for key, value in self.engine.items() if key not in ENGINE_IDENTITY}
        return {**self.model_dump(include=fields), "engine": engine}


def _split(spec: str) -> tuple[str | None, str]:
    match = _NAMED.fullmatch(spec)
    return (match[1], match[2]) if match else (None, spec)


def forced(pairs: Sequence[str]) -> Settings:
    """What overrides an agent's sampling parameters, by vLLM's names. Raises UsageError."""
    parsed = {}
    for text in pairs:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError.bad_value("--force", text, "KEY=VALUE, such as temperature=1")
        parsed[name] = parse_value(value)
    return parsed
