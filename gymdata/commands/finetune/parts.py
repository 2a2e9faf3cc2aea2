"""The parts that a configuration of ``gymdata finetune`` names, shipped ones and the user's."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from gymdata.commands.collect.settings import CollectConfig
from gymdata.commands.finetune.config_file import part_of, shipped
from gymdata.commands.finetune.port import Commands, TrainerAdapter, TrajectoryBuilder
from gymdata.commands.finetune.settings import CommandAdapter, FinetuneConfig, Part
from gymdata.errors import UsageError, abridged, require
from gymdata.rewards.loading import instance_of
from gymdata.user_code import load_symbol, place_of

#: The methods that a part must have, by section.
_METHODS = {
    "trajectory_builders": ("collect",),
    "trainer_adapters": ("data", "train"),
    "trainers": ("run",),
}


def builder_of(config: FinetuneConfig, where: str, commands: Commands, base: Mapping[str, Any]) -> TrajectoryBuilder:
    """The trajectory builder that the configuration names. ``base``: collect settings under the builder's own."""
    name, part = part_of(config, "trajectory_builders")
    settings = shipped("trajectory_builders", name, part, where)
    if settings is not None:
        from gymdata.commands.finetune.jobs import CollectingBuilder

        return CollectingBuilder(settings, commands, base)
    builder: TrajectoryBuilder = custom("trajectory_builders", name, part, where)
    return builder


def check_environment(config: FinetuneConfig, where: str, held_out: Mapping[str, object]) -> None:
    """Raise UsageError for an environment, a user or an agent that cannot be loaded. ``held_out``: settings of
    validation."""
    from gymdata.commands.collect.setup import Given, player_of

    name, part = part_of(config, "trajectory_builders")
    builder = shipped("trajectory_builders", name, part, where)
    if builder is None:
        return
    settings = {**builder.settings, **held_out}
    try:
        player_of(CollectConfig.of({"tasks": "", **settings}, where), Given())
    except UsageError as error:
        key = re.match("--(env|user|agent)", error.message)
        section = "finetuning.validation.settings" if key and key[1] in held_out else f"trajectory_builders.{name}"
        raise UsageError(f"{where}: {section}.{error.message.removeprefix('--')}", hint=error.hint).at(where) from error


def require_extras(config: FinetuneConfig, where: str, *, served: bool) -> None:
    """Raise UsageError with the command that installs what the parts need, all of it, unless it is there. ``served``: the
    policy is behind a URL, so no engine is needed here."""
    needed: dict[str, list[str]] = {}
    _, adapter = part_of(config, "trainer_adapters")
    if adapter.type_ == "trl":
        needed["train"] = ["transformers", "torch", "trl", "peft", "accelerate", "datasets"]
    name, part = part_of(config, "trajectory_builders")
    builder = shipped("trajectory_builders", name, part, where)
    if builder is not None and not served:
        needed["engine"] = ["vllm"]
    require(",".join(needed), *(module for modules in needed.values() for module in modules))


def adapter_of(config: FinetuneConfig, where: str) -> TrainerAdapter:
    """The trainer adapter that the configuration names."""
    from gymdata.commands.finetune.jobs import CommandJobs, TrlJobs

    name, part = part_of(config, "trainer_adapters")
    settings = shipped("trainer_adapters", name, part, where)
    if settings is not None:
        return CommandJobs(settings) if isinstance(settings, CommandAdapter) else TrlJobs(settings)
    adapter: TrainerAdapter = custom("trainer_adapters", name, part, where)
    return adapter


def custom(section: str, name: str, part: Part, where: str) -> Any:
    """An instance of a class that is not shipped. Raises UsageError."""
    flag = f"{where}: {section}.{name}._type"
    if part.type_.rpartition(":")[0].endswith(".py"):
        kind, _ = load_symbol(part.type_, flag)
    else:
        (point,) = entry_points(group=f"gymdata.{section}", name=part.type_)
        kind = point.load()
    if not callable(kind) or inspect.iscoroutinefunction(kind):
        description = "an async function" if callable(kind) else f"a value of type {type(kind).__name__}"
        raise UsageError(f"{flag}: got {description}, expected a class", hint="see gymdata/commands/finetune/port.py")
    keys = part.keys()
    try:
        parameters = inspect.signature(kind).parameters
    except (TypeError, ValueError) as error:
        raise UsageError(f"{flag}: {part.type_}: its parameters cannot be read: {error}") from error
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for key in keys:
            if key not in parameters:
                raise UsageError.unknown_key(key, parameters, f"{where}: {section}.{name}")
    instance = instance_of(kind, keys, flag)
    if missing := [name for name in _METHODS[section] if not callable(getattr(instance, name, None))]:
        raise UsageError(
            f"{flag}: {part.type_} has no {abridged(missing)}", hint="see gymdata/commands/finetune/port.py"
        )
    for name in _METHODS[section]:
        method = getattr(instance, name)
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            text = f"{flag}: {part.type_}: {name} is async ({place_of(method)}), expected a plain method"
            raise UsageError(text, hint=f"define it with `def {name}` and run async work inside with asyncio.run(…)")
    return instance
