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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from gymdata.installed import NAME, install_command, update_advice
from gymdata.texts import *  # noqa: F403 - who words an error imports all from here
from gymdata.texts import (
    MOST,
    REFUSAL,
    abridged,
    brief,
    choices,
    nearest,
    nearest_beside,
    option,
    plural,
    raised,
    redacted,
    refusal,
)

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
        message, hint = redacted(message), redacted(hint) if hint is not None else None
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
        return self.shown(REFUSAL)

    def shown(self, most: int) -> str:
        """The message, and its hint, in at most ``most`` characters."""
        return refusal(self.message, self.hint or "", most)

    def at(self, where: object, value: object = None, expected: str | None = None) -> Self:
        """This error with the parts of its message, for programs."""
        self.where = redacted(str(where))
        self.got = None if value is None else redacted(str(value))
        self.expected = expected
        return self

    def to_dict(self) -> dict[str, object]:
        """The error as JSON, for another process: ``reported`` makes an equal one of it."""
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
        rest = ["- " + textwrap.shorten(fault.message, MOST, placeholder=" …") for fault in self.faults]
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
        """This error of settings that are a section, ``where``, of a file."""
        faults = self.faults or (self,)
        named = (f"{where}: {fault.message.removeprefix('settings: ')}" for fault in faults)
        return UsageError.several(UsageError(text, hint=f.hint) for text, f in zip(named, faults, strict=True))

    @classmethod
    def unknown_key(cls, key: str, keys: Iterable[str], where: str, value: object = None) -> UsageError:
        """``value``: where settings are flat, what was given for the key, which may be a section of known keys."""
        names = sorted(keys)
        expected = f"one of {', '.join(names)}"
        # Those of a library's trainer would fill a screen.
        hint = f"known keys: {abridged(names)}" if len(expected) < 1_000 else "`gymdata docs settings` lists the keys"
        hint = nearest(key, names) or hint
        if isinstance(value, dict) and (inside := sorted(value.keys() & set(names))):
            hint = f"settings have no sections: move {abridged(inside)} to the top level"
        return cls(f"{where}: unknown key {brief(key)}", hint=hint).at(where, key, expected)

    @classmethod
    def unknown_choice(cls, where: str, value: str, names: Iterable[str], *, listed: str = "") -> UsageError:
        """``listed``: what lists the names where they are too many for a message."""
        names = list(names)
        expected, near = choices(value, names), nearest(value, names)
        more = f"{listed} lists all" if listed and expected != ", ".join(names) else ""
        return cls.bad_value(where, value, f"one of {expected}", hint="; ".join(filter(None, (near, more))) or None)

    @classmethod
    def bad_value(cls, where: str, value: object, expected: str, hint: str | None = None) -> UsageError:
        return cls(f"{where}: got {brief(value)}, expected {expected}", hint=hint).at(where, value, expected)

    @classmethod
    def missing_extra(cls, module: str, extra: str) -> UsageError:
        """``extra``: of pyproject.toml, or several ("train,tensorboard"); ``engine`` means the one that this machine
        can run, ``cpu`` or ``vllm``."""
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


