"""Names of things that are added one file at a time: pair strategies, rewards, losses, formats.

A file in a folder of the registry decorates a function or class with ``@REGISTRY.register("name")``; its docstring's first
line is the help text. Another package adds one through an entry point of the group, which names the decorated object. Files
are imported when names are listed, so they import heavy libraries inside their functions.

A function's keyword-only parameters may be settings, as ``name: Annotated[type, pydantic.Field(…)] = default``: fields of a
settings class with their texts and limits are made of them.
"""

from __future__ import annotations

import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, Literal, TypeVar, get_args, get_type_hints

from pydantic.fields import FieldInfo

from gymdata.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """``help``: one line. ``facts``: what else was given to ``register``, such as ``needs``."""

    name: str
    object: T
    help: str
    facts: dict[str, Any] = field(default_factory=dict)


class Registry(Generic[T]):
    """Objects of one kind by name. ``kind``: what they are, for errors; ``package``: the folder of the shipped ones;
    ``group``: the entry points of other packages."""

    def __init__(self, kind: str, package: str, group: str) -> None:
        self.kind, self.package, self.group = kind, package, group
        self._entries, self._loaded = dict[str, Entry[T]](), False

    def register(self, name: str, **facts: Any) -> Callable[[T], T]:
        """A decorator that adds an object under ``name``."""

        def add(registered: T) -> T:
            if name in self._entries and self._entries[name].object is not registered:
                raise UsageError(f"{self.kind} {name!r} is defined twice: {self._entries[name].object}, {registered}")
            lines = (registered.__doc__ or "").strip().splitlines()
            self._entries[name] = Entry(name, registered, lines[0] if lines else "", facts)
            return registered

        return add

    def __iter__(self) -> Iterator[Entry[T]]:
        """All entries, sorted by name."""
        if not self._loaded:
            self._loaded = True
            for module in pkgutil.iter_modules(import_module(self.package).__path__, f"{self.package}."):
                import_module(module.name)
            for point in entry_points(group=self.group):
                try:
                    point.load()
                except Exception as error:  # noqa: BLE001 - another package's fault must not break every command
                    warnings.warn(f"{self.kind} {point.name} ({point.value}) cannot be used: {error!r}", stacklevel=2)
        yield from sorted(self._entries.values(), key=lambda entry: entry.name)

    def alone(self, name: str) -> Entry[T]:
        """The entry of a shipped file of its own name, without loading the other files."""
        import_module(f"{self.package}.{name.replace('-', '_')}")
        return self._entries[name]

    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self)

    def __getitem__(self, name: str) -> Entry[T]:
        """The entry of that name. Raises UsageError with the nearest name."""
        names = self.names()
        if name not in names:
            raise UsageError.unknown_choice(self.kind, name, names)
        return self._entries[name]

    def texts(self) -> str:
        """All names, each with its help text, for the description of a setting."""
        return ", ".join(f"{e.name} ({e.help[:1].lower()}{e.help[1:].rstrip('.')})" for e in self)

    def literal(self) -> Any:
        """The type of a setting that takes one of the names, for pydantic, help and completion."""
        return Literal.__getitem__(self.names())


@dataclass(frozen=True)
class Setting:
    """A keyword of a registered function: its type, its default and pydantic's description and limits."""

    kind: Any
    default: Any
    field: FieldInfo


def settings_of(function: Callable[..., Any]) -> dict[str, Setting]:
    """The keyword-only parameters of ``function``. Raises TypeError for one that is not annotated as described above."""
    hints = get_type_hints(function, include_extras=True)
    settings = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            kind, *extras = get_args(hints.get(name)) or (None,)
            fields = [extra for extra in extras if isinstance(extra, FieldInfo)]
            if len(fields) != 1 or parameter.default is parameter.empty:
                raise TypeError(
                    f"{function.__name__}: {name} must be Annotated[type, pydantic.Field(…)] with a default"
                )
            settings[name] = Setting(kind, parameter.default, fields[0])
    return settings


def own_fields(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """The fields of a settings class for settings that each belong to one function, as ``pydantic.create_model`` takes
    them."""
    return {name: (s.kind, FieldInfo.merge_field_infos(s.field, default=s.default)) for name, s in settings.items()}


def shared_fields(settings: Mapping[str, Mapping[str, Setting]], placeholder: str) -> dict[str, Any]:
    """The fields of a settings class for the settings of all functions by name, as ``pydantic.create_model`` takes them:
    None stands for the function's own default, which the description names, as ``placeholder`` where they are many."""
    by_name: dict[str, dict[str, Setting]] = {}
    for owner, options in settings.items():
        for name, setting in options.items():
            by_name.setdefault(name, {})[owner] = setting
    fields = {}
    for name, owners in by_name.items():
        first, by_default = next(iter(owners.values())), dict[str, list[str]]()
        for owner, setting in owners.items():
            by_default.setdefault(shown(setting.default), []).append(owner)
        # As "2, dppo_kl and dppo_tv 20": the most frequent default, then the owners of other ones.
        usual, *rest = sorted(by_default.items(), key=lambda item: -len(item[1]))
        defaults = ", ".join([usual[0], *(f"{' and '.join(names)} {value}" for value, names in rest)])
        field = FieldInfo.merge_field_infos(first.field, default=None)
        text = str(first.field.description).rstrip(".")
        field.description = f"{text} (default: {defaults if len(by_default) <= 3 else placeholder})."
        fields[name] = (first.kind | None, field)
    return fields


def shown(value: Any) -> str:
    """A default as texts show it."""
    return f"{value:g}" if isinstance(value, float) else str(value)
