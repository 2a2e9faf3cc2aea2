"""``gymdata finetune``: joins one YAML file to a trajectory builder, a trainer adapter and a loop over epochs.

Invariants: everything that can be wrong with the configuration is found before a folder is made or a process is
started; inputs that must not change on a resume are identified by content, not by path.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gymdata.commands.finetune.config_file import (
    Overrides,
    for_validation,
    load,
    part_of,
    shipped,
    target_of,
)
from gymdata.commands.finetune.parts import adapter_of, builder_of, check_environment, custom, require_extras
from gymdata.commands.finetune.plan import FREE, FREE_OF_COLLECTING, Judging, Plan, Validation, Watch
from gymdata.commands.finetune.port import EpochRow, Trainer, TrajectoryBuilder
from gymdata.commands.finetune.settings import (
    EVALUATORS,
    DatasetSection,
    EpochsTrainer,
    FinetuneConfig,
    LlmSection,
    output_dir,
    override,
)
from gymdata.curriculum import CurriculumConfig
from gymdata.errors import DataError, UsageError, abridged, option, redacted
from gymdata.progress import NullProgress
from gymdata.public import Figures, Report, Row, path_of, rate_text
from gymdata.settings import Settings
from gymdata.store import hash_file
from gymdata.store.paths import Identity, local_output
from gymdata.store.run_json import write_text
from gymdata.urls import API_KEYS
from gymdata.user_code import from_here


@dataclass(frozen=True, slots=True, repr=False)
class FinetuneReport(Report):
    """The result of a finetuning run: ``result`` is the content of result.json. Other fields are None when a user's own
    loop does not report them; ``validation``: the ``first`` and ``last`` held-out rate and their ``difference``."""

    result: Figures
    epochs: int | None = None
    algorithm: str | None = None
    policy: str | None = None
    trained_tokens: int | None = None
    reward_first: float | None = None
    reward_last: float | None = None
    validation: Figures | None = None

    @classmethod
    def of(cls, result: Figures) -> FinetuneReport:
        names = ("epochs", "algorithm", "policy", "trained_tokens", "reward_first", "reward_last", "validation")
        return cls(dict(result), **{name: result.get(name) for name in names})

    def to_dict(self) -> Figures:
        return self.result

    def rows(self) -> list[Row]:
        if self.epochs is None or self.policy is None:
            return [(str(name), value) for name, value in self.result.items()]
        first, last = ("–" if value is None else f"{value:.4g}" for value in (self.reward_first, self.reward_last))
        rows: list[Row] = [
            ("epochs", f"{self.epochs} of {self.algorithm}"),
            ("reward, first and last", f"{first} and {last}"),
        ]
        held_out = self.validation or {}
        for name in ("first", "last"):
            if figures := held_out.get(name):
                counted = f"{figures['successes']} of {figures['n']}"
                rows.append((f"held-out, {name}", f"{rate_text(figures)} after epoch {figures['epoch']}, {counted}"))
        if "difference" in held_out:
            rows.append(("  last minus first", rate_text(held_out["difference"]).replace(" %", " points", 1)))
        rows += [("tokens trained", self.trained_tokens), ("policy", from_here(self.policy))]
        return [*rows, ("report", from_here(self.result["report"]))]


_HELD_OUT = {"temperature": 0.0, "num_generations": 1}


def finetune(
    config: str | Path,
    overrides: Overrides = (),
    *,
    dataset: str | None = None,
    validation_dataset: str | None = None,
    validation_interval: int | None = None,
    validation_config: str | None = None,
    endpoint: str | None = None,
    endpoint_timeout: float | None = None,
    result_json_path: str | None = None,
    result_file: str | Path | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    watch: Watch | None = None,
    command: Sequence[str] = (),
) -> FinetuneReport:
    """Run, or resume, the epochs of the configuration in the YAML file ``config``; its result is also in OUTPUT/result.json.

    ``overrides``: (dotted key, text or value), applied in order; the keywords stand for keys of the file and beat them.
    ``result_json_path``: where in what the builder's agent returns its result is; ``result_file``: a copy of the result.
    Raises UsageError and DataError before anything is started, StoreError when the folder is another run's, RefusedError
    when rollouts must not be trained on, OutsideError("trainer") when a training job did not complete.
    """
    file = Path(path_of(config, "finetune", "the path of a YAML file"))
    flags = {
        "dataset": ("eval.general.dataset", dataset),
        "validation_dataset": ("finetuning.validation.dataset", validation_dataset),
        "validation_interval": ("finetuning.validation.interval", validation_interval),
        "validation_config": ("finetuning.validation.config", validation_config),
        "endpoint_timeout": ("finetuning.endpoint_timeout", endpoint_timeout),
        "output": ("finetuning.output_dir", output and str(output)),
    }
    keywords = {name: setting for name, setting in flags.items() if setting[1] is not None}
    names = {key: override(key) for key, _ in overrides} | {key: option(name) for name, (key, _) in keywords.items()}
    settings: list[tuple[str, Any]] = [*overrides, *keywords.values()]
    read = partial(load, file, names=names)
    from gymdata.commands.finetune.epochs import EpochLoop

    watch, notes = watch or _NullWatcher(), list[str]()
    if endpoint is not None and "/generate" in endpoint:
        text = f"{option('endpoint', redacted(endpoint))}: is a workflow's URL, expected a vLLM server of the policy"
        hint = f"{override('trajectory_builders.NAME.agent', 'path.py:function')}: the function posts each task to it"
        raise UsageError(text, hint=hint)
    settings += _result_path(read, settings, result_json_path)
    loaded = read(settings, over=_served_by(read, settings, endpoint), notes=notes, more=partial(_missing, file=file))
    if not loaded.finetuning.enabled:
        raise UsageError(f"{file}: finetuning.enabled is false", hint=override("enabled", "true"))
    plan, builder = plan_of(loaded, file, overrides=settings, overwrite=overwrite, command=command)
    adapter = adapter_of(loaded, str(file))
    name, part = part_of(loaded, "trainers")
    loop: Trainer = EpochLoop()
    if shipped("trainers", name, part, str(file)) is None:
        loop = custom("trainers", name, part, str(file))
    for text in notes:
        watch.message(text)
    with _key_of(_llm(loaded)):
        result = dict(loop.run(plan, builder, adapter, watch))
    if result_file is not None:
        write_text(Path(result_file), json.dumps(result, indent=2) + "\n")
    return FinetuneReport.of(result)


def _missing(config: FinetuneConfig, file: Path) -> list[UsageError]:
    """Files that the configuration names and that are missing, to be reported with all other faults."""
    where = str(file)
    name, loop = target_of(config), config.finetuning
    if name not in config.llms:
        return []  # reported as that
    llm, here = config.llms[name], override(f"llms.{name}.model_name", "FOLDER")
    if llm.base_url is not None:
        here = f"{override(f'llms.{name}._type', 'vllm')} {here}; or, served, llms.{name}.model and finetuning.deploy"

    def policy() -> None:
        _start(llm)
        _check_served(config, where)

    evaluator = config.eval.evaluators.get(loop.reward_function.name)
    checks: dict[str, Callable[[], object]] = {
        f"llms.{name}": policy,
        "": lambda: _tasks(config.eval.general.dataset, f"{where}: eval.general.dataset"),
        "environment": lambda: check_environment(config, where, {}),
    }
    # An evaluator of an unknown kind is reported as that.
    if evaluator is None or evaluator.type_ in EVALUATORS or ".py:" in evaluator.type_:
        checks["finetuning.reward_function"] = lambda: _scoring(config, where)
    faults = list[UsageError]()
    for section, check in checks.items():
        try:
            check()
        except (UsageError, DataError) as error:
            hint = error.hint
            if isinstance(error, DataError):
                hint = {"": override("eval.general.dataset", "FILE"), f"llms.{name}": here}.get(section, hint)
            names_it = (error.where or error.message).startswith(where)
            prefix = f"{where}: {section}: " if section and not names_it else ""
            leaves = error.faults if isinstance(error, UsageError) else ()
            faults += [UsageError(f"{prefix}{leaf.message}", hint=leaf.hint) for leaf in leaves] or [
                UsageError(f"{prefix}{error.message}", hint=hint)
            ]
    return faults


def _result_path(read: Callable[..., FinetuneConfig], overrides: Overrides, path: str | None) -> list[tuple[str, Any]]:
    """``--result-json-path`` as a key of the trajectory builder. Raises UsageError without an agent."""
    if path is None:
        return []
    if not path.startswith("$"):
        hint = f"to write the result to a file: {option('result_file')}"
        raise UsageError.bad_value(option("result_json_path"), path, "a JSON path such as $.value", hint=hint)
    config = read(overrides)
    name, part = part_of(config, "trajectory_builders")
    if part.keys().get("agent") is None:
        text = f"{option('result_json_path', path)}: there is no agent whose answer has this place"
        hint = (
            f"{override(f'trajectory_builders.{name}.agent', 'path.py:function')}; for a file: {option('result_file')}"
        )
        raise UsageError(text, hint=hint)
    return [(f"trajectory_builders.{name}.result_json_path", path)]


@contextlib.contextmanager
def _key_of(llm: LlmSection) -> Iterator[None]:
    """``api_key`` where every process that talks to the policy's server looks for it: in the environment."""
    name = API_KEYS["engine"][0]
    before = os.environ.get(name)
    if llm.api_key is not None:
        os.environ[name] = llm.api_key.get_secret_value()
    try:
        yield
    finally:
        if llm.api_key is not None:
            os.environ.pop(name)
            os.environ |= {} if before is None else {name: before}