#: What to do with a table where another one is read, by the one that is read, then by the one that is there.
_MADE_BY = {"pairs": "pairs", "experiences": "experience"}
_READ_BY = {
    "rollouts": "train-sft and train-kto read rollouts",
    "pairs": "train-dpo and train-reward read pairs",
    "experiences": "train-value and train-rl read experiences",
}


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
        fault, hint = "no such file or folder", nearest_beside(location, folders=folders)
        if location.is_symlink():
            fault, hint = f"is a link to {location.readlink()}, which does not exist", None
        return cls(f"{path}: {fault} (expected {expected})", hint=hint).at(path, "nothing", expected)

    @classmethod
    def empty(cls, path: Path | str, expected: str) -> DataError:
        folder = Path(path)
        inside = [p.name for p in folder.iterdir() if p.suffix in (".parquet", ".jsonl")] if folder.is_dir() else []
        hint = f"it holds {abridged(sorted(inside)[:6])}: give one of these, or another folder" if inside else None
        if inside == ["failures.jsonl"]:
            hint = f"all attempts failed so far: `gymdata query :failures {path}` says why"
        if any(folder.glob("*/cell.json")):
            hint = f"it is a sweep, with the table {folder}/results.md; its cells are {folder}/*/eval, */policy"
        return cls(f"{path}: is empty (expected {expected})", hint=hint).at(path, "nothing", expected)

    @classmethod
    def unknown_id(cls, path: Path | str, column: str, value: str, values: Sequence[str]) -> DataError:
        """No row has the requested id."""
        table = {"pair_id": "pairs"}.get(column, "rollouts")
        hint = nearest(value, values) or f"`gymdata query 'SELECT {column} FROM {table}' {path}` lists them"
        return cls(f"{path}: got {column} {value!r}, expected one of its {len(values):,}", hint=hint)

    @classmethod
    def other_table(cls, path: Path | str, table: str, expected: str) -> DataError:
        """Rows of one table, or tasks, where another table is read."""
        hint = _READ_BY.get(table)
        if table == "tasks":
            hint = f"`gymdata collect {path} -m MODEL -o RUN` samples rollouts of its tasks; then pass RUN"
        elif (command := _MADE_BY.get(expected)) and table == "rollouts":
            hint = f"`gymdata {command} {path}` makes {expected} of them"
        elif command:
            hint = f"`gymdata {command} RUN` makes {expected} of the rollouts of a run" + (f"; {hint}" if hint else "")
        return cls(f"{path}: contains {table}, expected {expected}", hint=hint).at(path, table, expected)

    @classmethod
    def not_a_run(cls, path: Path | str, names: Sequence[str]) -> DataError:
        inside = abridged(names[:6]) or "nothing"
        runs = [name for name in names if (Path(path) / name / "run.json").is_file()]
        hint = "give a folder that `gymdata collect -o` wrote, or a file or glob inside this one"
        if runs:
            hint = f"give a run inside it: {', '.join(str(Path(path) / name) for name in runs[:3])}"
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
    def refuse_pipe(cls, path: Path) -> None:
        """Raise when ``path`` is a pipe or a device: what is read from one cannot be read again; and for what Git left there
        in place of a file."""
        if path.exists() and not path.is_file() and not path.is_dir():
            raise cls.unreadable(path, "is no regular file, and files are read more than once")
        if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(b"version https://git-lfs."):
            raise cls.unreadable(path, "is a pointer of Git LFS, not the file", "`git lfs pull` fetches it")

    @classmethod
    def damaged(cls, path: Path | str, why: str) -> DataError:
        """Content that is not what was written. A fault of the data, not of the command."""
        hint = "bring the file back from a copy, or write it again"
        return cls(f"{path}: is damaged: {why}", hint=hint, exit_code=EXIT_FAULTS)

    @classmethod
    def unnamed(cls, path: Path, described_by: Path) -> DataError:
        """A part that is in the folder of a run which did not write it."""
        hint = f"move it out; if it is meant to be there, {option('allow_changed', True)} reads it"
        return cls(f"{path}: is not among the files of {described_by}", hint=hint, exit_code=EXIT_FAULTS)

    @classmethod
    def changed(cls, path: Path | str, run_json: Path | str, why: str) -> DataError:
        """A sealed file that is not as it was written. A fault of the data, not of the command."""
        allowed = option("allow_changed", True)
        hint = f"bring the file back from a copy; if the change was meant, commands that only read it take {allowed}"
        return cls(f"{path}: differs from what {run_json} recorded: {why}", hint=hint, exit_code=EXIT_FAULTS)

    @classmethod
    def newer_schema(cls, path: Path | str, table: str, version: int, newest: int) -> DataError:
        text = f"{path}: {table} version {version} is newer than this gymdata understands ({newest})"
        return cls(text, hint=update_advice(), code="S104")

    @classmethod
    def altered(cls, code: str, where: str, detail: str) -> DataError:
        """Turns that are not as they were collected (T209, T210). Their rows are faults of the data, not of the command."""
        hint = "the data was changed after collection: `gymdata validate` lists every such turn, and "
        hint += f"{option('fix', 'drop')} leaves their rollouts out"
        return cls(f"{code}: {where}: {detail}", hint=hint, code=code, exit_code=EXIT_FAULTS)

    @classmethod
    def too_large(cls, quantity: str, largest: float) -> DataError:
        """Numbers whose squares are beyond float64 (R502): their spread would be infinite."""
        hint = f"score on a smaller scale, or `gymdata filter` them: {option('where', 'abs(reward) < 1e100')}"
        text = f"R502: {quantity} are too large to be compared (up to {largest:.3g})"
        return cls(text, hint=hint, code="R502", exit_code=EXIT_FAULTS)

    @classmethod
    def missing_columns(cls, path: Path | str, table: str, missing: Sequence[str], has: Sequence[str]) -> DataError:
        lacks = f"lacks the {plural(len(missing), 'column')} {abridged(missing)} (has {abridged(has[:3])})"
        hint = None if "run_id" in has else f"rows of another system? `gymdata import {path} -o RUN` reads them"
        return cls(f"{path}: table {table} {lacks}", hint=hint, code="S103")


class RefusedError(GymdataError):
    """The data is readable, but using it for this would break the promise; the validation code says why."""

    kind = "refused"
    exit_code = EXIT_FAULTS

    def __init__(self, message: str, *, code: str | None = None, hint: str | None = None) -> None:
        super().__init__(f"{code}: {message}" if code else message, hint=hint, code=code)


def _changes(changes: Iterable[tuple[str, str]]) -> str:
    """What differs, as (name, text); where that is long the shortest text, and the names of the others."""
    every = list(changes)
    texts = "; ".join(text for _, text in every)
    if len(texts) <= MOST * 4 // 3 or len(every) == 1:
        return texts
    (_, shortest), *others = sorted(every, key=lambda change: len(change[1]))
    return f"{shortest}; also {abridged(name for name, _ in others)}"


