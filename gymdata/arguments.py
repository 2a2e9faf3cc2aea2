"""The first argument of public functions: a path, or several. Anything else gets one sentence."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gymdata.errors import UsageError

Paths = str | Path | Iterable[str | Path]
_PATH = "the path of a run folder, a file or a glob"


def path_of(value: Any, function: str, expected: str = _PATH) -> str | Path:
    """``value`` if it is a path. Raises UsageError naming the function, what it got and what it expected."""
    if isinstance(value, (str, Path)):
        return value
    if isinstance(value, os.PathLike) and isinstance(path := os.fspath(value), str):
        return path
    raise wrong_argument(value, function, expected)


def paths_of(value: Paths, function: str, expected: str = f"{_PATH}, or several of them") -> list[str | Path]:
    """The paths that ``value`` is or holds. Raises UsageError as ``path_of``, and when it holds none."""
    if isinstance(value, (list, tuple, set, frozenset)) or (isinstance(value, Iterable) and iter(value) is value):
        found = [path_of(one, function, expected) for one in value]
        if found:
            return found
        raise UsageError(f"gymdata.{function}: got no paths, expected {expected}")
    return [path_of(value, function, expected)]


def wrong_argument(value: Any, function: str, expected: str) -> UsageError:
    """The first argument of ``gymdata.function`` is of another kind."""
    hint = None
    if hasattr(value, "write_parquet") or hasattr(value, "to_parquet"):
        hint = "rollouts are read from files: give the path of the run that they came from"
    return UsageError(f"gymdata.{function}: got {described(value)}, expected {expected}", hint=hint)


def described(value: Any) -> str:
    """What a value is, in a few words: ``the int 3``, ``a DataFrame of pandas``."""
    if value is None:
        return "None"
    kind = type(value)
    if isinstance(value, (bool, int, float, bytes)):
        text = repr(value)
        return f"the {kind.__name__} {text if len(text) <= 40 else text[:37] + '...'}"
    root = kind.__module__.partition(".")[0]
    article = "an" if kind.__name__[:1].lower() in "aeiou" else "a"
    if root in ("builtins", "__main__"):
        size = f" with {len(value)} keys" if isinstance(value, Mapping) else ""
        return f"{article} {kind.__name__}{size}"
    return f"{article} {kind.__name__} of {root}"
