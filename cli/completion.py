"""Shell completion: codes, run folders, reward names. Choices come from the settings' types."""

from __future__ import annotations

import copy
import typing
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from typer.models import ParameterInfo

from gymdata.store.paths import RUN_JSON

#: How deep below the typed folder run folders are searched for, and in how many folders at most.
_DEPTH, _MOST = 3, 2_000


def codes(incomplete: str) -> list[str]:
    """Codes of violations, in any case."""
    from gymdata.checks.violations import CODES

    return [code for code in CODES if code.startswith(incomplete.upper())]


def runs(incomplete: str) -> list[str]:
    """Folders with a run.json at or below the folder that is typed."""
    above, _, _ = incomplete.rpartition("/")
    start = above or ("/" if incomplete.startswith("/") else ".")
    prefix = "" if start == "." else f"{start.rstrip('/')}/"
    names: list[str] = []
    waiting, left = [(Path(start), _DEPTH)], _MOST
    while waiting and left:
        folder, depth = waiting.pop()
        try:
            inner = [entry for entry in folder.iterdir() if not entry.name.startswith(".") and entry.is_dir()]
        except OSError:
            continue
        for entry in inner[:left]:
            if (entry / RUN_JSON).is_file():
                names.append(f"{prefix}{entry.relative_to(start)}")
            if depth > 1:
                waiting.append((entry, depth - 1))
        left -= min(left, len(inner))
    return sorted(name for name in names if name.startswith(incomplete))


def named(module: str, registry: str, incomplete: str) -> list[str]:
    """Names of a registry, for settings that take something else as well."""
    return [name for name in getattr(import_module(module), registry).names() if name.startswith(incomplete)]


#: By the metavar in ``--help``.
_OFFERED: dict[str, Callable[[str], list[str]]] = {
    "CODE": codes,
    "LOSS": lambda incomplete: named("gymdata.commands.train.losses._registry", "REGISTRY", incomplete),
    "SPEC": lambda incomplete: named("gymdata.rewards.named", "REWARDS", incomplete),
}
_OFFERED |= dict.fromkeys(("RUN", "RUN…", "PATH", "PATH…", "PATH [PATH]", "[PATH]", "SQL PATH…"), runs)


def completing(hint: Any) -> Any:
    """The annotation of a parameter, with its completion."""
    if typing.get_origin(hint) is not Annotated:
        return hint
    kind, *infos = typing.get_args(hint)
    for n, info in enumerate(infos):
        offered = _OFFERED.get(str(getattr(info, "metavar", None)))
        if not isinstance(info, ParameterInfo) or offered is None or info.autocompletion:
            continue
        if "--env" not in (info.param_decls or ()):
            infos[n] = copy.copy(info)
            infos[n].autocompletion = offered
    return Annotated[(kind, *infos)]
