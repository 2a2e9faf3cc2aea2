"""Reading ``gymdata finetune``'s YAML: overrides applied, unknown keys named, unsupported sections refused."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pydantic

from gymdata.commands.finetune.published import translated
from gymdata.commands.finetune.settings import (
    EVALUATORS,
    IGNORED_KEYS,
    KINDS,
    CollectBuilder,
    FinetuneConfig,
    Part,
    is_known,
    kinds_of,
    override,
)
from gymdata.errors import MissingExtraError, UsageError, abridged
from gymdata.settings import parse_value, read_yaml, section_of

#: (dotted key, text as typed or a value), in the order in which they are applied.
Overrides = Sequence[tuple[str, Any]]
_EVALUATORS = "eval.evaluators"
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
#: Further checks of a configuration whose keys are valid.
More = Callable[[FinetuneConfig], Iterable[UsageError]]


def load(
    file: Path,
    overrides: Overrides = (),
    *,
    over: Mapping[str, Any] | None = None,
    notes: list[str] | None = None,
    more: More | None = None,
    names: Mapping[str, str] | None = None,
) -> FinetuneConfig:
    """The checked configuration of ``file`` with ``overrides`` (dotted key, text or value) in it, in order.

    A key whose first word is no section is one of ``finetuning``: ``algorithm`` is ``finetuning.algorithm``. ``over``:
    sections merged over the file's first. ``notes`` gets a line for each key of the NeMo Agent Toolkit that is not read.
    ``names``: what errors call overrides, by their key. ``more``: see ``check``. Raises UsageError.
    """
    values = read_yaml(file)
    if over is not None:
        values = merged(values, over)
    for key, value in overrides:
        assign(values, key, value)
    ours = translated(values, served=over is not None)
    if notes is not None:
        notes += ours.notes
    refused = [UsageError(f"{file}: {why}", hint=hint) for why, hint in ours.refused]
    named = {".".join(_path_of(key)): name for key, name in (names or {}).items()}
    return check(ours.values, str(file), more, refused, named)


def check(
    values: dict[str, Any],
    where: str,
    more: More | None = None,
    refused: Sequence[UsageError] = (),
    names: Mapping[str, str] | None = None,
) -> FinetuneConfig:
    """``values`` as a configuration. Raises UsageError naming the dotted path in ``where``, or its name in ``names``, of
    everything that is wrong: what is ``refused`` already, too; ``more`` gives what else is, of right keys."""
    read = {key: value for key, value in values.items() if key not in IGNORED_KEYS}
    faults, config = [*refused], None
    if sections := [section for section in IGNORED_KEYS if section in values]:
        builders = _section(values, "trajectory_builders")
        name = _section(values, "finetuning").get("trajectory_builder")
        key = f"trajectory_builders.{name if name in builders else next(iter(builders), 'NAME')}"
        text = f"{where}: the section{'s' * (len(sections) > 1)} {abridged(map(repr, sections))} cannot be honoured"
        env = override(f"{key}.env", "path.py:Class")
        served = f"or, where it is served, {key}.agent path.py:function, which posts each task to it"
        served = f"{served}; or take {'them' if len(sections) > 1 else 'it'} out"
        faults.append(UsageError(text, hint=f"what stands in for the workflow: {env}; {served}"))
    try:
        config = FinetuneConfig.of(_with_keys(read, where), where, names)
    except UsageError as error:
        faults.append(error)
        config = _without_unknown(values)
    faults += _part_faults(values, where, names)
    if config is not None:
        faults += _name_faults(config, where)
        if more is not None:
            more_faults = list(more(config))
            # One alone is raised as what it is where it is met.
            faults += more_faults if faults or len(more_faults) > 1 else []
    if faults:
        raise UsageError.several(faults, listed=True)
    assert config is not None
    return config


def _without_unknown(values: Mapping[str, Any]) -> FinetuneConfig | None:
    """The configuration without its unknown keys, so that all else that is wrong can be found too; None where more is
    wrong with it than these."""
    read = deepcopy({key: value for key, value in values.items() if key in FinetuneConfig.model_fields})
    for _ in range(2):
        try:
            return FinetuneConfig.model_validate(read)
        except pydantic.ValidationError as error:
            faults = error.errors()
            if any(fault["type"] != "extra_forbidden" for fault in faults):
                return None
            for fault in faults:
                *above, key = fault["loc"]
                section: Any = read
                for name in above:
                    section = section[name]
                del section[key]
    return None


def _with_keys(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``values`` with each ``api_key`` that names a variable of the environment replaced by that. Raises UsageError."""
    llms, faults = dict(_section(values, "llms")), list[UsageError]()
    for name, llm in llms.items():
        key = llm.get("api_key") if isinstance(llm, Mapping) else None
        variable = _VARIABLE.fullmatch(key) if isinstance(key, str) else None
        if variable is None:
            continue
        if variable[1] not in os.environ:
            faults.append(
                UsageError(
                    f"{where}: llms.{name}.api_key: {variable[1]} is not in the environment",
                    hint=f"export {variable[1]}=…; or, sampled here: {override(f'llms.{name}._type', 'vllm')}",
                )
            )
        llms[name] = {**llm, "api_key": os.environ.get(variable[1], "")}
    if faults:
        raise UsageError.several(faults)
    return {**values, "llms": llms} if llms else dict(values)


