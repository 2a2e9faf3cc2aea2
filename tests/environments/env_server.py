"""A small real HTTP server with the endpoints of a resource server, which misbehaves on demand.

``modes``: path → what becomes of its next requests, one a request; the last one stays. ``ok`` behaves; a number is that
status; anything else in ``answers`` replaces the answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests import servers

JUDGE = {"_ng_failure_class": "judge_failed", "_ng_failure_judge_error": "ClientConnectorError: refused"}
#: The six forms of a verdict, each beside a reward of 1 or of 0.
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"reward": 1.0},
    "mask_sample": {"reward": 1.0, "mask_sample": True},
    "instance_config": {"reward": 0.0, "instance_config": {"mask_sample": True}},
    "judge_failed": {"reward": 0.0, **JUDGE},
    "transient": {"reward": 0.0, "_ng_failure_class": "transient"},
    "no_persist": {"reward": 0.0, "_ng_no_persist": True},
}


@dataclass
class Server:
    """What it is told to do, and what it was asked: (path, session cookie, body)."""

    modes: dict[str, list[str]] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)
    retry_after: str = "0"
    asked: list[tuple[str, str | None, Any]] = field(default_factory=list)
    url: str = ""
    sessions: int = 0

    def bodies(self, path: str) -> list[Any]:
        return [body for where, _, body in self.asked if where == path]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path, body = request.path, await request.json()
        cookie = request.cookies.get("session")
        self.asked.append((path, cookie, body))
        given = self.modes.get(path) or ["ok"]
        mode = given.pop(0) if len(given) > 1 else given[0]
        if mode.isdigit():
            return web.json_response(
                {"detail": f"told {mode}"}, status=int(mode), headers={"Retry-After": self.retry_after}
            )
        if mode != "ok":
            return web.Response(text=self.answers[mode], content_type="application/json")
        return self.good(path, cookie, body)

    def good(self, path: str, cookie: str | None, body: Any) -> web.StreamResponse:
        if path == "/seed_session":
            self.sessions += 1
            response = web.json_response({})
            response.set_cookie("session", f"s{self.sessions}=")
            return response
        if path == "/verify":
            return web.json_response({**body, "reward": 0.5, "graded_by": cookie})
        if path == "/add":
            return web.json_response(body["a"] + body["b"])
        return web.json_response({"detail": "Not Found"}, status=404)


def app_of(server: Server) -> web.Application:
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/{path:.*}", server.handle)
    return app


@contextlib.contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Up on a thread of its own, with ``url``."""
    with servers.serving(app_of(server)) as server.url:
        yield server
