"""Every error that gymdata raises on purpose, and the wording of each.

What always holds: an error says what was got, what was expected, where it was, and what to do next; it carries the exit
code that the command line ends with; a fault from outside names the outside system that it came from. Callers build
errors through the named constructors, so that one fault has one wording.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

EXIT_OK = 0
EXIT_FAULTS = 1
EXIT_USAGE = 2
EXIT_OUTSIDE = 3
EXIT_INTERRUPTED = 130


#: Modules of the optional parts, each with the extra that brings it.
_EXTRA_OF = {
    "aiohttp": "collect", "jinja2": "collect", "transformers": "collect", "tokenizers": "collect",
    "huggingface_hub": "collect", "safetensors": "collect", "accelerate": "train", "datasets": "train",
    "matplotlib": "train", "numba": "train", "peft": "train", "torch": "train", "trl": "train",
    "vllm": "cpu' or 'gymdata[vllm]", "math_verify": "rewards", "jsonschema": "rewards", "fastapi": "serve",
    "uvicorn": "serve", "tensorboard": "train,tensorboard",
}  # fmt: skip


class GymdataError(Exception):
    """Base of all errors raised on purpose. ``exit_code`` is what a command ends with."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  → {self.hint}" if self.hint else self.message


class UsageError(GymdataError):
    """The command, its flags or its configuration cannot be honoured. ``faults``: each of them, where there are several."""

    faults: tuple[UsageError, ...] = ()

    @classmethod
    def several(cls, faults: Iterable[UsageError]) -> UsageError:
        """Everything that is wrong as one error, so that it can be corrected in one go. One fault stays as it is."""
        found = tuple(one for fault in faults for one in (fault.faults or (fault,)))
        if len(found) == 1:
            return found[0]
        error = cls(f"{len(found)} errors:\n" + "\n".join(f"- {fault}" for fault in found))
        error.faults = found
        return error

    @classmethod
    def unknown_key(cls, key: str, known: Iterable[str], where: str) -> UsageError:
        names = sorted(known)
        return cls(f"{where}: unknown key {key!r}", hint=_nearest(key, names) or f"known keys: {', '.join(names)}")

    @classmethod
    def unknown_choice(cls, what: str, got: str, known: Iterable[str]) -> UsageError:
        names = list(known)
        return cls(f"{what}: got {got!r}, expected one of {', '.join(names)}", hint=_nearest(got, names))

    @classmethod
    def bad_value(cls, what: str, got: object, expected: str, hint: str | None = None) -> UsageError:
        return cls(f"{what}: got {got!r}, expected {expected}", hint=hint)

    @classmethod
    def missing_extra(cls, module: str, extra: str) -> UsageError:
        return cls(
            f"this needs the Python module {module!r}, which is not installed", hint=f"pip install 'gymdata[{extra}]'"
        )

    @classmethod
    def missing_module(cls, error: ModuleNotFoundError) -> UsageError | None:
        """``missing_extra`` of a module that an import did not find; None when no extra brings it."""
        module = (error.name or "").partition(".")[0]
        return cls.missing_extra(module, _EXTRA_OF[module]) if module in _EXTRA_OF else None


