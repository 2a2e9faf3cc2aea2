"""Configurations of the NeMo Agent Toolkit's finetuning harness, read as the sections of this one.

Its backends are services (an OpenPipe ART server, NeMo Customizer) and its workflow is Python of the toolkit's; here the
same file is trained in this machine, once its policy is a folder and its workflow an environment or an agent.

| of the toolkit | here |
| --- | --- |
| ``openpipe_art_traj_builder``, ``dpo_traj_builder`` | ``collect`` |
| ``openpipe_art_trainer_adapter``, ``nemo_customizer_trainer_adapter`` | ``trl`` |
| ``openpipe_art_trainer``, ``nemo_customizer_trainer`` | ``epochs`` |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gymdata.commands.finetune.settings import IGNORED_KEYS, KINDS, is_known, override
from gymdata.errors import DataError, UsageError
from gymdata.settings import Settings

#: The toolkit's hyperparameters → settings of ``gymdata train-rl``.
_ART = {
    "learning_rate": "learning_rate",
    "per_device_train_batch_size": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "num_train_epochs": "num_train_epochs",
    "max_grad_norm": "max_grad_norm",
    "weight_decay": "weight_decay",
    "warmup_ratio": "warmup_ratio",
    "beta": "kl_beta",
}
_CUSTOMIZER = {
    "learning_rate": "learning_rate",
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
}
_PAIRS = {"min_score_diff": "min_margin", "max_pairs_per_turn": "max_pairs_per_task"}
_OF_CANDIDATES = (
    "custom_step_name",
    "ttc_step_name",
    "reward_from_score_diff",
    "require_multiple_candidates",
    "max_pairs_per_turn",
    "compute_rewards",
)
#: Sampling keys of an llm that ask for what is kept in any case, and those of its client.
_ALWAYS = ("logprobs", "top_logprobs", "return_token_ids", "return_tokens_as_token_ids")
_RETRIES = ("max_retries", "num_retries", "do_auto_retry", "retry_on_status_codes", "retry_on_errors")
_NOT_USED = "the service that it describes is not used"
#: Translates a part of the toolkit: (its keys, the whole document, a note for each key that is left out).
_Reader = Callable[["Document", str, Settings], Settings]


def translated(values: Settings, *, served: bool = False) -> Document:
    """The file's ``values`` with the toolkit's parts replaced; what has none, and no sections of a workflow, is as it was.
    Anything malformed stays, for the checks to name. ``served``: an endpoint was given for the policy."""
    document = Document({key: dict(v) if isinstance(v, Mapping) else v for key, v in values.items()})
    for section, readers in _READERS.items():
        for name, part in list(document.section(section).items()):
            reader = readers.get(str(part.get("_type"))) if isinstance(part, Mapping) else None
            if reader is not None:
                keys = {key: value for key, value in part.items() if key not in ("_type", "reward")}
                # A part's own reward function is the loop's.
                if isinstance(reward := part.get("reward"), Mapping):
                    document.default("finetuning", "reward_function", dict(reward))
                document.values[section][name] = reader(document, f"{section}.{name}", keys)
    document.reward_function()
    document.workflow()
    document.art = document.art and not served
    document.llms()
    document.outputs()
    return document


@dataclass(slots=True)
class Document:
    """A document in the words of this harness. ``notes``: a line for each key that is left out; ``refused``: what
    cannot be carried over as it is, and what to do."""

    values: Settings
    notes: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    #: Whether the policy is served by a backend of the toolkit.
    art: bool = False

    def section(self, name: str) -> Settings:
        """A section of parts; empty if it is missing or not a mapping."""
        section = self.values.get(name)
        return section if isinstance(section, dict) else {}

    def default(self, section: str, key: str, value: Any) -> None:
        """A key of a section, unless the file states it."""
        self.values.setdefault(section, {})
        self.section(section).setdefault(key, value)

    def leave(self, path: str, why: str = _NOT_USED) -> None:
        """Note that a key is not read."""
        self.notes.append(f"{path} is not read: {why}")

    def reward_function(self) -> None:
        """The only evaluator, where the file names none."""
        evaluators = self.section("eval").get("evaluators")
        if isinstance(evaluators, Mapping) and len(evaluators) == 1:
            self.default("finetuning", "reward_function", {"name": next(iter(evaluators))})

    def workflow(self) -> None:
        """Sections of a workflow: their replacement must be present, or they are refused later."""
        chosen = self.section("finetuning").get("trajectory_builder")
        builders = self.section("trajectory_builders")
        part = builders.get(chosen) if chosen else next(iter(builders.values()), None)
        if not isinstance(part, Mapping):
            return
        stands_in = next((k for k in ("agent", "env") if part.get(k)), None)
        kind = part.get("_type")
        if stands_in is None and (kind in KINDS["trajectory_builders"] or not is_known("trajectory_builders", kind)):
            return
        stands_in = stands_in or "_type"  # a builder of the user's
        for section in IGNORED_KEYS:
            if self.values.pop(section, None) is not None:
                self.leave(section, f"trajectory_builders' {stands_in} stands in for the workflow")

    def llms(self) -> None:
        """Models that only a workflow calls; and a policy that is a folder here although a backend of the toolkit
        serves it."""
        llms, trained = self.section("llms"), self.section("finetuning").get("target_model")
        ours = [name for name, llm in llms.items() if not isinstance(llm, Mapping) or llm.get("_type") != "nim"]
        for name in list(llms):
            if name not in ours and name != trained and ours:
                del llms[name]
                self.leave(f"llms.{name}", "it is not the policy")
        for name, llm in llms.items():
            for key in _ALWAYS if isinstance(llm, dict) else ():
                if llm.pop(key, None) is not None:
                    self.leave(f"llms.{name}.{key}", "always kept: the id and the log-prob of every sampled token")
            for key in _RETRIES if isinstance(llm, dict) else ():
                if llm.pop(key, None) is not None:
                    self.leave(f"llms.{name}.{key}", "the builder's own retries and max_attempts decide")
            if not isinstance(llm, dict) or not (
                llm.get("_type") in ("nim", "vllm") or (self.art and self._local(llm))
            ):
                continue
            keys = {key: value for key, value in llm.items() if key not in ("_type", "model", "base_url", "api_key")}
            llms[name] = {**keys, "_type": "vllm"}
            if llm.get("model"):
                llms[name]["model_name"] = llm["model"]
            for key in ("base_url", "api_key"):
                if key in llm:
                    self.leave(f"llms.{name}.{key}", "the policy is sampled in this machine")

    def _local(self, llm: Settings) -> bool:
        name = llm.get("model") or llm.get("model_name")
        if not isinstance(name, str) or self.section("finetuning").get("deploy"):
            return False
        from gymdata.models._transformers import local_folder

        try:
            return local_folder(name).is_dir()
        except DataError:
            return False

    def outputs(self) -> None:
        """Where the toolkit writes what it evaluated, and its measurements."""
        general = self.section("eval").get("general")
        if not isinstance(general, Mapping):
            return
        for key in ("output_dir", "output"):
            if key in general:
                self.leave(f"eval.general.{key}", "everything is written under finetuning.output_dir")
        if "profiler" in general:
            self.refused.append(("eval.general.profiler cannot be honoured", "take eval.general.profiler out"))
        keys = {key: value for key, value in general.items() if key not in ("output_dir", "output", "profiler")}
        self.values["eval"]["general"] = keys


def _art_builder(document: Document, path: str, keys: Settings) -> Settings:
    if (keys := {"num_generations": 2, **keys})["num_generations"] == 1:
        why = f"{path}.num_generations: one rollout per task has no other to be compared with, so nothing is learned"
        document.refused.append((why, override(f"{path}.num_generations", "8")))
    return {**keys, "_type": "collect"}


def _dpo_builder(document: Document, path: str, keys: Settings) -> Settings:
    """Pairs come of several rollouts per task, not of candidates within one: settings of how pairs are chosen are
    kept."""
    pairs = {setting: keys.pop(key) for key, setting in _PAIRS.items() if keys.get(key) is not None}
    if (exhaustive := keys.pop("exhaustive_pairs", None)) is not None:
        pairs["strategy"] = "all" if exhaustive else "best-worst"
    # Unless the loop's own settings are there.
    for part in document.section("trainers").values():
        if isinstance(part, dict):
            part["pairs"] = {**pairs, **(part.get("pairs") or {})}
    for key in [key for key in _OF_CANDIDATES if key in keys]:
        del keys[key]
        document.leave(f"{path}.{key}", "pairs come of the rewards of a task's rollouts, not of candidates in one")
    return {**keys, "_type": "collect"}


def _taken(keys: Settings, name: str, path: str) -> Settings:
    """A mapping of a part, taken out of its keys; empty if it is missing. Raises UsageError for anything else."""
    value = keys.pop(name, None) or {}
    if not isinstance(value, dict):
        raise UsageError.bad_value(f"{path}.{name}", value, "a mapping")
    return value


def _art_adapter(document: Document, path: str, keys: Settings) -> Settings:
    document.art = True
    backend = keys.pop("backend", None)
    for key in sorted(backend) if isinstance(backend, Mapping) else []:
        document.leave(f"{path}.backend.{key}")
    training = _taken(keys, "training", path)
    settings = {setting: training[key] for key, setting in _ART.items() if key in training}
    for key in training:
        if key not in _ART:
            document.leave(f"{path}.training.{key}", "`gymdata train-rl` has no such setting")
    document.default("finetuning", "algorithm", "rl")
    return {**keys, "_type": "trl", "rl": {**settings, **(keys.get("rl") or {})}}


def _customizer_adapter(document: Document, path: str, keys: Settings) -> Settings:
    params = _taken(keys, "hyperparameters", path)
    algorithm = params.get("training_type", "dpo")
    settings = {setting: params[key] for key, setting in _CUSTOMIZER.items() if key in params}
    dpo = _taken(dict(params), "dpo", f"{path}.hyperparameters")
    if algorithm == "dpo" and dpo.get("ref_policy_kl_penalty") is not None:
        settings["beta"] = dpo["ref_policy_kl_penalty"]
    if params.get("finetuning_type") == "lora":
        settings["trainer"] = {"use_peft": True}
    read = {*_CUSTOMIZER, "training_type", "finetuning_type", "dpo"}
    for key in [*(k for k in params if k not in read), *(f"dpo.{k}" for k in dpo if k != "ref_policy_kl_penalty")]:
        document.leave(f"{path}.hyperparameters.{key}", f"`gymdata train-{algorithm}` has no such setting")
    part = {key: keys.pop(key) for key in ("settings", "sft", "dpo") if key in keys}
    for key in keys:
        document.leave(f"{path}.{key}")
    document.default("finetuning", "algorithm", algorithm)
    return {**part, "_type": "trl", algorithm: {**settings, **(part.get(algorithm) or {})}}


def _trainer(document: Document, path: str, keys: Settings) -> Settings:
    part: Settings = {key: keys.pop(key) for key in ("pairs", "experience", "measure_kl") if key in keys}
    for key in keys:
        document.leave(f"{path}.{key}", "the loop collects, trains and waits in every epoch")
    return {**part, "_type": "epochs"}


#: Trainers first, so that a builder's pair settings have a section.
_READERS: dict[str, dict[str, _Reader]] = {
    "trainers": {"openpipe_art_trainer": _trainer, "nemo_customizer_trainer": _trainer},
    "trajectory_builders": {"openpipe_art_traj_builder": _art_builder, "dpo_traj_builder": _dpo_builder},
    "trainer_adapters": {
        "openpipe_art_trainer_adapter": _art_adapter,
        "nemo_customizer_trainer_adapter": _customizer_adapter,
    },
}
