"""A reward server."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

PATH = "/get_reward"


@dataclass
class Behaviour:
    """``broken``: every answer is a 500."""

    broken: bool = False
    #: Reward in place of each query that holds the text.
    instead: dict[str, Any] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)


def reward_of(query: str) -> float:
    return len(query) / 10


def app_of(behaviour: Behaviour) -> web.Application:
    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        behaviour.requests.append(body)
        if behaviour.broken:
            return web.Response(status=500, text="boom")
        rewards: list[Any] = [
            next((value for text, value in behaviour.instead.items() if text in query), reward_of(query))
            for query in body["queries"]
        ]
        return web.Response(text=json.dumps({"rewards": rewards}))

    app = web.Application()
    app.router.add_post(PATH, answer)
    return app