class DataError(GymdataError):
    """A file or row is not what it must be."""

    @classmethod
    def missing_path(cls, path: Path | str, expected: str = "a run folder, a file or a glob") -> DataError:
        parent = Path(path).parent
        near = _nearest(Path(path).name, (p.name for p in parent.iterdir())) if parent.is_dir() else None
        return cls(f"{path}: no such file or folder (expected {expected})", hint=near)

    @classmethod
    def empty(cls, path: Path | str, expected: str) -> DataError:
        folder = Path(path)
        inside = [p.name for p in folder.iterdir() if p.suffix in (".parquet", ".jsonl")] if folder.is_dir() else []
        hint = f"it holds {', '.join(sorted(inside)[:6])}: give one of these, or another folder" if inside else None
        return cls(f"{path}: holds no rows (expected {expected})", hint=hint)

    @classmethod
    def not_a_run(cls, path: Path | str, found: Sequence[str]) -> DataError:
        inside = ", ".join(found[:6]) or "nothing"
        return cls(
            f"{path}: is a folder but not a run: it has no run.json (it holds {inside})",
            hint="give a folder that `gymdata collect -o` wrote, or a file or glob inside this one",
        )

    @classmethod
    def bad_row(
        cls, path: Path | str, line: int, field: str | None, got: str, expected: str, hint: str | None = None
    ) -> DataError:
        at = f"{path}, line {line}" + (f", field {field!r}" if field else "")
        return cls(f"{at}: got {got}, expected {expected}", hint=hint)

    @classmethod
    def unreadable(cls, path: Path | str, why: str, hint: str | None = None) -> DataError:
        return cls(f"{path}: cannot be read: {why}", hint=hint)

    @classmethod
    def newer_schema(cls, path: Path | str, table: str, got: int, known: int) -> DataError:
        return cls(
            f"{path}: {table} version {got} is newer than this gymdata understands ({known})",
            hint="pip install -U gymdata",
        )

    @classmethod
    def altered(cls, code: str, where: str, what: str) -> DataError:
        """Turns that are not as they were collected (T209, T210). Their rows are faults of the data, not of the command."""
        error = cls(
            f"{code}: {where}: {what}",
            hint="the data was changed after collection: `gymdata validate` lists every such turn, and "
            "`gymdata validate --fix drop -o OUT` leaves their rollouts out",
        )
        error.exit_code = EXIT_FAULTS
        return error

    @classmethod
    def wrong_table(cls, path: Path | str, got: str, expected: str) -> DataError:
        return cls(f"{path}: holds the table {got!r}, expected {expected!r}")

    @classmethod
    def missing_columns(cls, path: Path | str, table: str, missing: Sequence[str], has: Sequence[str]) -> DataError:
        return cls(f"{path}: table {table} lacks the column(s) {', '.join(missing)} (has {', '.join(has[:20])})")


class RefusedError(GymdataError):
    """The data is readable, but using it for this would break the promise; the validation code says why."""

    exit_code = EXIT_FAULTS

    def __init__(self, message: str, *, code: str | None = None, hint: str | None = None) -> None:
        super().__init__(f"{code}: {message}" if code else message, hint=hint)
        self.code = code


class StoreError(GymdataError):
    """A run folder cannot be opened or written as asked."""

    @classmethod
    def locked(cls, run: Path, holder: str) -> StoreError:
        return cls(
            f"{run}: another process writes to this run ({holder})",
            hint="wait for it, stop it, or give another output folder",
        )

    @classmethod
    def written(cls, path: Path) -> StoreError:
        return cls(f"{path}: another process is writing it", hint="wait for it, stop it, or give another output folder")

    @classmethod
    def other_identity(cls, run: Path, differences: Sequence[tuple[str, object, object]]) -> StoreError:
        lines = "; ".join(f"{key}: run has {was!r}, now {now!r}" for key, was, now in differences)
        return cls(
            f"{run}: was made with other settings: {lines}",
            hint="use the same settings to resume, another output folder for a new run, or --overwrite to start again",
        )

    @classmethod
    def edited_task(cls, run: Path, task_ids: Sequence[str]) -> StoreError:
        return cls(
            f"{run}: {len(task_ids)} task(s) were edited since rollouts of them were collected "
            f"(first: {task_ids[0]!r})",
            hint="give edited tasks a new task_id, or collect into another folder",
        )

    @classmethod
    def disk(cls, path: Path, why: str) -> StoreError:
        error = cls(
            f"{path}: could not be written: {why}",
            hint="rows journaled so far are safe; free space and run the same command to go on",
        )
        error.exit_code = EXIT_OUTSIDE
        return error


class OutsideError(GymdataError):
    """An outside system failed. ``system`` is one of engine, environment, judge, trainer.

    The message may quote anything; lone surrogates in it, which no file can hold, become question marks.
    """

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
    ) -> None:
        super().__init__(f"{system}: {message}".encode("utf-8", "replace").decode(), hint=hint)
        self.system = system
        self.retryable = retryable
        self.retry_after_s = retry_after_s
        #: The system is gone: other requests to it cannot succeed either.
        self.fatal = fatal


def _nearest(got: str, known: Iterable[str]) -> str | None:
    match = difflib.get_close_matches(got, list(known), n=1, cutoff=0.6)
    return f"did you mean {match[0]!r}?" if match else None
