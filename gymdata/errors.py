"""Every error that gymdata raises on purpose, and the wording of each.

An error says what was got, what was expected, where it was, and what to do next. Its words are those of ``texts``.
"""

from __future__ import annotations

import contextlib
import copyreg
import errno
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self

from gymdata import texts
from gymdata.texts import *  # noqa: F403 - who words an error imports all from here

EXIT_OK = 0
EXIT_FAULTS = 1
EXIT_USAGE = 2
EXIT_OUTSIDE = 3
EXIT_INTERRUPTED = 130

#: The extra of pyproject.toml that brings a module which the base install lacks, where no command knows it better.
BROUGHT_BY = {
    **dict.fromkeys(("aiohttp", "huggingface_hub", "tokenizers", "transformers"), "collect"),
    **dict.fromkeys(("accelerate", "datasets", "numba", "peft", "safetensors", "torch", "trl"), "train"),
    "fastapi": "serve",
    **dict.fromkeys(("jsonschema", "math_verify"), "rewards"),
    "tensorboard": "tensorboard",
    "obstore": "s3",
    "ray": "ray",
    "gguf": "real",
    "vllm": "engine",
}


class GymdataError(Exception):
    """Base of all errors raised on purpose. ``exit_code`` is what a command ends with; ``code``: the validation code of the
    fault, where it has one."""

    exit_code = EXIT_USAGE
    #: What kind of error this is, for programs: usage, data, refused, store, outside.
    kind: ClassVar[str] = "error"
    #: The parts of the message, where it has them: the file, row, field or flag; what was there; what should be.
    where: str | None = None
    got: Any = None
    expected: Any = None

    def __init__(
        self, message: str, *, hint: str | None = None, code: str | None = None, exit_code: int | None = None
    ) -> None:
        # No message has the secrets of a URL.
        message, hint = texts.redacted(message), texts.redacted(hint) if hint is not None else None
        super().__init__(message)
        self.code, self.exit_code = code, type(self).exit_code if exit_code is None else exit_code
        self.message = message
        self.hint = hint
        #: The message without the place, where a caller has another place to name.
        self.reason = message

    def __reduce__(self) -> tuple[Any, ...]:
        """The same error in another process."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]  # typeshed lacks it

    def __str__(self) -> str:
        """What people read: at most ``REFUSAL`` characters besides long paths. Programs have ``message``."""
        return self.shown(texts.REFUSAL)

    def shown(self, most: int) -> str:
        """The message, and its hint, in at most ``most`` characters."""
        return texts.refusal(self.message, self.hint or "", most)

    def at(self, where: object, value: object = None, expected: str | None = None) -> Self:
        """This error with the parts of its message, for programs."""
        self.where = texts.redacted(str(where))
        self.got = None if value is None else texts.redacted(str(value))
        self.expected = expected
        return self

    def to_dict(self) -> dict[str, object]:
        """The error as JSON, for programs."""
        names = ("kind", "code", "message", "where", "got", "expected", "hint", "exit_code")
        return {"type": type(self).__name__, **{name: getattr(self, name) for name in names}}


class UsageError(GymdataError):
    """The command, its flags or its configuration cannot be honoured. ``faults``: each of them, where there are several.
    ``listed``: people read all of them, too."""

    kind = "usage"
    faults: tuple[UsageError, ...] = ()
    listed = False

    def shown(self, most: int) -> str:
        if not self.faults:
            return super().shown(most)
        lines = [f"{len(self.faults)} errors:"]
        whole = "\n".join(lines + [f"- {fault.shown(most)}" for fault in self.faults])
        if self.listed or len(whole) <= most:
            return whole
        # Without hints, which each has when it is the last one.
        rest = ["- " + textwrap.shorten(fault.message, texts.MOST, placeholder=" …") for fault in self.faults]
        while rest and len("\n".join([*lines, rest[0], f"- and {len(rest)} more"])) <= most:
            lines.append(rest.pop(0))
        return "\n".join([*lines, f"- and {len(rest)} more"] if rest else lines)

    def to_dict(self) -> dict[str, object]:
        return super().to_dict() | ({"faults": [fault.to_dict() for fault in self.faults]} if self.faults else {})

    @classmethod
    def several(cls, faults: Iterable[UsageError], *, listed: bool = False) -> UsageError:
        """Everything that is wrong as one error, so that it can be corrected in one go, each fault once. One fault stays as
        it is. ``listed``: however many they are, each is shown with its hint."""
        leaves = (leaf for fault in faults for leaf in (fault.faults or (fault,)))
        faults = tuple({leaf.message: leaf for leaf in leaves}.values())
        if len(faults) == 1:
            return faults[0]
        error = cls(f"{len(faults)} errors:\n" + "\n".join(f"- {fault}" for fault in faults))
        error.faults, error.listed = faults, listed
        return error

    def within(self, where: str) -> UsageError:
        """This error of settings that are a part of something, ``where``."""
        return UsageError.several(
            UsageError(f"{where}: {fault.message.removeprefix('settings: ')}", hint=fault.hint)
            for fault in self.faults or (self,)
        )

    @classmethod
    def unknown_key(cls, key: str, keys: Iterable[str], where: str, value: object = None) -> UsageError:
        """``value``: where settings are flat, what was given for the key, which may be a section of known keys."""
        names = sorted(keys)
        expected = f"one of {', '.join(names)}"
        # Those of a library's trainer would fill a screen.
        hint = (
            f"known keys: {texts.abridged(names)}"
            if len(expected) < 1_000
            else "`gymdata docs settings` lists the keys"
        )
        hint = texts.nearest(key, names) or hint
        if isinstance(value, dict) and (inside := sorted(value.keys() & set(names))):
            hint = f"settings have no sections: move {texts.abridged(inside)} to the top level"
        return cls(f"{where}: unknown key {texts.brief(key)}", hint=hint).at(where, key, expected)

    @classmethod
    def unknown_choice(cls, where: str, value: str, names: Iterable[str], *, listed: str = "") -> UsageError:
        """``listed``: what lists the names where they are too many for a message."""
        names = list(names)
        expected, near = texts.choices(value, names), texts.nearest(value, names)
        more = f"{listed} lists all" if listed and expected != ", ".join(names) else ""
        return cls.bad_value(where, value, f"one of {expected}", hint="; ".join(filter(None, (near, more))) or None)

    @classmethod
    def bad_value(cls, where: str, value: object, expected: str, hint: str | None = None) -> UsageError:
        return cls(f"{where}: got {texts.brief(value)}, expected {expected}", hint=hint).at(where, value, expected)

    @classmethod
    def missing_extra(cls, module: str, extra: str) -> UsageError:
        """``extra``: of pyproject.toml, or several ("train,tensorboard"); ``engine`` means the one that this machine
        can run, ``cpu`` or ``vllm``."""
        from gymdata.installed import install_command  # Late: it loads importlib.metadata.

        hint = install_command(extra.replace("engine", "cpu"))
        if "engine" in extra:
            hint += f"   (on a machine with a GPU: {install_command(extra.replace('engine', 'vllm'))})"
        return MissingExtraError(f"this needs the Python module {module!r}, which is not installed", hint=hint)

    @classmethod
    def missing_module(cls, error: ModuleNotFoundError) -> UsageError | None:
        """``missing_extra`` of a module that an import did not find; None when no extra brings it."""
        module = (error.name or "").partition(".")[0]
        return cls.missing_extra(module, BROUGHT_BY[module]) if module in BROUGHT_BY else None


class MissingExtraError(UsageError):
    """A library that an extra brings is not installed."""


#: What to do with a table, or with tasks, where another table is read.
_READ_BY = {
    "tasks": "`gymdata collect {path} -m MODEL -o RUN` samples rollouts of its tasks; then pass RUN",
    "rollouts": "train-sft and train-kto read rollouts",
    "pairs": "train-dpo and train-reward read pairs",
    "experiences": "train-value and train-rl read experiences",
}
#: What makes a table of the rollouts of a run.
_MADE_BY = {"pairs": "pairs", "experiences": "experience"}

#: Names of dumps of other projects, below a folder.
_DUMPS = tuple(
    "*/" * depth + name
    for name in ("tq_batch.pt", "gen_batch.dp", "*_training_input.pkl", "[0-9]*.pt")
    for depth in range(3)
)


class DataError(GymdataError):
    """A file or row is not what it must be."""

    kind = "data"

    @classmethod
    def missing_path(
        cls, path: Path | str, expected: str = "a run folder, a file or a glob", *, folders: bool = False
    ) -> DataError:
        """``folders``: nothing but a folder can have been meant."""
        location = Path(path)
        if location.exists():
            kind = "folder" if location.is_dir() else "file"
            return cls(f"{path}: is a {kind}, expected {expected}").at(path, kind, expected)
        fault, hint = "no such file or folder", texts.nearest_beside(location, folders=folders)
        if location.is_symlink():
            fault, hint = f"is a link to {location.readlink()}, which does not exist", None
        return cls(f"{path}: {fault} (expected {expected})", hint=hint).at(path, "nothing", expected)

    @classmethod
    def empty(cls, path: Path | str, expected: str) -> DataError:
        folder = Path(path)
        inside = [p.name for p in folder.iterdir() if p.suffix in (".parquet", ".jsonl")] if folder.is_dir() else []
        hint = (
            f"it holds {texts.abridged(sorted(inside)[:6])}: give one of these, or another folder" if inside else None
        )
        if inside == ["failures.jsonl"]:
            hint = f"all attempts failed so far: `gymdata query :failures {path}` says why"
        if any(folder.glob("*/cell.json")):
            hint = f"it is a sweep, with the table {folder}/results.md; its cells are {folder}/*/eval, */policy"
        return cls(f"{path}: is empty (expected {expected})", hint=hint).at(path, "nothing", expected)

    @classmethod
    def unknown_id(cls, path: Path | str, column: str, value: str, values: Sequence[str]) -> DataError:
        """No row has the requested id."""
        table = {"pair_id": "pairs"}.get(column, "rollouts")
        hint = texts.nearest(value, values) or f"`gymdata query 'SELECT {column} FROM {table}' {path}` lists them"
        return cls(f"{path}: got {column} {value!r}, expected one of its {len(values):,}", hint=hint)

    @classmethod
    def other_table(cls, path: Path | str, table: str, expected: str) -> DataError:
        """Rows of one table, or tasks, where another table is read."""
        hints = [_READ_BY[table].format(path=path)] if table in _READ_BY else []
        if expected in _MADE_BY and table != "tasks":
            run = path if table == "rollouts" else "RUN"
            hints.insert(0, f"`gymdata {_MADE_BY[expected]} {run}` makes {expected} of rollouts")
        hint = "; ".join(hints) or None
        return cls(f"{path}: contains {table}, expected {expected}", hint=hint).at(path, table, expected)

    @classmethod
    def not_a_run(cls, path: Path) -> DataError:
        names = sorted(p.name for p in path.iterdir())
        inside = texts.abridged(names[:6]) or "nothing"
        runs = [name for name in names if (path / name / "run.json").is_file()]
        hint = "give a folder that `gymdata collect -o` wrote, or a file or glob inside this one"
        if runs:
            hint = f"give a run inside it: {', '.join(str(path / name) for name in runs[:3])}"
        elif dumps := next((glob for glob in _DUMPS if any(path.glob(glob))), None):
            hint = f"give its files as a glob: '{path}/{dumps}'"
        return cls(f"{path}: is a folder but not a run: it has no run.json (it holds {inside})", hint=hint)

    @classmethod
    def bad_row(
        cls, path: Path | str, line: int, field: str | None, value: str, expected: str, hint: str | None = None
    ) -> DataError:
        where = f"{path}, line {line}" + (f", field {field!r}" if field else "")
        error = cls(f"{where}: got {value}, expected {expected}", hint=hint)
        error.reason = (f"field {field!r}: " if field else "") + f"got {value}, expected {expected}"
        return error.at(where, value, expected)

    @classmethod
    def bad_json(cls, where: str, text: str, expected: str) -> DataError:
        """A column of JSON text that is not; a fault of the data."""
        got, expected = text[:60], f"the JSON text of {expected}"
        return cls(f"{where}: got {got!r}, expected {expected}", exit_code=EXIT_FAULTS).at(where, got, expected)

    @classmethod
    def unreadable(cls, path: Path | str, why: str, hint: str | None = None) -> DataError:
        error = cls(f"{path}: cannot be read: {why}", hint=hint)
        error.reason = f"cannot be read: {why}"
        return error

    @classmethod
    def altered(cls, code: str, where: str, detail: str) -> DataError:
        """Turns that are not as they were collected (T209, T210). Their rows are faults of the data, not of the command."""
        hint = "the data was changed after collection: `gymdata validate` lists every such turn, and "
        hint += f"{texts.option('fix', 'drop')} leaves their rollouts out"
        return cls(f"{code}: {where}: {detail}", hint=hint, code=code, exit_code=EXIT_FAULTS)

    @classmethod
    def missing_columns(cls, path: Path | str, table: str, missing: Sequence[str], has: Sequence[str]) -> DataError:
        lacks = f"lacks the {texts.plural(len(missing), 'column')} {texts.abridged(missing)} (has {texts.abridged(has[:3])})"
        hint = None if "run_id" in has else f"rows of another system? `gymdata import {path} -o RUN` reads them"
        return cls(f"{path}: table {table} {lacks}", hint=hint, code="S103")


class RefusedError(GymdataError):
    """The data is readable, but using it for this would break the promise; the validation code says why."""

    kind = "refused"
    exit_code = EXIT_FAULTS

    def __init__(self, message: str, *, code: str | None = None, hint: str | None = None) -> None:
        super().__init__(f"{code}: {message}" if code else message, hint=hint, code=code)


def changes(differences: Sequence[tuple[str, object, object]]) -> str:
    """Recorded settings that differ, as (key, recorded, now); where that is long the shortest, and the names of the
    others. Of user code (``file.py:name@hash+helper.py@hash``) the files whose hashes differ."""
    changed = {
        key: f"{key}: run has {texts.brief(was, 40)}, now {texts.brief(now, 40)}" for key, was, now in differences
    }
    for key, was, now in differences:
        spec, hashes = str(was).partition("@")[0], [{*str(source).split("+")} for source in (was, now)]
        if ".py:" in spec and spec == str(now).partition("@")[0]:
            files = {part.partition("@")[0].partition(":")[0] for part in hashes[0] ^ hashes[1]}
            changed[key] = f"{key}: {', '.join(sorted(files))} changed since"
    every = "; ".join(changed.values())
    if len(every) <= texts.MOST * 4 // 3 or len(changed) == 1:
        return every
    shortest, *others = sorted(changed, key=lambda key: len(changed[key]))
    return f"{changed[shortest]}; also {texts.abridged(others)}"


class StoreError(GymdataError):
    """A run folder cannot be opened or written as requested."""

    kind = "store"

    @classmethod
    def other_identity(cls, run: Path, differences: Sequence[tuple[str, object, object]]) -> StoreError:
        again = texts.option("overwrite", True)
        hint = f"the same settings and code resume it; another output folder, or {again}, starts again"
        return cls(f"{run}: was made with other settings: {changes(differences)}", hint=hint)

    @classmethod
    def from_os(cls, path: Path, error: OSError, *, journaled: bool = False) -> StoreError:
        """An error of the operating system while ``path`` was written. ``journaled``: there are rows in a journal, which the
        same command resumes from."""
        if error.errno == errno.ELOOP:
            return cls(f"{path}: is a symbolic link, and gymdata does not write through links")
        # Arrow has a text of its own for an error of the system.
        why = os.strerror(error.errno) if error.errno else error.strerror or str(error)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        todo = "free space" if full else "make it writable or give another output folder"
        safe, again = ("rows journaled so far are safe; ", "to resume") if journaled else ("", "again")
        hint = f"{safe}{todo} and run the same command {again}"
        return cls(f"{path}: could not be written: {why}", hint=hint, exit_code=EXIT_OUTSIDE)


class OutsideError(GymdataError):
    """An outside system failed. ``system`` is one of agent, engine, environment, hub, reward, judge, trainer, worker.

    ``reason`` is the message without the name of the system. It may quote any text; lone surrogates in it, which no
    file can hold, become question marks.
    """

    kind = "outside"
    exit_code = EXIT_OUTSIDE

    def __init__(
        self,
        system: str,
        message: str,
        *,
        hint: str | None = None,
        retryable: bool = False,
        retry_after_s: float | None = None,
        fatal: bool = False,
        final: bool = False,
        status: int | None = None,
    ) -> None:
        message = message.encode("utf-8", "replace").decode()
        super().__init__(f"{system}: {message}", hint=hint)
        self.system = system
        self.reason = texts.redacted(message)
        self.retryable = retryable
        self.retry_after_s = retry_after_s
        #: The system is gone: other requests to it cannot succeed either.
        self.fatal = fatal
        #: The same request would be refused again, whenever it is made.
        self.final = final
        #: The HTTP status of the answer.
        self.status = status

    @classmethod
    def user_code(cls, name: str, error: BaseException, where: str) -> OutsideError:
        """The code of an environment or a user raised; ``where``: its file and line."""
        hint = f"collect into another folder, or with {texts.option('overwrite', True)}: changed code is another environment"
        fault = cls("environment", f"{name} raised {texts.raised(error)} ({where})", hint=hint)
        fault.exit_code = EXIT_FAULTS
        return fault

    def to_dict(self) -> dict[str, object]:
        names = ("system", "reason", "retryable", "retry_after_s", "fatal", "final", "status")
        return super().to_dict() | {name: getattr(self, name) for name in names}


class RewardError(OutsideError):
    """A reward failed: a user's function, a reward model or a reward server. ``fatal``: on every rollout alike.

    ``where`` is the file and line of the user's code.
    """

    def __init__(self, message: str, *, hint: str | None = None, retryable: bool = False, fatal: bool = False) -> None:
        super().__init__("reward", message, hint=hint, retryable=retryable, fatal=fatal)


def require(extra: str, *modules: str) -> None:
    """Raise UsageError with the command that installs ``extra`` unless all of ``modules`` are there; none is imported, so
    that a command can say so before it does anything."""
    for module in modules:
        if not (find_spec(module) if module not in sys.modules else sys.modules[module]):
            raise UsageError.missing_extra(module, extra)


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Around imports of libraries that ``extra`` brings: one that is missing becomes the command that installs them."""
    try:
        yield
    except ModuleNotFoundError as error:
        named: BaseException | None = error
        # transformers says which of its own names it could not import, and the module only in the cause.
        while named is not None and getattr(named, "name", None) is None:
            named = named.__cause__
        module = str(getattr(named, "name", "gymdata"))
        if module.partition(".")[0] == "gymdata":
            raise  # A missing module of gymdata is a defect, which no extra fixes.
        raise UsageError.missing_extra(module, extra) from error