def plan_of(
    config: FinetuneConfig,
    file: Path,
    *,
    overrides: Overrides = (),
    overwrite: bool = False,
    command: Sequence[str] = (),
) -> tuple[Plan, TrajectoryBuilder]:
    """The configuration with every part checked and every input hashed.

    ``overrides``: those that are in ``config`` already; what they say of validation also beats its own file.
    """
    from gymdata.commands.finetune.jobs import CommandRunner
    from gymdata.models.model_identity import policy_facts

    where, loop, commands = str(file), config.finetuning, CommandRunner()
    llm = _llm(config)
    start, served = _start(llm), llm.base_url is not None
    tasks = _tasks(config.eval.general.dataset, f"{where}: eval.general.dataset")
    reward, judging = _scoring(config, where)
    _check_served(config, where)
    require_extras(config, where, served=served)
    check_environment(config, where, {})
    builder = builder_of(config, where, commands, _base(config, llm))
    validation, val_config = _validation(config, file, builder, (reward, judging), overrides)
    _, part = part_of(config, "trainers")
    trainer = shipped("trainers", "trainer", part, where)
    identity = {
        "sections": _identity(config),
        "tasks": _hashes(tasks),
        "start": policy_facts(str(start))["policy_hash"],
        "validation_tasks": _hashes(validation.tasks) if validation is not None else None,
        "validation": _identity(val_config) if val_config is not None else None,
        "config_version": 1,
    }
    defaults = {"sections": config.defaults(), "validation": val_config.defaults() if val_config is not None else None}
    resolved = config.model_dump(mode="json", by_alias=True)
    if not isinstance(trainer, EpochsTrainer):
        trainer = EpochsTrainer.model_validate({})
    plan = Plan(
        output=local_output(output_dir(config)).absolute(),
        tasks=tasks,
        start=start,
        served=served,
        reward=reward,
        judging=judging,
        curriculum=CurriculumConfig(**{"seed": loop.seed, **loop.curriculum_learning.model_dump(exclude_unset=True)}),
        loop=loop,
        trainer=trainer,
        validation=validation,
        commands=commands,
        write_page=_write_page,
        identity=identity,
        defaults=defaults,
        facts={
            "config": resolved,
            "command": list(command),
            "config_file": str(file.absolute()),
            "validation_config": val_config.model_dump(mode="json", by_alias=True) if val_config is not None else None,
        },
        overwrite=overwrite,
    )
    return plan, builder


