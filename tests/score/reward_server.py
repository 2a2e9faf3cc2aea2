"""A reward server that misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

PATH = "/get_reward"


@dataclass
class Behaviour:
    """``faults`` are used up one a request; ``always`` never ends. ``poison``: a text that the server answers 500 to."""

    faults: list[str] = field(default_factory=list)
    always: str | None = None
    poison: str | None = None
    #: Reward in place of each query that holds the text.
    instead: dict[str, Any] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)


def reward_of(query: str) -> float:
    return len(query) / 10


def app_of(behaviour: Behaviour) -> web.Application:
    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        behaviour.requests.append(body)
        fault = behaviour.faults.pop(0) if behaviour.faults else behaviour.always
        if behaviour.poison and any(behaviour.poison in query for query in body["queries"]):
            fault = "500"
        if fault == "429":
            return web.Response(status=429, headers={"Retry-After": "0"}, text="slow down")
        if fault == "500":
            return web.Response(status=500, text="boom")
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "garbage":
            return web.Response(text="<html>bad gateway</html>")
        if fault == "disconnect":
            assert request.transport is not None
            request.transport.close()
        rewards: list[Any] = [
            next((value for text, value in behaviour.instead.items() if text in query), reward_of(query))
            for query in body["queries"]
        ]
        if fault in ("short", "one"):
            rewards = rewards[: {"short": -1, "one": 1}[fault]]
        return web.Response(text=json.dumps({"scores": rewards} if fault == "keys" else {"rewards": rewards}))

    app = web.Application()
    app.router.add_post(PATH, answer)
    return app
