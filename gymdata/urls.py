"""URLs: of outside systems in settings (how they are checked, put together, and handed to child processes), and those
that gymdata's servers listen on.

Invariants: a user name or password in a URL is refused; a query string is part of every request and is never shown
(``gymdata.errors``); the settings file of a child process holds placeholders, and their values are in its environment
only. gymdata's servers answer only requests that name the machine they run on.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from gymdata.errors import HIDDEN, PLACEHOLDER, OutsideError, UsageError, option, redacted

#: Environment variables that may hold the API key of a system, the first one set wins.
ENGINE_KEYS = ("VLLM_API_KEY", "OPENAI_API_KEY")
JUDGE_KEYS = ("JUDGE_API_KEY", *ENGINE_KEYS)
ENVIRONMENT_KEYS = ("ENVIRONMENT_API_KEY",)
REWARD_KEYS = ("GYMDATA_REWARD_API_KEY",)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SCHEMES = ("http://", "https://")
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d{1,5}(/|$)")
#: Prefixes of a URL in a setting: the name of one of several environments, and what kind it is.
_BEFORE = re.compile(r"(?:[A-Za-z_][\w.-]*=)?(?:resources:)?(?=https?://)")
#: Placeholder names and values that child processes of this one need.
_for_children: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Address:
    """A checked URL. ``root``: without query and without a slash at its end; its text is fit to be shown."""

    root: str
    query: str = field(default="", repr=False)

    def url(self, path: str = "") -> str:
        """The address of ``path`` (which begins with a slash, or is empty) under this one."""
        return f"{self.root}{path}" + (f"?{self.query}" if self.query else "")

    def without(self, suffix: str) -> Address:
        """This without ``suffix`` at the end of its path."""
        return Address(self.root.removesuffix(suffix).rstrip("/"), self.query)

    @property
    def secrets(self) -> tuple[str, ...]:
        return tuple(value for pair in self.query.split("&") if (value := pair.rpartition("=")[2]))

    def __str__(self) -> str:
        return redacted(self.url())


def with_scheme(url: str) -> str:
    """``url``, where it is HOST:PORT and no more a URL of http."""
    return f"http://{url}" if _HOST_AND_PORT.match(url) else url


def address(url: str, setting: str, example: str, keys: tuple[str, ...] = ()) -> Address:
    """The address of ``url``. ``keys``: environment variables that may hold the API key.

    Raises UsageError for what is no URL, holds a user name or password, or was redacted.
    """
    url = with_scheme(url)
    if not url.startswith(_SCHEMES):
        raise UsageError.bad_value(setting, redacted(url), f"a URL such as {example}")
    refuse_userinfo(url, setting, keys)
    root, _, query = url.partition("#")[0].partition("?")
    if f"={HIDDEN}" in query:
        raise UsageError(
            f"{setting}: {url}: the values of its query were taken out when it was written down",
            hint="give the URL again, with its values",
        )
    try:
        named = urlsplit(root).hostname
    except ValueError:
        named = None
    if not named:
        raise UsageError.bad_value(setting, redacted(url), f"a URL such as {example}")
    return Address(root.rstrip("/"), query)


def refuse_userinfo(url: str | None, setting: str, keys: tuple[str, ...] = ()) -> None:
    """Raises UsageError for a URL with a user name or password in it. Anything else passes."""
    if url is None or not url.startswith(_SCHEMES):
        return
    authority = url.partition("://")[2].partition("/")[0].partition("?")[0].partition("#")[0]
    if "@" in authority:
        where = f"put the key into {' or '.join(keys)}; it is sent as `Authorization: Bearer KEY`" if keys else None
        raise UsageError(f"{setting}: {redacted(url)}: a user name or password does not belong in a URL", hint=where)


def for_child(settings: Any) -> Any:
    """``settings`` with placeholders for the values in the query strings of their URLs (see ``placeholder_values``)."""
    if isinstance(settings, Mapping):
        return {key: for_child(value) for key, value in settings.items()}
    if isinstance(settings, (list, tuple)):
        return [for_child(value) for value in settings]
    if not isinstance(settings, str) or not _BEFORE.match(settings) or "?" not in settings:
        return settings
    root, _, query = settings.partition("#")[0].partition("?")
    pairs = []
    for pair in query.split("&"):
        name, equals, value = pair.partition("=")
        pairs.append(f"{name}{equals}{_placeholder(value)}" if equals and value else pair and _placeholder(pair))
    return f"{root}?{'&'.join(pairs)}"


def _placeholder(value: str) -> str:
    if PLACEHOLDER.fullmatch(value):
        return value
    name = next((name for name, secret in _for_children.items() if secret == value), None)
    if name is None:
        name = f"GYMDATA_SECRET_{len(_for_children) + 1}"
        _for_children[name] = value
    return f"${{{name}}}"


def placeholder_values() -> dict[str, str]:
    """The values of ``for_child``'s placeholders."""
    return dict(_for_children)


def expanded(settings: Any, where: str) -> Any:
    """``settings`` with the placeholders in their URLs filled from the environment. Raises UsageError for a missing one."""
    if isinstance(settings, Mapping):
        return {key: expanded(value, where) for key, value in settings.items()}
    if isinstance(settings, list):
        return [expanded(value, where) for value in settings]
    if not isinstance(settings, str) or not _BEFORE.match(settings):
        return settings
    for name in PLACEHOLDER.findall(settings):
        if name not in os.environ:
            raise UsageError(
                f"{where}: {settings}: {name} is not in the environment",
                hint="set it to the value that the URL needs there, or give the URL again",
            )
    return PLACEHOLDER.sub(lambda match: os.environ[match[1]], settings)


class OnlyHosts:
    """ASGI middleware that refuses requests whose Host header names another machine: a web page whose name was made to point
    here has its own.

    The loopback names and the address that the request came in at are always taken, and ``hosts``.
    """

    def __init__(self, app: Any, hosts: Iterable[str]) -> None:
        self.app, self.hosts = app, [*LOOPBACK, *(host.lower() for host in hosts)]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            values = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            names = [host_name(value) for value in values]
            hosts = [*self.hosts, *([str(scope["server"][0])] if scope.get("server") else [])]
            if len(names) != 1 or names[0] not in hosts:
                detail = f"Host: got {', '.join(values) or 'none'!r}, expected one of {', '.join(dict.fromkeys(hosts))}"
                hint = option("allow_host", names[0] if names else "NAME")
                body = {"detail": f"{detail} (start the server with {hint})", "kind": "host", "hint": hint}
                text = json.dumps(body).encode()
                headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
                await send({"type": "http.response.start", "status": 403, "headers": headers})
                await send({"type": "http.response.body", "body": text})
                return
        await self.app(scope, receive, send)


def host_name(header: str) -> str:
    """The name in a Host header: without the port, the brackets of an IPv6 address and a final dot."""
    bracketed = re.fullmatch(r"\[([^]]*)\](:\d*)?", header.strip())
    name = bracketed[1] if bracketed else re.sub(r":\d*$", "", header.strip())
    return name.lower().removesuffix(".")


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens on ``host``; port 0 takes a free one. Raises OutsideError when it cannot be had."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        # From now on a request waits for the server instead of being refused.
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise OutsideError(
            "environment", f"{host}:{port} cannot be served on: {error.strerror}", hint=f"give another {option('port')}"
        ) from error
    return bound


def address_of(bound: socket.socket) -> str:
    """The base URL of a server that listens on ``bound``."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