def _llm(config: FinetuneConfig) -> LlmSection:
    return config.llms[target_of(config)]


def _check_served(config: FinetuneConfig, where: str) -> None:
    """Raises UsageError where later epochs would be sampled from the first policy."""
    llm, loop = _llm(config), config.finetuning
    if llm.base_url is not None and loop.deploy is None and loop.num_epochs > 1:
        text = f"{where}: {llm.base_url} keeps serving the first policy, num_epochs is {loop.num_epochs}"
        hint = f"{override(f'llms.{target_of(config)}._type', 'vllm')} samples here; or finetuning.deploy is a command "
        raise UsageError(text, hint=f"{hint}that makes it serve {{model}}; or train one epoch")


def _start(llm: LlmSection) -> Path:
    """The folder that training starts from."""
    from gymdata.models._transformers import local_folder

    return local_folder(llm.model or llm.model_name).absolute()


def _tasks(dataset: DatasetSection | str | None, where: str) -> str:
    from gymdata.commands.collect.task_files import HUB, task_files

    if dataset is None:
        raise UsageError(f"{where} is missing", hint=override(where.rpartition(" ")[2], "FILE"))
    path = dataset if isinstance(dataset, str) else dataset.file_path
    tasks = path if path.startswith(HUB) else str(Path(path).absolute())
    task_files(tasks)  # a missing file is reported at once
    return tasks


