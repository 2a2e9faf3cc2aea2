"""The parts of a finetuning configuration by their ``_type``: shipped ones, entry points, and classes of the user's.

What always holds: a class of the user's is called with the keys of its section and nothing else; a key that it has no
parameter for is an error that names the nearest.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from gymdata.config.finetune import KINDS, CommandAdapter, FinetuneConfig, Part
from gymdata.config.finetune_file import find, part_of, shipped
from gymdata.config.user_code import load_symbol
from gymdata.errors import UsageError
from gymdata.ports import Commands, TrainerAdapter, TrajectoryBuilder

#: What a part must be able to do, by section.
_METHODS = {
    "trajectory_builders": ("collect",),
    "trainer_adapters": ("data", "submit", "status", "wait", "cancel"),
    "trainers": ("run",),
}


def builder_of(
    config: FinetuneConfig, where: str, beside: Path, commands: Commands, base: Mapping[str, Any]
) -> TrajectoryBuilder:
    """The trajectory builder that the configuration names. ``base``: collect settings under the builder's own."""
    name, part = part_of(config, "trajectory_builders", config.finetuning.trajectory_builder)
    settings = shipped("trajectory_builders", name, part, where)
    if settings is not None:
        from gymdata.adapters.jobs.collecting import CollectingBuilder

        found = in_place(settings.settings, beside)
        return CollectingBuilder(settings.model_copy(update={"settings": found}), commands, base)
    made: TrajectoryBuilder = custom("trajectory_builders", name, part, where, beside)
    return made


def adapter_of(config: FinetuneConfig, where: str, beside: Path) -> TrainerAdapter:
    """The trainer adapter that the configuration names."""
    from gymdata.adapters.jobs.training import CommandJobs, TrlJobs

    name, part = part_of(config, "trainer_adapters", config.finetuning.trainer_adapter)
    settings = shipped("trainer_adapters", name, part, where)
    if settings is not None:
        return CommandJobs(settings) if isinstance(settings, CommandAdapter) else TrlJobs(settings)
    made: TrainerAdapter = custom("trainer_adapters", name, part, where, beside)
    return made


def custom(section: str, name: str, part: Part, where: str, beside: Path) -> Any:
    """An instance of a class that is not shipped. Raises UsageError."""
    flag = f"{where}: {section}.{name}._type"
    if part.type_.rpartition(":")[0].endswith(".py"):
        kind, _ = load_symbol(spec(part.type_, beside), flag)
    else:
        points = {point.name: point for point in entry_points(group=f"gymdata.{section}")}
        if part.type_ not in points:
            known = [*KINDS[section], *points, "path.py:Class"]
            raise UsageError.unknown_choice(flag, part.type_, known)
        kind = points[part.type_].load()
    keys = part.keys()
    parameters = inspect.signature(kind).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for key in keys:
            if key not in parameters:
                raise UsageError.unknown_key(key, parameters, f"{where}: {section}.{name}")
    try:
        made = kind(**keys)
    except TypeError as error:
        raise UsageError(f"{where}: {section}.{name}: {error}") from error
    missing = [method for method in _METHODS[section] if not callable(getattr(made, method, None))]
    if missing:
        raise UsageError(f"{flag}: {part.type_} has no {', '.join(missing)}", hint="gymdata/ports says what they do")
    waiting = [method for method in _METHODS[section] if _is_async(getattr(made, method))]
    if waiting:
        raise UsageError(
            f"{flag}: {part.type_}: got async {', '.join(waiting)}, expected plain methods",
            hint="gymdata calls them one after the other: let each run its coroutine with asyncio.run(…)",
        )
    return made


def _is_async(method: Any) -> bool:
    return inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)


def in_place(settings: Mapping[str, Any], beside: Path) -> dict[str, Any]:
    """Collect settings with the files that they name found."""
    found = dict(settings)
    if found.get("env") is not None:
        found["env"] = spec(found["env"], beside)
    if found.get("chat_template") is not None:
        found["chat_template"] = find(str(found["chat_template"]), beside)
    return found


def spec(value: str, beside: Path) -> str:
    """``path.py:name``, with ``=weight`` or not, with its file found; everything else as it is."""
    file, suffix, rest = str(value).partition(".py")
    if not suffix or (rest and not rest.startswith(":")):
        return str(value)
    return find(file + suffix, beside) + rest


__all__ = ["adapter_of", "builder_of", "custom", "in_place", "spec"]