def for_validation(config: FinetuneConfig, file: Path, overrides: Overrides = ()) -> tuple[FinetuneConfig, set[str]]:
    """``config`` with ``file`` merged over it, and the keys of sampling that the file has: those of held-out tasks.
    ``overrides``: those of ``config``; the ones of finetuning.validation beat ``file``. Raises UsageError."""
    over, name = read_yaml(file), target_of(config)
    values = merged(config.model_dump(mode="json", by_alias=True, exclude_unset=True), over)
    for key, value in overrides:
        if _path_of(key)[:2] == ["finetuning", "validation"]:
            assign(values, key, value)
    validation, policy = check(values, str(file)), {"type_", "model_name", "model", "base_url"}
    if validation.llms[name].model_dump(include=policy) != config.llms[name].model_dump(include=policy):
        raise UsageError(f"{file}: llms.{name}: got another policy, expected the trained one", hint="take it out")
    builder, _ = part_of(validation, "trajectory_builders")
    return validation, {*_section(over, f"llms.{name}"), *_section(over, f"trajectory_builders.{builder}")}


def target_of(config: FinetuneConfig) -> str:
    """The name of the entry of ``llms`` that is trained."""
    return config.finetuning.target_model or next(iter(config.llms))


def shipped(section: str, name: str, part: Part, where: str, names: Mapping[str, str] | None = None) -> Any | None:
    """The checked settings of a part of a shipped kind; None for a class of the user's."""
    kind = KINDS[section].get(part.type_)
    return kind.of(part.keys(), where, names, section=f"{section}.{name}") if kind is not None else None


def part_of(config: FinetuneConfig, section: str) -> tuple[str, Part]:
    """The entry of ``section`` that ``finetuning`` names, or the only one."""
    parts: dict[str, Part] = getattr(config, section)
    key = section.removesuffix("s")
    chosen: str | None = getattr(config.finetuning, key)
    if chosen is None and len(parts) == 1:
        return next(iter(parts.items()))
    if chosen is None:
        raise UsageError(f"finetuning.{key} is missing: {section} has {abridged(parts)}", hint=f"name one: {key}: …")
    if chosen not in parts:
        fault = UsageError.unknown_choice(f"finetuning.{key}", chosen, parts)
        fault.hint = fault.hint or override(f"finetuning.{key}", next(iter(parts)))
        raise fault
    return chosen, parts[chosen]