def _scoring(config: FinetuneConfig, where: str) -> tuple[tuple[str, ...], Judging | None]:
    """Reward specs for collecting, or the judge that scores afterwards. Raises UsageError naming the key in ``where``."""
    name = config.finetuning.reward_function.name
    evaluator = config.eval.evaluators.get(name)
    if evaluator is None or evaluator.type_ != "genrm":
        from gymdata.rewards import load_rewards

        specs = [name]
        if evaluator is not None:
            keys = evaluator.keys()
            made_with = json.dumps(keys) if keys else ""
            specs = keys["rewards"] if evaluator.type_ == "reward" else [evaluator.type_ + made_with]
        rewards = tuple(specs)
        key = "finetuning.reward_function.name" if evaluator is None else f"eval.evaluators.{name}"
        try:
            load_rewards(rewards)
        except UsageError as error:
            # The file has neither flags nor keywords.
            message = error.message.removeprefix(option("reward")).lstrip(": ")
            raise UsageError(f"{where}: {key}: {message}", hint=error.hint).at(f"{where}: {key}") from error
        return rewards, None
    return (), Judging(name, evaluator.keys())


def _base(config: FinetuneConfig, llm: LlmSection) -> Settings:
    """Collect settings that other sections hold."""
    sampling = {k: v for k in ("temperature", "top_p", "max_tokens") if (v := getattr(llm, k)) is not None}
    base: Settings = dict(sampling)
    dataset = config.eval.general.dataset
    if isinstance(dataset, DatasetSection) and (columns := dataset.columns()):
        base["map"] = columns
    if config.eval.general.max_concurrency is not None:
        base["concurrency"] = config.eval.general.max_concurrency
    if llm.base_url is not None:
        timeout = config.finetuning.endpoint_timeout
        base |= {"endpoint": llm.base_url, "model": llm.model_name, "request_timeout": timeout}
        base["tokenizer"] = str(_start(llm))
    if llm.tokenizer is not None:
        base["tokenizer"] = llm.tokenizer
    return base


