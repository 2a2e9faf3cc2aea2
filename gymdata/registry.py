"""Names of things that are added one file at a time: pair strategies, rewards, losses, formats.

A file in a folder of the registry decorates a function or class with ``@REGISTRY.register("name")``; its docstring's first
line is the help text. Another package adds one through an entry point of the group, which names the decorated object. Files
are imported when names are listed, so they import heavy libraries inside their functions.

A function's keyword-only parameters may be settings, as ``name: Annotated[type, pydantic.Field(…)] = default``:
``pydantic.create_model`` makes fields of a settings class of them.
"""

from __future__ import annotations

import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from gymdata.errors import UsageError

T = TypeVar("T")
#: A keyword of a registered function: its type with pydantic's description and limits, and its default.
Setting = tuple[Any, Any]


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
            from importlib.metadata import entry_points

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


def settings_of(function: Callable[..., Any]) -> dict[str, Setting]:
    """The keyword-only parameters of ``function``. Raises TypeError for one that is not annotated as described above."""
    hints = get_type_hints(function, include_extras=True)
    settings = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            if get_origin(hints.get(name)) is not Annotated or parameter.default is parameter.empty:
                raise TypeError(
                    f"{function.__name__}: {name} must be Annotated[type, pydantic.Field(…)] with a default"
                )
            settings[name] = hints[name], parameter.default
    return settings


def shared_fields(settings: Mapping[str, Mapping[str, Setting]], placeholder: str) -> dict[str, Any]:
    """The fields of a settings class for the settings of all functions by name, as ``pydantic.create_model`` takes them:
    None stands for the function's own default, which the description names, as ``placeholder`` where they are many."""
    by_name: dict[str, dict[str, Setting]] = {}
    for owner, options in settings.items():
        for name, setting in options.items():
            by_name.setdefault(name, {})[owner] = setting
    fields = {}
    for name, owners in by_name.items():
        by_default = dict[str, list[str]]()
        for owner, (_, default) in owners.items():
            by_default.setdefault(shown(default), []).append(owner)
        # As "2, dppo_kl and dppo_tv 20": the most frequent default, then the owners of other ones.
        usual, *rest = sorted(by_default.items(), key=lambda item: -len(item[1]))
        defaults = ", ".join([usual[0], *(f"{' and '.join(names)} {value}" for value, names in rest)])
        hint, _ = next(iter(owners.values()))
        kind, described = get_args(hint)
        field = FieldInfo.merge_field_infos(described, default=None)
        field.description = (
            f"{described.description.rstrip('.')} (default: {defaults if len(by_default) <= 3 else placeholder})."
        )
        fields[name] = (kind | None, field)
    return fields


def shown(default: Any) -> str:
    """A default as texts show it."""
    return f"{default:g}" if isinstance(default, float) else str(default)
