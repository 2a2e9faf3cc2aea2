"""``gymdata train-dpo``, ``train-kto`` and the others: one command made from each trainer's settings."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from gymdata.train.settings import TRAINERS, TrainConfig

from .console import (
    ConfigFile,
    JsonFlag,
    OverwriteFlag,
    SeedFlag,
    SetFlag,
    Watch,
    command_words,
    finish,
    note,
)

_SOURCES = {
    "pairs": ("PAIRS", "Pairs: file, output folder of `gymdata pairs`, or glob."),
    "experiences": ("EXPERIENCES", "Experiences: file, output folder of `gymdata experience`, or glob."),
    "rollouts": ("RUN", "Rollouts: run folder, file or glob."),
}
_Model = Annotated[
    str | None, typer.Option("-m", "--model", help="Model folder; a LoRA adapter folder is trained further.")
]
_Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="Folder for the trained model; resumed if it exists.")
]
_Lora = Annotated[bool, typer.Option("--lora", help="Train a LoRA adapter (--set lora_r=16 …).")]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check the data and the token checksum of the batches; train nothing.")
]
_Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show tracebacks.")]
#: Flags of every trainer, those of its own settings standing between the two groups.
_BEFORE: dict[str, tuple[Any, Any]] = {
    "model": (_Model, None),
    "output": (_Output, None),
    "config": (ConfigFile, None),
    "sets": (SetFlag, []),
}
_AFTER: dict[str, tuple[Any, Any]] = {
    "lora": (_Lora, False), "seed": (SeedFlag, None), "overwrite": (OverwriteFlag, False),
    "dry_run": (_DryRun, False), "json": (JsonFlag, False), "verbose": (_Verbose, False),
}  # fmt: skip


def _command(kind: type[TrainConfig]) -> Callable[..., int]:
    """The command of a trainer; a field of its settings that has a description is a flag."""
    metavar, what = _SOURCES[kind.table.name]
    own = {name: (_flag(name, kind), None) for name, field in kind.model_fields.items() if field.description}
    flags = {**_BEFORE, **own, **_AFTER}

    def run(source: str, **given: Any) -> int:
        return _train(kind, source, {name: given.pop(name) for name in own}, **given)

    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    source = Annotated[str, typer.Argument(metavar=metavar, help=what)]
    signature = [inspect.Parameter("source", positional, annotation=source)]
    signature += [inspect.Parameter(n, positional, annotation=a, default=d) for n, (a, d) in flags.items()]
    run.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]  # inspect reads it
    run.__annotations__ = {p.name: p.annotation for p in signature}
    run.__doc__ = kind.about
    return run


def _flag(name: str, kind: type[TrainConfig]) -> Any:
    """An option that is None when not given, so that only what was given beats the file."""
    field, flag = kind.model_fields[name], f"--{name.replace('_', '-')}"
    hint: Any = field.annotation
    if typing.get_origin(hint) is types.UnionType:
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        hint = str  # the settings name the nearest choice
    if typing.get_origin(hint) is tuple:
        hint = str  # a,b
    names = (flag,) if hint is bool else ()
    return Annotated[hint | None, typer.Option(*names, help=field.description)]


def _train(
    kind: type[TrainConfig], source: str, own: dict[str, Any], *, lora: bool, seed: int | None, json: bool, **rest: Any
) -> int:
    from gymdata.pairs.run import pairs_of_run
    from gymdata.train.run import train

    rest.pop("verbose")
    found = pairs_of_run(source) if kind.table.name == "pairs" else None
    if found is not None:
        note(f"pairs: {', '.join(map(str, found))}")
    settings = {**own, "seed": seed, "use_peft": lora or None}
    with Watch("training") as watch:
        result = train(kind.algorithm, source, settings=settings, progress=watch, command=command_words(), **rest)
    return finish(result, f"train-{kind.algorithm}" + (" (dry run)" if rest["dry_run"] else ""), json=json)


train_sft = _command(TRAINERS["sft"])
train_dpo = _command(TRAINERS["dpo"])
train_kto = _command(TRAINERS["kto"])
train_reward = _command(TRAINERS["reward"])
train_rl = _command(TRAINERS["rl"])
