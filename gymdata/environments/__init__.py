"""Where rollouts happen: plain single-turn answers, tools and users from a user's Python file, servers behind HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from gymdata.environments.by_name import ByName
from gymdata.environments.port import Environment
from gymdata.environments.python_tools import PythonTools
from gymdata.environments.resource_server import ResourceServer
from gymdata.environments.single_turn import SingleTurn
from gymdata.environments.user import WithUser, given_user, load_user
from gymdata.errors import UsageError

__all__ = [
    "ByName",
    "PythonTools",
    "ResourceServer",
    "SingleTurn",
    "WithUser",
    "given_environment",
    "given_user",
    "load_environment",
    "load_user",
    "server_url",
]


def load_environment(
    spec: str | None,
    *,
    tool_timeout_s: float = 60.0,
    server: Callable[[str], ResourceServer] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> SingleTurn | PythonTools | ResourceServer:
    """``None``: one answer and done. ``path.py:Name``: see ``PythonTools``; ``arguments`` are those of the class. A URL:
    what ``server`` makes of it.

    Raises UsageError when it cannot be loaded."""
    url = server_url(spec)
    if arguments and (spec is None or url is not None):
        raise UsageError(
            f"--set env_args: {spec or 'no environment'} takes no arguments", hint="they are for --env path.py:Class"
        )
    if spec is None:
        return SingleTurn()
    if url is not None and server is not None:
        return server(url)
    return PythonTools.load(spec, timeout_s=tool_timeout_s, arguments=arguments)


def given_environment(env: Any, *, tool_timeout_s: float = 60.0) -> Environment:
    """An environment that was given as an object: a class or instance with tools, functions, or an ``Environment``.

    Raises UsageError when the policy gets no tools from it."""
    if not isinstance(env, type) and all(hasattr(env, name) for name in ("identity", "start", "close")):
        return cast("Environment", env)
    if isinstance(env, (bool, int, float, bytes, Mapping)):
        raise UsageError.bad_value("env", env, "path.py:Name, a URL, a class, an instance or functions")
    return PythonTools.from_object(env, timeout_s=tool_timeout_s)


def server_url(spec: str | None) -> str | None:
    """The URL in ``http://…``, ``https://…`` or ``resources:http://…``; None for anything else."""
    url = (spec or "").removeprefix("resources:")
    return url if url.startswith(("http://", "https://")) else None
