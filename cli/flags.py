"""Flags made of settings: a field of a command's settings is an option with the field's name, type, choices and text."""

from __future__ import annotations

import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gymdata.errors import UsageError
from gymdata.progress import LEVELS, Level
from gymdata.store.paths import EXPERIMENT, TAGS
from gymdata.store.reading import current

from .console import data_alone

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from gymdata.settings import Config, Settings

#: Short names, which are the same in every command.
SHORT = {"model": "-m", "output": "-o", "limit": "-n", "num_rollouts": "-r", "concurrency": "-c"}
#: Metavars in ``--help`` of settings whose type says too little.
METAVARS = {
    "against": "RUN", "agent": "COMMAND",
    "allow_host": "NAME", "balance": "COLUMN", "best_by": "NUMBER", "by": "FIELD",
    "endpoint": "URL",
    "env": "[NAME=]SPEC", "force": "KEY=VALUE", "genrm": "MODEL", "group_where": "CONDITION", "ignore": "CODE",
    "loss": "LOSS", "map": "FIELD=COLUMN", "pair": "ID", "random": "N", "ray": "ADDRESS", "replicas": "N",
    "reward_url": "URL", "select": "CODE", "system": "TEXT",
    "task": "ID", "top_logprobs": "K", "user": "SPEC",
    "where": "CONDITION",
}  # fmt: skip
#: The widest list of choices as a metavar in ``--help``; longer lists are part of the text.
_WIDEST = 76

RunFiles = Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folder, file or glob of rollouts.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="Folder to write.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Start over, replacing existing output.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check and report only; start and write nothing.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show details, and the traceback of an error.")]
_ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file of settings; flags take precedence.")]
_Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any setting by its key.")]
_AllowChanged = Annotated[
    bool, typer.Option("--allow-changed", help="Read sealed files that differ from the record in run.json.")
]

_Experiment = Annotated[
    str | None,
    typer.Option("--experiment", metavar="NAME", help="What the output is part of; in run.json."),
]
_Tags = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="TEXT", help="A word to find the output by; repeatable."),
]

_LogLevel = Annotated[
    Level | None,
    typer.Option(
        "--log-level",
        metavar="LEVEL",
        help="What to log: debug, info, warning or error and above (default: warning on stderr, info in gymdata.log of a "
        "run folder).",
        autocompletion=lambda incomplete: [level for level in LEVELS if level.startswith(incomplete)],
    ),
]

Body = Callable[..., Any]


def with_flags(
    kind: type[Config],
    names: Mapping[str, Sequence[str]] | None = None,
    *,
    keys: Mapping[str, str] | None = None,
    file: bool = True,
) -> Callable[[Body], Body]:
    """The command's function with an option for each setting in the place of its parameter ``settings``, which gets them.

    A parameter that has the name of a setting gives that setting, one of ``keys`` the setting named there. ``names``:
    options whose names differ from their settings. ``file``: with ``--config`` and ``--set``.
    """

    def decorate(body: Body) -> Body:
        parameters = inspect.signature(body, eval_str=True).parameters
        aliases = {name: name for name in parameters if name in kind.model_fields} | dict(keys or {})
        fields = {n: f for n, f in kind.model_fields.items() if n not in aliases and n not in kind.key_only}
        called, sections, title = dict[str, Sequence[str]](), dict[str, str | None](), None
        for name, field in kind.model_fields.items():
            # Settings before the first section have none.
            sections[name] = title = kind.sections.get(name, title)
            if name in fields:
                word = name.replace("_", "-")
                # A switch that is on by default can be given both ways.
                word = f"--{word}/--no-{word}" if field.default is True else f"--{word}"
                called[name] = (names or {}).get(name) or [*filter(None, [SHORT.get(name)]), word]
        options = {name: _option(name, field, called[name], sections.get(name)) for name, field in fields.items()}
        flags = {name: " / ".join(called[name]) for name in fields}
        added = {**options, **({"config": _ConfigFile, "set_": _Set} if file else {})}

        def load(args: Settings) -> Config:
            """The settings of the options, which are taken out of ``args``."""
            config, sets = (args.pop("config"), args.pop("set_") or ()) if file else (None, ())
            values = {name: args.pop(name) for name in options}
            named = dict(flags)
            for name, key in aliases.items():
                # A switch of the function's own that is off was not given.
                if args[name] is None or args[name] is False:
                    continue
                if values.get(key) is not None:
                    raise UsageError(
                        f"{key}: given twice: {args[name]} and {values[key]}", hint="it takes one value: give it once"
                    )
                values[key], named[key] = args[name], _typed(parameters[name])
            values = {key: value for key, value in values.items() if value not in ((), [])}
            return kind.load(config, values, sets, named)

        def run(**args: Any) -> Any:
            return body(settings=load(args), **args)

        new = [_parameter(name, annotation, None) for name, annotation in added.items()]
        signature = [part for p in parameters.values() for part in ([p] if p.name != "settings" else new)]
        run.load = load  # type: ignore[attr-defined]  # for commands that are checked before they run
        if file:
            run.settings = (kind, flags)  # type: ignore[attr-defined]  # for the page of all settings
        return _signed(run, signature, body.__doc__)

    return decorate