def _validation(
    config: FinetuneConfig,
    file: Path,
    builder: TrajectoryBuilder,
    scoring: tuple[tuple[str, ...], Judging | None],
    overrides: Overrides,
) -> tuple[Validation | None, FinetuneConfig | None]:
    """How held-out tasks are sampled, and the configuration that says so where it is another than the loop's."""
    section, val_config, where = config.finetuning.validation, None, str(file)
    held_out = dict(_HELD_OUT)
    if section.config is not None:
        from gymdata.commands.finetune.jobs import CommandRunner

        path = Path(section.config)
        (val_config, stated), where = for_validation(config, path, overrides), str(path)
        section = val_config.finetuning.validation
        builder = builder_of(val_config, where, CommandRunner(), _base(val_config, val_config.llms[target_of(config)]))
        scoring = _scoring(val_config, where)
        held_out = {key: value for key, value in _HELD_OUT.items() if key not in stated}
        if val_config.eval.general.dataset != config.eval.general.dataset:
            section = section.model_copy(update={"dataset": val_config.eval.general.dataset})
    if section.dataset is None:
        if unused := sorted(section.model_fields_set - {"dataset"}):
            text = f"{where}: finetuning.validation has {', '.join(unused)} but no dataset, so nothing is validated"
            hint = f"name held-out tasks: finetuning.validation.dataset or {option('validation_dataset')}"
            raise UsageError(text, hint=hint)
        return None, None
    tasks = _tasks(section.dataset, f"{where}: finetuning.validation.dataset")
    check_environment(val_config or config, where, section.settings)
    columns = section.dataset.columns() if isinstance(section.dataset, DatasetSection) else []
    settings = {**held_out, **({"map": columns} if columns else {}), **section.settings}
    if section.limit is not None:
        settings["limit"] = section.limit
    reward, judging = scoring
    return Validation(tasks, builder, settings, section.interval, section.threshold, reward, judging), val_config


def _identity(config: FinetuneConfig) -> Identity:
    """The sections without settings that may change on a resume, and without paths: contents are hashed."""
    sections = config.model_dump(mode="json", by_alias=True)
    # The settings of a failed trainer may be corrected; every epoch records the settings that it was trained with.
    sections.pop("trainer_adapters")
    sections["finetuning"] = {k: v for k, v in sections["finetuning"].items() if k not in FREE}
    for key in ("dataset", "interval", "config"):
        sections["finetuning"]["validation"].pop(key)
    sections["eval"]["general"] = {}
    for part in (*sections["trajectory_builders"].values(), sections["finetuning"]["validation"]["settings"]):
        for key in FREE_OF_COLLECTING & part.keys():
            part.pop(key)
    for llm in sections["llms"].values():
        for key in ("base_url", "api_key", "model", "tokenizer", *(() if llm["base_url"] else ("model_name",))):
            llm.pop(key)
    return sections


def _hashes(tasks: str) -> list[str]:
    from gymdata.commands.collect.task_files import task_files

    return [hash_file(file) for file in task_files(tasks)]


def _served_by(read: Callable[..., FinetuneConfig], overrides: Overrides, endpoint: str | None) -> Settings | None:
    """``--endpoint``: the trained policy's section, served by that vLLM under the name it has there."""
    if endpoint is None:
        return None
    config = read(overrides)
    name, llm = target_of(config), _llm(config)
    served_name = llm.model_name
    if llm.base_url is None:
        from gymdata.engines.servers.vllm_server import served_models

        names = [model.name for model in served_models(endpoint)]
        if len(names) != 1:
            text = f"{option('endpoint', endpoint)}: serves {abridged(names) or 'no model'}; which one is the policy?"
            raise UsageError(text, hint="llms.NAME: {_type: openai, model_name: …, base_url: …, model: FOLDER}")
        served_name = names[0]
    served = {"_type": "openai", "base_url": endpoint, "model": llm.model or llm.model_name, "model_name": served_name}
    return {"llms": {name: served}}


def _write_page(folder: Path) -> None:
    from gymdata.commands.report.run import report

    report(folder)


class _NullWatcher(NullProgress):
    """Epochs that are not shown."""

    def stage(self, epoch: int, name: str) -> None: ...

    def epoch(self, row: EpochRow) -> None: ...
