"""Where rollouts happen: plain single-turn answers, tools from a user's Python file, servers behind HTTP."""

from __future__ import annotations

from collections.abc import Callable

from gymdata.environments.python_tools import PythonTools
from gymdata.environments.resource_server import ResourceServer
from gymdata.environments.single_turn import SingleTurn

__all__ = ["PythonTools", "ResourceServer", "SingleTurn", "load_environment", "server_url"]


def load_environment(
    spec: str | None, *, tool_timeout_s: float = 60.0, server: Callable[[str], ResourceServer] | None = None
) -> SingleTurn | PythonTools | ResourceServer:
    """``None``: one answer and done. ``path.py:Name``: see ``PythonTools``. A URL: what ``server`` makes of it.

    Raises UsageError when it cannot be loaded."""
    if spec is None:
        return SingleTurn()
    url = server_url(spec)
    if url is not None and server is not None:
        return server(url)
    return PythonTools.load(spec, timeout_s=tool_timeout_s)


def server_url(spec: str | None) -> str | None:
    """The URL in ``http://…``, ``https://…`` or ``resources:http://…``; None for anything else."""
    url = (spec or "").removeprefix("resources:")
    return url if url.startswith(("http://", "https://")) else None
