"""URLs: of outside systems in settings (how they are checked, put together, and handed to child processes), and those
that gymdata's servers listen on.

Invariants: a user name or password in a URL is refused; a query string is part of every request and is never shown
(``gymdata.errors``); the settings file of a child process holds placeholders, and their values are in its environment
only. gymdata's servers answer only requests that name the machine they run on.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from gymdata.errors import HIDDEN, PLACEHOLDER, OutsideError, UsageError, each_text, option, query_values, redacted

#: System → the environment variables that may hold its API key, the first one set wins.
API_KEYS = {
    "engine": ("VLLM_API_KEY", "OPENAI_API_KEY"),
    "judge": ("JUDGE_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY"),
    "environment": ("ENVIRONMENT_API_KEY",),
    "reward": ("GYMDATA_REWARD_API_KEY",),
}
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d{1,5}(/|$)")
#: A URL in a setting, behind the name of one of several environments, and what kind it is.
_URL = re.compile(r"(?:[A-Za-z_][\w.-]*=)?(?:resources:)?https?://")
_USERINFO = re.compile(rf"{_URL.pattern}[^/?#]*@")
KEYS_HINT = (
    "put the key into VLLM_API_KEY, JUDGE_API_KEY, ENVIRONMENT_API_KEY or GYMDATA_REWARD_API_KEY; it is sent as "
    "`Authorization: Bearer KEY`"
)
#: Shorter values of a query (``v=1``) are parts of too many words to be taken out of an answer that quotes them.
_SHORTEST_SECRET = 6
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

    def without_secrets(self, text: str) -> str:
        """What a server answers, which may quote the request's address."""
        for _, secret in query_values(self.query):
            text = text.replace(secret, HIDDEN) if len(secret) >= _SHORTEST_SECRET else text
        return text

    def __str__(self) -> str:
        return redacted(self.url())


def address(url: str, setting: str, example: str) -> Address:
    """The address of ``url``. Raises UsageError for what is no URL, holds a user name or password, or was redacted."""
    url = f"http://{url}" if _HOST_AND_PORT.match(url) else url
    refuse_userinfo(url, setting)
    root, _, query = url.partition("#")[0].partition("?")
    if f"={HIDDEN}" in query:
        text = f"{setting}: {url}: the values of its query were taken out when it was written down"
        raise UsageError(text, hint="give the URL again, with its values")
    try:
        parts = urlsplit(root)
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # no host, or no port, is so written
        is_url = False
    if not is_url:
        raise UsageError.bad_value(setting, redacted(url), f"a URL such as {example}")
    return Address(root.rstrip("/"), query)


def has_userinfo(text: object) -> bool:
    """Whether a setting is a URL with a user name or password in it."""
    return isinstance(text, str) and _USERINFO.match(text) is not None


def refuse_userinfo(url: str, setting: str) -> None:
    """Raises UsageError for a URL with a user name or password in it. Anything else passes."""
    if has_userinfo(url):
        raise UsageError.bad_value(setting, redacted(url), "a URL without a user name or password", KEYS_HINT)


def for_child(settings: Any) -> Any:
    """``settings`` with placeholders for the values in the query strings of their URLs (see ``placeholder_values``)."""
    return each_text(settings, _with_placeholders)


def _with_placeholders(text: str) -> str:
    if not _URL.match(text) or "?" not in text:
        return text
    root, _, query = text.partition("#")[0].partition("?")
    return f"{root}?" + "&".join(f"{before}{_placeholder(value)}" for before, value in query_values(query))


def _placeholder(value: str) -> str:
    if not value or PLACEHOLDER.fullmatch(value):
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

    def filled(text: str) -> str:
        for name in PLACEHOLDER.findall(text) if _URL.match(text) else ():
            if name not in os.environ:
                fault = f"{where}: {text}: {name} is not in the environment"
                raise UsageError(fault, hint="set it to the value that the URL needs there, or give the URL again")
            text = text.replace(f"${{{name}}}", os.environ[name])
        return text

    return each_text(settings, filled)


class OnlyHosts:
    """ASGI middleware that refuses requests whose Host header names another machine: a web page whose name was made to point
    here has its own.

    The loopback names and the address that the request came in at are always taken, and ``hosts``.
    """

    def __init__(self, app: Any, hosts: Iterable[str]) -> None:
        self.app, self.hosts = app, [*LOOPBACK, *(host.lower() for host in hosts)]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer = self.app
        if scope["type"] == "http":
            values = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            hosts = [*self.hosts, *([str(scope["server"][0])] if scope.get("server") else [])]
            if len(values) != 1 or host_name(values[0]) not in hosts:
                from starlette.responses import JSONResponse

                detail = f"Host: got {', '.join(values) or 'none'!r}, expected one of {', '.join(dict.fromkeys(hosts))}"
                hint = option("allow_host", host_name(values[0]) if values else "NAME")
                body = {"detail": f"{detail} (start the server with {hint})", "kind": "host", "hint": hint}
                answer = JSONResponse(body, 403)
        await answer(scope, receive, send)


def host_name(header: str) -> str:
    """The name in a Host header: without the port, the brackets of an IPv6 address and a final dot."""
    bracketed = re.fullmatch(r"\[([^]]*)\](:\d*)?", header.strip())
    name = bracketed[1] if bracketed else re.sub(r":\d*$", "", header.strip())
    return name.lower().removesuffix(".")


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens on ``host``; port 0 takes a free one. Raises OutsideError when it cannot be had."""
    is_v6 = ":" in host
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    try:
        # From now on a request waits for the server instead of being refused.
        return socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=is_v6)
    except OSError as error:
        why = str(error.strerror).partition(" (while")[0]
        text = f"{host}:{port} cannot be served on: {why}"
        raise OutsideError("environment", text, hint=f"give another {option('port')}") from error


def address_of(bound: socket.socket) -> str:
    """The base URL of a server that listens on ``bound``."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
