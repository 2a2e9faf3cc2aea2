"""Settings of commands: defaults, then the file, then flags, then ``--set``.

``None`` from the command line means "not given", never "set to nothing".
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import pydantic
from pydantic_core import PydanticCustomError

from gymdata.errors import DataError, UsageError, first_line, json_kind, nearest, option, with_options
from gymdata.urls import KEYS_HINT, expanded, has_userinfo

#: Values of settings by name: of a command, an engine, sampling, a trainer, or a section of a file.
Settings = dict[str, Any]
#: Setting → what it requires (or excludes), as text for ``with_options``, and the check.
OnlyWith = Mapping[str, tuple[str, Callable[[Any], bool]]]
#: The version of JSON Schema that what gymdata writes is in.
DIALECT = "https://json-schema.org/draft/2020-12/schema"
#: Prefix of the names of ``--set`` settings in errors.
_SET = "--set "
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
#: Of which YAML reads two as booleans.
Switch = Annotated[
    Literal["auto", "on", "off"],
    pydantic.BeforeValidator(lambda value: ("off", "on")[value] if isinstance(value, bool) else value),
]


class Config(pydantic.BaseModel):
    """Base of every command's settings."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False, defer_build=True
    )

    #: How a command line gives a setting that has no default and no flag: the argument.
    given_as: ClassVar[Mapping[str, str]] = {}
    #: Settings that have an effect only together with another: that one, and the check that it is given.
    only_with: ClassVar[OnlyWith] = {}
    #: Settings that have no effect together with another: that one, and the check that it is left out.
    not_with: ClassVar[OnlyWith] = {}
    #: In ``--help``: the first setting of a section → its title.
    sections: ClassVar[Mapping[str, str]] = {}
    #: Settings without a flag of their own: ``--set`` and files give them.
    key_only: ClassVar[Set[str]] = frozenset()

    #: The names of settings from flags and ``--set`` in errors, and where the others come from.
    _names: Mapping[str, str] = pydantic.PrivateAttr(default_factory=dict)
    _where: str = pydantic.PrivateAttr("settings")

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _reject_odd_values(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """pydantic takes ``true`` for 1, where it is a slip, and integers that no run.json can hold. A key in a URL would
        be in every file and log."""
        inside = [value]
        if isinstance(value, (Mapping, list, tuple)):
            inside += [*value, *value.values()] if isinstance(value, Mapping) else value
        _refuse_userinfo(inside)
        if any(isinstance(v, int) and not -(2**63) <= v < 2**63 for v in inside):
            raise PydanticCustomError("int_range", "Input should be an integer of at most 64 bits")
        if any(isinstance(v, bool) for v in inside):
            kinds = _kinds(cls.model_fields[str(info.field_name)].annotation)
            if kinds & {int, float} and not kinds & {bool, Any, object}:
                raise PydanticCustomError("number_type", "Input should be a number")
        return value

    @classmethod
    def load(
        cls,
        file: Path | None = None,
        overrides: Settings | None = None,
        sets: Sequence[str] = (),
        flags: Mapping[str, str] | None = None,
    ) -> Self:
        """Settings from a YAML ``file``, beaten by ``overrides`` that are not None, beaten by ``key=value`` strings.

        ``a.b=1`` in ``sets`` reaches into mappings. ``flags``: what errors call the settings that ``overrides`` gives.
        Raises UsageError for unknown keys, bad values or an unreadable file.
        """
        values: Settings = cls.of_file(read_yaml(file), file, overrides or {}) if file is not None else {}
        values |= {key: value for key, value in (overrides or {}).items() if value is not None}
        set_keys = list[str]()
        for text in sets:
            key, equals, value = text.partition("=")
            if not equals or not key:
                raise UsageError.bad_value(_SET.strip(), text, "key=value")
            key = key.strip()
            set_keys.append(key)
            section, last = section_of(values, key.split("."), f"{_SET}{text}")
            section[last] = parse_value(value)
        named = {key: name for key, name in (flags or {}).items() if (overrides or {}).get(key) is not None}
        named |= {key: f"{_SET}{key}" for key in set_keys}
        return cls.of(values, str(file) if file is not None else "settings", named)

    @classmethod
    def of_file(cls, values: Settings, file: Path, given: Settings) -> Settings:  # noqa: ARG003 - for other programs' files
        """The settings in the ``values`` of a ``file``; ``given``: those that beat them."""
        return values

    @classmethod
    def called_with(cls, function: Callable[..., Any], config: Self | None, settings: Mapping[str, Any]) -> Self:
        """What a public ``function`` got: ``config``, beaten by keywords. Raises UsageError; an unknown keyword may be a
        parameter of the function that was misspelt."""
        keywords = {key: value for key, value in settings.items() if value is not None}
        if config is not None and not keywords:
            return config
        base = config.model_dump(exclude_unset=True) if config is not None else {}
        parameters = inspect.signature(function).parameters.values()
        args = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        if misspelt := [key for key in keywords if key not in cls.model_fields and nearest(key, args)]:
            raise UsageError.unknown_key(misspelt[0], [*cls.model_fields, *args], "settings")
        return cls.of({**base, **keywords}, "settings")

    @classmethod
    def of(cls, values: Any, where: str, flags: Mapping[str, str] | None = None, section: str = "") -> Self:
        """The settings in ``values``. ``where`` names them in errors, but for those of ``flags``, which have their own
        names; ``section``: the dotted key in ``where`` of ``values``. Raises UsageError."""
        if not isinstance(values, Mapping):
            raise UsageError.bad_value(where, values, "a mapping of settings")
        if not cls.__pydantic_complete__:
            cls.model_rebuild()
        try:
            config = cls.model_validate(expanded(values, where))
        except pydantic.ValidationError as error:
            raise UsageError.several(cls._explained(error, values, where, flags or {}, section)) from error
        except UsageError as error:
            if not section:
                raise
            raise error.within(f"{where}: {section}") from error
        config._names, config._where = dict(flags or {}), where
        config._refuse_idle()
        return config

    def defaults(self) -> Settings:
        """The default of every setting that has one, for those in sections too, as ``model_dump`` has the values."""
        return dict(_defaults_of(self))

    def called(self, key: str) -> str:
        """The name of a setting in errors: the flag or ``--set KEY`` that gave it, or the file and its key."""
        return _called(key, self._where, self._names)

    def _refuse_idle(self) -> None:
        """Raises UsageError for a setting that was chosen and would do nothing."""
        faults = []
        tables = (("without", "", self.only_with), ("with", "no ", self.not_with))
        for word, no, name, (other, fits) in ((w, n, *item) for w, n, table in tables for item in table.items()):
            value = getattr(self, name)
            default = type(self).model_fields[name].get_default(call_default_factory=True)
            if value != default and not fits(self):
                shown = str(value) if isinstance(value, Path) else value
                clause = "" if value is True else f": got {shown!r}, which"
                other = with_options(other)
                text = f"{self.called(name)}{clause} has no effect {word} {other}"
                hint = "leave one of them out" if no else f"add {other}, or leave it out"
                faults.append(UsageError(text, hint=hint).at(self.called(name), value, f"{no}{other}"))
        if faults:
            raise UsageError.several(faults)

    @classmethod
    def _explained(
        cls,
        error: pydantic.ValidationError,
        values: Mapping[str, Any],
        where: str,
        flags: Mapping[str, str],
        section: str,
    ) -> Iterator[UsageError]:
        """One fault of each value, unknown keys first: a misspelt key is why another one seems to be missing."""
        faulty, misspelt = list[list[str]](), list[list[str]]()
        for fault in sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden"):
            kind, value, keys, context = fault["type"], fault["input"], _keys_of(fault, values), fault.get("ctx") or {}
            # Of a union pydantic says why each member does not fit.
            if any(all(map(str.__eq__, keys, others)) for others in faulty):
                continue
            path = ".".join([section, *keys]).strip(".")
            name, inside = _called(path, where, flags), keys[:-1]
            if kind == "extra_forbidden":
                misspelt.append(inside)
                place, section_value = place_of(name, keys[-1]), None if inside else value
                yield UsageError.unknown_key(keys[-1], _keys_at(cls, inside), place, section_value)
            elif kind == "missing":
                if inside not in misspelt:
                    yield cls._missing(path, where)
            elif not path:
                # "settings" is no name that a user knows.
                place = "" if where == "settings" else f"{where}: "
                yield UsageError(f"{place}{expected_text(fault)}").at(where)
            elif kind == "value_error" and isinstance(value, Mapping):
                yield UsageError(f"{name}: {expected_text(fault)}").at(name)
            elif kind == "literal_error":
                choices = [word.strip("'") for word in context["expected"].replace(" or ", ", ").split(", ")]
                yield UsageError.unknown_choice(name, str(value), choices, listed="--help")
            else:
                yield UsageError.bad_value(name, value, expected_text(fault), context.get("hint"))
            faulty.append(keys)

    @classmethod
    def _missing(cls, path: str, where: str) -> UsageError:
        values = get_args(cls.model_fields[path].annotation) if path in cls.model_fields else ()
        one_of = f", one of {', '.join(values)}" if all(isinstance(v, str) for v in values) and values else ""
        place = "" if where == "settings" else f"{where}: "
        return UsageError(f"{place}{path} is missing", hint=cls.how_to_give(path, one_of)).at(where, "nothing", path)

    @classmethod
    def how_to_give(cls, path: str, one_of: str) -> str:
        """What gives the setting with this dotted key, which is missing. ``one_of``: its choices, where it has some."""
        # Only a setting of the command itself is a flag or a keyword.
        how = cls.given_as.get(path) or ("" if "." in path else option(path))
        return f"give {how}{one_of}, or set it in {option('config')}" if how else f"add {path}: …{one_of}"


def _keys_of(fault: Any, values: Any) -> list[str]:
    """The keys and positions on the way to a fault, without the members of unions that pydantic names in between."""
    keys = list[str]()
    for word in fault["loc"]:
        inside = dict(enumerate(values)) if isinstance(values, (list, tuple)) else values
        if isinstance(inside, Mapping) and word in inside:
            keys, values = [*keys, str(word)], inside[word]
    return [*keys, str(fault["loc"][-1])] if fault["type"] == "missing" else keys


def _keys_at(section: type[pydantic.BaseModel], keys: Sequence[str]) -> list[str]:
    """The keys that a section below ``section`` may have."""
    for key in keys:
        fields = {field.alias or name: field for name, field in section.model_fields.items()}
        kinds = _kinds(fields[key].annotation) if key in fields else ()
        section = next((k for k in kinds if isinstance(k, type) and issubclass(k, pydantic.BaseModel)), section)
    return [field.alias or name for name, field in section.model_fields.items()]


def _defaults_of(settings: Any) -> Any:
    if isinstance(settings, Mapping):
        return {key: _defaults_of(value) for key, value in settings.items()}
    if not isinstance(settings, pydantic.BaseModel):
        return None
    defaults: Settings = {}
    for name, field in type(settings).model_fields.items():
        default = field.get_default(call_default_factory=True)
        is_section = field.is_required() or isinstance(default, (pydantic.BaseModel, Mapping))
        defaults[name] = defaults[field.alias or name] = (
            _defaults_of(getattr(settings, name)) if is_section else default
        )
    return defaults


def _called(key: str, where: str, names: Mapping[str, str]) -> str:
    """The name in errors of a setting, or of a part of one (``a.0``). ``names``: of those from flags and ``--set``."""
    parts = key.split(".")
    candidates = (names.get(".".join(parts[:n])) for n in range(len(parts), 0, -1))
    return next((name for name in candidates if name is not None), f"{where}: {key}")


def place_of(name: str, key: str) -> str:
    """Where an unknown ``key`` came from: the file, and the section in it, or ``--set``."""
    return _SET.strip() if name.startswith(_SET) else re.sub(rf"(: |\.){re.escape(key)}$", "", name)


#: What pydantic says → what stands after "expected".
_EXPECTED = {
    "^Input should be (greater|less)": r"a number \1",
    "^(Input should be|Value error,) ": "",
    "^String should match pattern": "text that matches",
    # The class of a section is no name that a user knows.
    "a valid dictionary or instance of .*": "an object of settings",
    # The parser's error adds nothing to the value.
    ", unable to.*": "",
}


def expected_text(fault: Any) -> str:
    """What pydantic expected, as the text after "expected"."""
    message = str(fault["msg"])
    for pattern, text in _EXPECTED.items():
        message = re.sub(pattern, text, message, flags=re.DOTALL)
    return message


def _kinds(annotation: Any) -> set[Any]:
    """The types that an annotation is made of."""
    inner = get_args(annotation)
    return set().union(*map(_kinds, inner)) if inner else {annotation} if isinstance(annotation, Hashable) else set()


def read_yaml(file: Path) -> Settings:
    """A YAML mapping. Numbers such as ``1e-6`` are numbers, as people expect, and duplicate keys are errors."""
    import yaml

    try:
        data = yaml.load(file.read_bytes(), Loader=_loader())
    except (FileNotFoundError, IsADirectoryError) as error:
        raise DataError.missing_path(file, "a YAML file") from error
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # An invalid date is a ValueError of PyYAML's.
        fault: Any = error
        mark = getattr(error, "problem_mark", None)
        reason = f"{fault.problem} at line {mark.line + 1}, column {mark.column + 1}" if mark else first_line(error)
        raise UsageError(f"{file}: is not valid YAML: {reason}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UsageError.bad_value(str(file), json_kind(data), "an object of settings")
    return data


def as_set(key: str, value: str) -> str:
    """``--set KEY=VALUE`` as it is typed."""
    return _SET + shlex.quote(f"{key}={value}")


def parse_value(text: str) -> Any:
    """The value of ``--set key=VALUE``, read as YAML: ``1e-6`` is a number, ``[a, b]`` a list, ``null`` None."""
    import yaml

    try:
        return yaml.load(text, Loader=_loader())
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def section_of(values: Settings, words: Sequence[str], called: str) -> tuple[Settings, str]:
    """The mapping that has the last of the ``words`` of a dotted key; those on the way are made where they are missing,
    and copied where they are not. Raises UsageError, with the name ``called``, for a key below a single value."""
    *parents, last = words
    for parent in parents:
        below = values.get(parent)
        if not isinstance(below, dict | None):
            raise UsageError(f"{called}: {parent!r} is a single value, so it has no key {last!r}")
        values[parent] = values = dict(below or {})
    return values, last


def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML 1.1 reads 1e-6 as a string and lets a second key win silently; neither is what a user means."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = set[tuple[str, str]]()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if (key.tag, str(key.value)) in keys:
                    text = f"key {key.value!r} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
                keys.add((key.tag, str(key.value)))
            mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
            return mapping

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
    # A library that vLLM imports (lm-format-enforcer) makes dates text for every loader of the process.
    timestamp: Any = yaml.constructor.SafeConstructor.construct_yaml_timestamp
    Loader.add_constructor("tag:yaml.org,2002:timestamp", timestamp)
    return Loader


def _names(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    names = [name.strip() for name in value.split(",") if name.strip()]
    # Nothing but commas would mean all, which is the opposite of a choice.
    if not names:
        raise ValueError("names, as in a,b")
    return names


def _server_urls(value: Any) -> Any:
    if value is None:
        return []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        return value
    urls = [url for text in texts for url in (_listed(Path(text[1:])) if text.startswith("@") else _words(text))]
    _refuse_userinfo(urls)
    return urls


def _refuse_userinfo(values: Sequence[Any]) -> None:
    if any(map(has_userinfo, values)):
        raise PydanticCustomError(
            "userinfo", "Input should be a URL without a user name or password", {"hint": KEYS_HINT}
        )


def _listed(file: Path) -> list[str]:
    """The URLs in a file of one per line, where ``#`` begins a comment. Raises DataError."""
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError.unreadable(file, str(error), "give a text file with one URL per line") from error
    urls = [url for line in lines for url in _words(line.partition("#")[0])]
    if not urls:
        raise DataError.empty(file, "at least one URL")
    return urls


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def one_or_list(value: list[str]) -> str | list[str] | None:
    """A list as files and run.json have it: of one entry, that entry."""
    return value if len(value) > 1 else next(iter(value), None)


#: Base URLs of servers: a text, texts, comma lists, or ``@FILE`` of them.
ServerUrls = Annotated[
    list[str],
    pydantic.BeforeValidator(_server_urls, json_schema_input_type=str | list[str] | None),
    pydantic.PlainSerializer(one_or_list),
]

#: Names; in flags and ``--set`` as ``a,b``.
Names = Annotated[tuple[str, ...], pydantic.BeforeValidator(_names)]

#: Fields of settings that start replicas.
RayAddress = Annotated[
    str | None,
    pydantic.Field(pattern=r"^(auto|local|[^/]+:\d{1,5})$"),
    pydantic.Field(description="Ray cluster of --replicas: auto, local or HOST:PORT (default: local, started here)."),
]
ReplicaNeeds = Annotated[Settings, pydantic.Field(description="Resources per replica: num_cpus, num_gpus, resources.")]

#: Affects only speed: not compared on a resume.
Abandoned = Annotated[
    Literal["keep", "drop"],
    pydantic.Field(description="Unread turns: retries that nothing continues, clients that disconnected."),
]