def assign(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key to a value, or to what its text says in YAML. Raises UsageError for a key that leads through a single
    value."""
    value = parse_value(value) if isinstance(value, str) else value
    section, last = section_of(values, _path_of(key), override(key))
    dataset = section.get("dataset")
    if last == "dataset" and isinstance(value, str) and isinstance(dataset, dict):
        # Another file of the same columns.
        value = {k: v for k, v in dataset.items() if k != "_type"} | {"file_path": value}
    section[last] = value


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid over ``under``, mapping by mapping; a part of another ``_type`` replaces the one there."""
    if {"_type"} <= under.keys() & over.keys() and under["_type"] != over["_type"]:
        return dict(over)  # a part of another kind has other keys
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def _path_of(key: str) -> list[str]:
    """The words of a dotted key; one whose first word is no section is of ``finetuning``. Raises UsageError."""
    words = key.strip().split(".")
    if not all(words):
        raise UsageError.bad_value(override(key), key, "a dotted key such as finetuning.num_epochs")
    if words[0] not in FinetuneConfig.model_fields and words[0] not in IGNORED_KEYS:
        words.insert(0, "finetuning")
    return words


def _part_faults(values: Mapping[str, Any], where: str, names: Mapping[str, str] | None) -> Iterator[UsageError]:
    """The faults of the parts of shipped kinds; the constructors of others know their keys."""
    for section in KINDS:
        for name, keys in _section(values, section).items():
            if not isinstance(keys, Mapping) or not isinstance(keys.get("_type"), str):
                continue
            part = Part.model_validate(keys)
            if section == _EVALUATORS and part.type_ not in EVALUATORS and ".py:" not in part.type_:
                fault = UsageError.unknown_choice(f"{where}: {section}.{name}._type", part.type_, EVALUATORS)
                fault.hint = fault.hint or override(f"{section}.{name}._type", "path.py:Class")
                yield fault
            try:
                shipped(section, str(name), part, where, names)
            except UsageError as error:
                yield error
    try:
        path = "finetuning.validation.settings"
        CollectBuilder.of(_section(values, path), where, names, section=path)
    except UsageError as error:
        yield error


def _name_faults(config: FinetuneConfig, where: str) -> Iterator[UsageError]:
    from gymdata.commands.train.settings import TRAINERS
    from gymdata.commands.train.trainer_settings import check_settings

    loop = config.finetuning
    for section in ("trainers", "trajectory_builders", "trainer_adapters"):
        try:
            name, part = part_of(config, section)
        except UsageError as error:
            yield error
            continue
        if not is_known(section, part.type_):
            key, kinds = f"{section}.{name}._type", kinds_of(section)
            fault = UsageError.unknown_choice(f"{where}: {key}", part.type_, [*kinds, "path.py:Class"])
            fault.hint = f"{fault.hint or ''} {override(key, kinds[0])}".strip()
            yield fault
        if section != "trainer_adapters" or part.type_ != "trl" or loop.algorithm not in TRAINERS:
            continue
        # Faults that the training command would find only after the first rollouts were sampled.
        kind, keys, place = TRAINERS[loop.algorithm], part.keys(), f"{where}: trainer_adapters.{name}"
        try:
            settings = {**_section(keys, "settings"), **_section(keys, loop.algorithm), "model": "", "output": ""}
            called = partial("{}: {}".format, place)
            check_settings(loop.algorithm, kind.of(settings, place).trainer, own=kind.model_fields, called=called)
        except MissingExtraError:
            continue  # no fault of the file: finetune names everything that it lacks before it starts
        except UsageError as error:
            yield error
    if loop.target_model is None and len(config.llms) > 1:
        missing = f"{where}: finetuning.target_model is missing: llms has {abridged(config.llms)}"
        yield UsageError(missing, hint="name the one to train")
    if loop.target_model is not None and loop.target_model not in config.llms:
        yield UsageError.unknown_choice(f"{where}: finetuning.target_model", loop.target_model, config.llms)


def _section(values: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """The mapping at a dotted path; empty where there is none."""
    section: Any = values
    for word in path.split("."):
        section = section.get(word) if isinstance(section, Mapping) else None
    return section if isinstance(section, Mapping) else {}
