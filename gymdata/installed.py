"""How this copy of gymdata was installed, and so the pip command that adds an extra to it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

NAME = "gymdata"
_PACKAGE = Path(__file__).resolve().parent


def install_command(extra: str, *, package: Path = _PACKAGE, dist: Distribution | None = None) -> str:
    """The command that adds ``extra`` ("train", or several: "train,tensorboard") to this copy, quoted for a shell.

    ``package``, ``dist``: the folder and the distribution, in place of the running ones.
    """
    if (folder := checkout(package)) is not None:
        place = "." if folder == Path.cwd() else folder
        return f"pip install -e {shlex.quote(f'{place}[{extra}]')}"
    dist = dist or next(iter(Distribution.discover(name=NAME)), None)
    if (source := _source(dist)) is None:
        requirements = _requirements(dist, extra.split(","))
    else:
        requirements = [f"{source}[{extra}]" if source.startswith("/") else f"{NAME}[{extra}] @ {source}"]
    return shlex.join(["pip", "install", *requirements])


def checkout(package: Path = _PACKAGE) -> Path | None:
    """The checkout that this copy runs from; None for an installed copy."""
    project = package.parent / "pyproject.toml"
    is_ours = project.is_file() and f'\nname = "{NAME}"\n' in project.read_text(encoding="utf-8")
    return package.parent if is_ours else None


def _source(dist: Distribution | None) -> str | None:
    """The folder or file (an absolute path) or the URL that pip installed from (PEP 610); None where pip kept none, or the
    file is gone. Of a repository the very commit: an extra must not bring other code."""
    text = dist.read_text("direct_url.json") if dist is not None else None
    if text is None:
        return None
    origin: Mapping[str, Any] = json.loads(text)
    url = urlsplit(str(origin["url"]))
    if url.scheme == "file" and "vcs_info" not in origin:
        path = Path(unquote(url.path))
        return str(path) if path.exists() else None
    # A password in a URL is never shown.
    plain = urlunsplit(url._replace(netloc=url.netloc.rpartition("@")[2]))
    if "vcs_info" not in origin:
        return plain
    vcs = origin["vcs_info"]
    folder = f"#subdirectory={origin['subdirectory']}" if origin.get("subdirectory") else ""
    return f"{vcs['vcs']}+{plain}" + (f"@{vcs['commit_id']}" if vcs.get("commit_id") else "") + folder


def _requirements(dist: Distribution | None, extras: list[str]) -> list[str]:
    """The requirements of the extras, including those of other extras that they name."""
    requirements: dict[str, None] = {}
    for line in (dist.requires if dist is not None else None) or []:
        needed, _, marker = (part.strip() for part in line.partition(";"))
        if not any(re.search(rf"""extra == ["']{re.escape(extra)}["']""", marker) for extra in extras):
            continue
        inner = re.fullmatch(rf"{NAME}\[(.*)\]", needed)
        requirements |= dict.fromkeys(_requirements(dist, inner[1].split(",")) if inner else [needed])
    return list(requirements)