class StoreError(GymdataError):
    """A run folder cannot be opened or written as requested."""

    kind = "store"

    @classmethod
    def locked(cls, run: Path, holder: str) -> StoreError:
        return cls(f"{run}: another process writes to this run ({holder})")

    @classmethod
    def other_identity(cls, run: Path, differences: Sequence[tuple[str, object, object]]) -> StoreError:
        changed = []
        for _, was, now in differences:
            # The files whose hashes differ in two sources of user code (``file.py:name@hash+helper.py@hash``) of one name.
            spec, of_now = str(was).partition("@")[0], str(now).partition("@")[0]
            parts = set(str(was).split("+")) ^ set(str(now).split("+")) if ".py:" in spec and spec == of_now else ()
            changed.append(", ".join(sorted({part.partition("@")[0].partition(":")[0] for part in parts})))
        lines = _changes(
            (key, f"{key}: {f'{files} changed since' if files else f'run has {brief(was, 40)}, now {brief(now, 40)}'}")
            for files, (key, was, now) in zip(changed, differences, strict=True)
        )
        same = f"the same settings{' and code' if any(changed) else ''} resume it"
        hint = f"{same}; another output folder, or {option('overwrite', True)}, starts again"
        return cls(f"{run}: was made with other settings: {lines}", hint=hint)

    @classmethod
    def other_kind(cls, path: Path, holds: str) -> StoreError:
        hint = f"give another output folder or file ({option('overwrite', True)} replaces only the same kind of output)"
        return cls(f"{path}: holds {holds}, which this command does not replace", hint=hint)

    @classmethod
    def other_settings(cls, path: Path, contents: str, differences: Sequence[tuple[str, object, object]]) -> StoreError:
        changed = _changes(
            (key, f"{key}: {brief(was, 24)} there, now {brief(now, 24)}") for key, was, now in differences
        )
        words = (now for _, _, now in differences if isinstance(now, str) and now.replace("-", "").isalnum())
        word = next(words, "other")
        # A folder's name may end in what is no suffix, as in model-0.1.2.
        other = path.with_stem(f"{path.stem}-{word}") if path.is_file() else path.with_name(f"{path.name}-{word}")
        keeps = f"another output folder or file keeps both: {option('output', str(other))}"
        hint = f"{option('overwrite', True)} replaces them; {keeps}"
        return cls(f"{path}: holds {contents} with other settings ({changed})", hint=hint)

    @classmethod
    def not_described(cls, path: Path) -> StoreError:
        hint = f"{option('overwrite', True)} replaces it; another output folder or file keeps both"
        return cls(f"{path}: exists, and no run.json says what it is", hint=hint)

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
    #: What decides whether a request is repeated, and when.
    _repeating = ("retryable", "retry_after_s", "fatal", "final", "status")

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
        self.reason = redacted(message)
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
        hint = f"collect into another folder, or with {option('overwrite', True)}: changed code is another environment"
        fault = cls("environment", f"{name} raised {raised(error)} ({where})", hint=hint)
        fault.exit_code = EXIT_FAULTS
        return fault

    def to_dict(self) -> dict[str, object]:
        return super().to_dict() | {name: getattr(self, name) for name in ("system", "reason", *self._repeating)}


class RewardError(OutsideError):
    """A reward failed: a user's function, a reward model or a reward server. ``fatal``: on every rollout alike.

    ``where`` is the file and line of the user's code.
    """

    def __init__(self, message: str, *, hint: str | None = None, retryable: bool = False, fatal: bool = False) -> None:
        super().__init__("reward", message, hint=hint, retryable=retryable, fatal=fatal)


def reported(document: Mapping[str, Any]) -> GymdataError:
    """The error that another process wrote with ``to_dict``. One of a type that this one does not know is a GymdataError."""
    kinds: dict[str, type[GymdataError]] = {
        kind.__name__: kind for kind in (UsageError, MissingExtraError, DataError, RefusedError, StoreError)
    }
    hint = document["hint"]
    if "system" in document:
        repeating = {name: document[name] for name in OutsideError._repeating}
        error: GymdataError = OutsideError(document["system"], document["reason"], hint=hint, **repeating)
    else:
        error = kinds.get(document["type"], GymdataError)(document["message"], hint=hint)
    if isinstance(error, UsageError):
        error.faults = tuple(cast(UsageError, reported(fault)) for fault in document.get("faults", ()))
    error.exit_code, error.code = int(document["exit_code"]), document["code"]
    error.where, error.got, error.expected = document["where"], document["got"], document["expected"]
    return error


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
        module = str(getattr(named, "name", NAME))
        if module.partition(".")[0] == NAME:
            raise  # A missing module of gymdata is a defect, which no extra fixes.
        raise UsageError.missing_extra(module, extra) from error