def with_common(body: Body, *, reads: bool, writes: bool) -> Body:
    """The command's function with the options of every command. ``reads``: it reads sealed files; ``writes``: an output
    that a run.json describes."""
    parameters = inspect.signature(body, eval_str=True).parameters

    def run(
        verbose: bool,
        log_level: str | None,
        allow_changed: bool = False,
        experiment: str | None = None,
        tag: list[str] | None = None,
        **args: Any,
    ) -> Any:
        # ``main`` has set the level, before anything was imported.
        current().allow_changed |= allow_changed
        # Of its child processes, too; ``main`` restores them.
        labels = {EXPERIMENT: experiment, TAGS: "\n".join(tag or ())}
        os.environ |= {name: value for name, value in labels.items() if value}
        with data_alone():
            return body(**args, **({"verbose": verbose} if "verbose" in parameters else {}))

    params = [parameter for parameter in parameters.values() if parameter.name != "verbose"]
    if writes:
        params += [_parameter("experiment", _Experiment, None), _parameter("tag", _Tags, None)]
    params += [_parameter("verbose", Verbose, False), _parameter("log_level", _LogLevel, None)]
    return _signed(run, [*params, _parameter("allow_changed", _AllowChanged, False)] if reads else params, body.__doc__)


def _typed(parameter: inspect.Parameter) -> str:
    """What errors call a parameter of a command: the flags of an option, the metavar of an argument."""
    info: Any = parameter.annotation.__metadata__[0]
    return " / ".join(info.param_decls or ()) or info.metavar or parameter.name.upper()


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _signed(run: Body, parameters: Sequence[inspect.Parameter], doc: str | None) -> Body:
    """``run`` as if it were written with these parameters, which is what the parser is made from."""
    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    run.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]  # inspect reads it
    run.__annotations__ = {p.name: p.annotation for p in keyword}
    run.__doc__ = doc
    return run


def _option(name: str, field: FieldInfo, names: Sequence[str], section: str | None) -> Any:
    """An option that is None when it is not given. To the parser, what has several forms is text."""
    hint: Any = field.annotation
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        hint = parts[0] if len(parts) == 1 else str
    if typing.get_origin(hint) is tuple:
        hint = str
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    label, text = METAVARS.get(name), described(field)
    if choices:
        label = f"<{'|'.join(choices)}>"
        if len(f"{', '.join(names)} {label}") > _WIDEST:
            label, text = name.upper(), f"{text} One of {', '.join(choices)}."
        # The settings check it, so that a file, --set and a flag accept the same values and give the same errors.
        hint = str
    elif name == "reward" and hint == list[str]:
        label = "SPEC"

    def completed(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    option = typer.Option(
        *names, metavar=label, help=text, autocompletion=completed if choices else None, rich_help_panel=section
    )
    return Annotated[hint | None, option]


def described(field: FieldInfo) -> str:
    """A setting's text with its default, unless that is nothing."""
    text, default = field.description or "", field.get_default(call_default_factory=True)
    if (
        field.is_required()
        or default is None
        or default is False
        or default in ("", (), [], {})
        or "(default: " in text
    ):
        return text
    shown = "on" if default is True else f"{default:g}" if isinstance(default, float) else str(default)
    return f"{text.removesuffix('.')} (default: {shown})."
