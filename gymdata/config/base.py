"""How a command's settings are put together: defaults, then the file, then flags, then ``--set``.

What always holds: an unknown key is an error that names the nearest known one; ``None`` from the command line means "not
given", never "set to nothing"; a configuration does not change once it is made.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

import pydantic
from pydantic_core import PydanticCustomError

from gymdata.config.urls import expanded
from gymdata.errors import UsageError


class Config(pydantic.BaseModel):
    """Base of every command's settings."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    #: How a command line gives a setting that has no default: its flag, or the name of the argument.
    given_as: ClassVar[Mapping[str, str]] = {}

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """pydantic takes ``true`` for 1, where it is a slip."""
        if _has_truth(value):
            kinds = _kinds(cls.model_fields[str(info.field_name)].annotation)
            if kinds & {int, float} and not kinds & {bool, Any, object}:
                raise PydanticCustomError("number_type", "Input should be a number")
        return value

    @classmethod
    def load(
        cls,
        file: Path | None = None,
        overrides: Mapping[str, Any] | None = None,
        sets: Sequence[str] = (),
    ) -> Self:
        """Settings from a YAML ``file``, beaten by ``overrides`` that are not None, beaten by ``key=value`` strings.

        ``a.b=1`` in ``sets`` reaches into mappings. Raises UsageError for unknown keys, bad values or an unreadable file.
        """
        values: dict[str, Any] = read_yaml(file) if file is not None else {}
        values |= {key: value for key, value in (overrides or {}).items() if value is not None}
        given: dict[str, str] = {}
        for text in sets:
            key, _, value = text.partition("=")
            if key.strip() in given:
                raise UsageError(
                    f"--set {key.strip()}: given twice: {given[key.strip()]} and {value}", hint="give it once"
                )
            given[key.strip()] = value
            _assign(values, text)
        return cls.of(values, str(file) if file is not None else "settings")

    @classmethod
    def of(cls, values: Any, where: str) -> Self:
        """The settings that ``values`` spell. ``where`` names them in errors. Raises UsageError."""
        if not isinstance(values, Mapping):
            raise UsageError.bad_value(where, values, "a mapping of settings")
        try:
            return cls.model_validate(expanded(values, where))
        except pydantic.ValidationError as error:
            raise UsageError.several(cls._explain(error, where)) from error

    @classmethod
    def _explain(cls, error: pydantic.ValidationError, where: str) -> Iterator[UsageError]:
        """Every fault, unknown keys first: a misspelt key is why another one seems to be missing."""
        found = sorted(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        misspelt = found[0]["type"] == "extra_forbidden"
        seen = set()
        for fault in found:
            path = ".".join(str(part) for part in fault["loc"])
            if (misspelt and fault["type"] == "missing") or fault["loc"][:1] in seen:
                continue  # of a union pydantic tells why each member does not fit
            seen.add(fault["loc"][:1])
            yield cls._explained(fault, path, where)

    @classmethod
    def _explained(cls, fault: Any, path: str, where: str) -> UsageError:
        if fault["type"] == "extra_forbidden":
            return UsageError.unknown_key(path, cls.model_fields, where)
        if fault["type"] == "missing":
            how = cls.given_as.get(path)
            return UsageError(
                f"{where}: {path} is missing", hint=f"give {how}, or set it in --config" if how else f"add {path}: …"
            )
        context = fault.get("ctx") or {}
        if fault["type"] == "literal_error":
            choices = [word.strip("'") for word in str(context.get("expected", "")).replace(" or ", ", ").split(", ")]
            return UsageError.unknown_choice(f"{where}: {path}", str(fault.get("input")), choices)
        wanted = fault["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        if not path:
            return UsageError(f"{where}: {wanted}")
        return UsageError.bad_value(f"{where}: {path}", fault.get("input"), wanted)


def _has_truth(value: Any) -> bool:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return isinstance(value, bool) or any(isinstance(one, bool) for one in inside)


def _kinds(annotation: Any) -> set[Any]:
    """The types that an annotation is made of."""
    inner = get_args(annotation)
    return set().union(*map(_kinds, inner)) if inner else {annotation} if isinstance(annotation, Hashable) else set()


def read_yaml(file: Path) -> dict[str, Any]:
    """A YAML mapping. Numbers such as ``1e-6`` are numbers, as people expect, and duplicate keys are errors."""
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file}: got a byte that is not UTF-8 (at {error.start}), expected YAML text",
            hint="save it as UTF-8, or give another file",
        ) from error
    try:
        data = yaml.load(text, Loader=_loader())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # A date that is none is a ValueError of PyYAML's.
        raise UsageError(f"{file}: is not YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UsageError.bad_value(str(file), type(data).__name__, "a mapping of settings")
    return data


def parse_value(text: str) -> Any:
    """The value of ``--set key=VALUE``, read as YAML: ``1e-6`` is a number, ``[a, b]`` a list, ``null`` None."""
    import yaml

    try:
        return yaml.load(text, Loader=_loader())
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def _assign(values: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError.bad_value("--set", text, "key=value")
    *parents, last = key.strip().split(".")
    at = values
    for parent in parents:
        below = at.get(parent)
        if below is None:
            below = {}
        if not isinstance(below, dict):
            raise UsageError(f"--set {text}: {parent!r} is a single value, so it has no key {last!r}")
        at[parent] = dict(below)
        at = at[parent]
    at[last] = parse_value(value)


def _loader() -> Any:
    import re

    import yaml
    from yaml.composer import Composer

    bases: tuple[Any, ...] = (yaml.SafeLoader,)
    if yaml.__with_libyaml__:
        # libyaml reads four times as fast. Its own composer has no limit of depth and would end the process.
        bases = (Composer, yaml.CSafeLoader)

    class Loader(*bases):  # type: ignore[misc]
        """YAML 1.1 reads 1e-6 as a string and lets a second key win silently; neither is what a user means."""

        def __init__(self, stream: str) -> None:
            bases[-1].__init__(self, stream)
            self.anchors: dict[str, Any] = {}

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[Any] = set()
            for child, _ in node.value:
                key = self.construct_object(child, deep=deep)
                # What cannot be a key is refused below, in YAML's own words.
                if not isinstance(key, Hashable):
                    continue
                if key in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
                seen.add(key)
            made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
            return made

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
    return Loader
