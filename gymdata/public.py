"""Shared by the public functions: the first argument (a path, or several; anything else gets one sentence), and what
their results can do."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from gymdata.errors import EXIT_FAULTS, EXIT_OK, UsageError, brief, short
from gymdata.store.fetch import fetched, is_url

Paths = str | Path | Iterable[str | Path]
#: A name and a value of a summary, as people read them.
Row = tuple[str, object]
#: A report, the result of a stage, or a part of one, as JSON has it: numbers, and what they are of, by name.
Figures = dict[str, Any]
_PATH = "the path of a run folder, a file or a glob"


def path_of(value: Any, function: str, expected: str = _PATH) -> str | Path:
    """``value`` if it is a path; for a URL where it was fetched to. Raises UsageError naming the function, what it got and
    what it expected."""
    if isinstance(value, os.PathLike) and not isinstance(value, Path) and isinstance(path := os.fspath(value), str):
        value = path
    if isinstance(value, (str, Path)):
        return fetched(value) if is_url(value) else value
    raise wrong_argument(value, function, expected)


def paths_of(value: Paths, function: str, expected: str = f"{_PATH}, or several of them") -> list[str | Path]:
    """The paths that ``value`` is or holds. Raises UsageError as ``path_of``, and when it holds none."""
    if isinstance(value, (list, tuple, set, frozenset)) or (isinstance(value, Iterable) and iter(value) is value):
        paths = [path_of(path, function, expected) for path in value]
        if paths:
            return paths
        raise UsageError(f"gymdata.{function}: got no paths, expected {expected}")
    return [path_of(value, function, expected)]


def checked_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which raises UsageError for a text where it takes True or False: ``overwrite="no"`` would overwrite."""
    parameters = inspect.signature(function).parameters.values()
    flags = {parameter.name for parameter in parameters if parameter.annotation == "bool"}

    @functools.wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
        for name in flags & named.keys():
            if isinstance(named[name], str):
                raise UsageError.bad_value(name, named[name], "True or False")
        return function(*args, **named)

    return checked


def wrong_argument(value: Any, function: str, expected: str) -> UsageError:
    """The first argument of ``gymdata.function`` is of another kind."""
    is_frame = hasattr(value, "write_parquet") or hasattr(value, "to_parquet")
    hint = "rollouts are read from files: give the path of the run that they came from" if is_frame else None
    return UsageError(f"gymdata.{function}: got {described(value)}, expected {expected}", hint=hint)


def described(value: Any) -> str:
    """A short description of a value: ``int 3``, ``DataFrame of pandas``."""
    if value is None:
        return "None"
    if isinstance(value, (bool, int, float, bytes)):
        return f"{type(value).__name__} {brief(value, 40)}"
    root = type(value).__module__.partition(".")[0]
    return type(value).__name__ + ("" if root in ("builtins", "__main__") else f" of {root}")


def rate_text(figures: Mapping[str, Any], of: int | None = None) -> str:
    """A ``rate`` (of ``of`` items) with its 95 % interval (``ci95``), for people; a dash for no rate. A single task has
    a rate and no interval: its bounds are NaN, in files null."""
    if figures["rate"] is None:
        return "–"
    bounds = [100 * end for end in figures["ci95"] or () if end is not None and not math.isnan(end)]
    interval = " (95 %: {:.1f} to {:.1f})".format(*bounds) if bounds else ""
    count = f" of {of:,}" if of is not None else ""
    return f"{100 * figures['rate']:.1f} %{count}{interval}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines)


class Report(Protocol):
    """The result of a command's function, a dataclass: the summary table, ``--json`` and the exit code are derived from
    it."""

    @property
    def ok(self) -> bool:
        """No faults were found in the data, and no rows failed."""
        return True

    @property
    def exit_code(self) -> int:
        """The exit code of the command: 0, or 1 where it is not ``ok``; 130 after an interruption."""
        return EXIT_OK if self.ok else EXIT_FAULTS

    def to_dict(self) -> Figures:
        """The object that ``--json`` prints."""
        return dataclasses.asdict(cast("Any", self))

    def rows(self) -> list[Row]:
        """The summary: names and values."""
        ...

    def __repr__(self) -> str:
        """``PairsReport(score='reward', table=3 rows)``: scalars as they are, of everything else only how much."""
        shown = []
        for field in dataclasses.fields(cast("Any", self)):
            value = getattr(self, field.name)
            if isinstance(value, (str, Path)):
                shown.append(f"{field.name}={short(str(value), 80)!r}")
            elif isinstance(value, (bool, int, float)):
                shown.append(f"{field.name}={value:.6g}" if isinstance(value, float) else f"{field.name}={value}")
            elif hasattr(value, "num_rows"):
                shown.append(f"{field.name}={value.num_rows} rows")
            elif field.name == "ci95" and value:
                shown.append(f"{field.name}=({', '.join(f'{bound:.6g}' for bound in value)})")
            elif isinstance(value, (list, tuple)) and value:
                shown.append(f"{field.name}={len(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"
